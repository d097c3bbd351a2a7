"""`async_sgd`: one call that trains a model with several processes of this machine."""

import sys
from collections.abc import Mapping
from typing import Any

import edgeasync
from edgeasync.async_train.data import as_dataset, batch_size_of
from edgeasync.async_train.learners import put_values, torch_loss
from edgeasync.async_train.loss_functions import loss_of
from edgeasync.async_train.model import Model
from edgeasync.async_train.optim import SGD


def async_sgd(
    model: Any,
    data: object,
    num_workers: int = 4,
    num_epochs: float = 5,
    lr: float = 0.01,
    *,
    loss_fn: Any = None,
    optimizer: Any = None,
    batch_size: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """Train a model with a hub here and `num_workers` processes; return the trained model.

    - `model`: a torch module, a model of `async_train.nn`, or an object with `parameters` and `gradient`. It has
      the trained values, too. What has no values of its own, an ONNX file or layers, comes back as a `Model`.
    - `data`: a dataset, or a loader, whose batch size is used; its examples are split among the workers.
    - `loss_fn`: by default cross entropy. A model of your own has its loss itself.
    - `optimizer`: by default SGD with the rate `lr`.
    - Others are those of `edgeasync.train`, such as `run` and `evaluate`.

    It needs no main guard, and the model may be of a class of the script that calls it.

    >>> import numpy as np
    >>> from edgeasync.async_train import async_sgd, nn
    >>> model = nn.Sequential(nn.Linear(4, 2))
    >>> x = np.random.default_rng(0).normal(size=(64, 4))
    >>> trained = async_sgd(model, (x, x[:, 0] > 0), num_workers=2, num_epochs=2, lr=0.1, engine="tasks")
    >>> trained is model
    True
    """
    dataset = as_dataset(data)
    usual: dict[str, Any] = {
        "workers": num_workers,
        "until": edgeasync.Stop(epochs=num_epochs),
        "batch_size": batch_size or batch_size_of(data),
        "engine": "processes",
        "seed": seed,
    }
    arguments: dict[str, Any] = usual | settings
    chosen = SGD(lr=lr) if optimizer is None else optimizer
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        make = chosen.maker_for_torch() if hasattr(chosen, "maker_for_torch") else chosen
        adapted = edgeasync.torch.model(model, None if loss_fn is None else torch_loss(loss_fn), make)
        return edgeasync.torch.load(model, edgeasync.train(adapted, dataset, **arguments))
    arguments["optimizer"] = chosen.optimizer() if hasattr(chosen, "optimizer") else chosen
    if not isinstance(model, Model) and isinstance(getattr(model, "parameters", None), Mapping):
        put_values(model, edgeasync.train(model, dataset, **arguments).arrays)
        return model
    trained = model if isinstance(model, Model) else Model(model, seed=seed)
    trained.fit_to(dataset.x.shape[1:])
    run = edgeasync.train(trained, dataset, loss=loss_of(loss_fn), **arguments)
    trained.load_state_dict(run.arrays)
    return trained
