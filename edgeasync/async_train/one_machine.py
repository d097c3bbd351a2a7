"""`async_sgd`: trains a model with several processes on this machine, in one call."""

from typing import Any

import numpy as np

import edgeasync
from edgeasync.async_train.adapters import (
    as_data,
    as_optimizer,
    batch_size_of,
    put_back,
)
from edgeasync.async_train.cuda import usable
from edgeasync.async_train.data import DataLoader, Subset
from edgeasync.async_train.hub_model import as_trained, has_own_code
from edgeasync.async_train.model import Model
from edgeasync.async_train.optim import SGD, Optimizer
from edgeasync.async_train.watching import watched
from edgeasync.policies.frequency import FixedFrequency

LOCAL_STEPS = 8
"""Number of local steps between two exchanges; exchanges are cheap on one machine."""


def async_sgd(
    model: Any,
    data: object,
    num_workers: int = 4,
    num_epochs: float = 5,
    lr: float = 0.01,
    *,
    loss_fn: Any = None,
    optimizer: Any = None,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """Train a model with `num_workers` processes and a hub in this process; return the model.

    - `model`: a torch module, a model of `async_train.nn`, or an object with `parameters` and
      `gradient`. The trained values are written to this model, and it is returned. For an ONNX file
      or layers, a new `Model` is returned.
    - `data`: a dataset or a loader. A loader also sets the batch size. The examples are split among
      the workers.
    - `loss_fn`: by default, cross entropy. An object with `gradient` uses its own loss.
    - `optimizer`: by default, SGD with the learning rate `lr`.
    - Other arguments are those of `edgeasync.train`, such as `run`, `evaluate` and `topology`. With
      `topology="ring"` or `"all_to_all"`, the processes average their models without a hub.

    The calling script does not need a main guard, and may define the class of the model.

    >>> import numpy as np
    >>> from edgeasync.async_train import async_sgd, nn
    >>> model = nn.Sequential(nn.Linear(4, 2))
    >>> x = np.random.default_rng(0).normal(size=(64, 4))
    >>> trained = async_sgd(model, (x, x[:, 0] > 0), num_workers=2, num_epochs=2, lr=0.1, engine="tasks")
    >>> trained is model
    True
    """
    dataset, given = as_data(data), model
    parts = _parts(data, num_workers, seed)
    chosen = SGD(lr=lr) if optimizer is None else optimizer
    arguments: dict[str, Any] = {
        "workers": None if parts else num_workers,
        "until": edgeasync.Stop(epochs=num_epochs),
        "batch_size": batch_size_of(data),
        "engine": "processes",
        "policy": one_machine_policy(chosen) if settings.get("topology", "star") == "star" else None,
        "keep_optimizer_state": True,
        "seed": seed,
        **settings,
    }
    if not has_own_code(model) and not isinstance(model, Model):
        model = Model(model, seed=seed)
    arguments |= as_trained(model, dataset, chosen, loss_fn, usable(None, model, "async_sgd"))
    if arguments["policy"] is not None:  # without a hub, nothing can monitor the training
        arguments = watched(given, arguments)
    put_back(model, edgeasync.train(data=parts or dataset, **arguments).arrays)
    return model


def _parts(data: Any, workers: int, seed: int) -> list[edgeasync.Dataset]:
    """Return the data of each worker if examples are read from files; otherwise, an empty list."""
    samples = data.dataset if isinstance(data, DataLoader) else data
    if not getattr(samples, "lazy", False):
        return []
    order = np.random.default_rng(seed).permutation(len(samples))
    return [as_data(Subset(samples, part)) for part in np.array_split(order, workers) if len(part)]


def one_machine_policy(optimizer: Any) -> edgeasync.Policy:
    """Return the hub's policy for an optimizer, without momentum if the optimizer has momentum."""
    frequency = FixedFrequency(local_steps=LOCAL_STEPS)
    stage = as_optimizer(optimizer)
    groups = [stage.for_torch_options] if isinstance(stage, Optimizer) else getattr(stage, "param_groups", [])
    if any(group.get("momentum") for group in groups):
        return edgeasync.Policy(optimizer=(edgeasync.SGD(learning_rate=1.0),), frequency=frequency)
    return edgeasync.Policy(frequency=frequency)
