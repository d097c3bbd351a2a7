"""Converts models that programs pass to the toolbox into arguments for `Hub` and `train`."""

from typing import Any

from edgeasync import Dataset
from edgeasync.async_train.adapters import as_loss, as_maker, as_stages, has_parameters, is_torch


def has_own_code(model: object) -> bool:
    """Return whether a model is defined only by Python code, which every worker then needs."""
    return is_torch(model) or has_parameters(model)


def as_trained(model: Any, examples: Dataset, optimizer: Any, loss_fn: Any, device: str) -> dict[str, Any]:
    """Convert a model that is trained on `device` into arguments of `train`."""
    found, how = as_hub_model(model, examples, optimizer, loss_fn, device)
    how.pop("input_shape", None)  # known from the examples
    return how | {"model": found, "optimizer": None if is_torch(model) else as_stages(optimizer)}


def as_hub_model(
    model: Any, examples: Dataset | None, optimizer: Any, loss_fn: Any, device: str
) -> tuple[Any, dict[str, Any]]:
    """Convert a model that is trained on `device` into the model and other arguments of `Hub`."""
    if is_torch(model):
        import edgeasync.torch as ours  # noqa: PLC0415 - imports torch

        return ours.model(model, loss_fn, as_maker(optimizer), device=device), {}
    shape = None if examples is None else getattr(examples.features, "shape", None)  # None for several inputs
    if shape is not None and hasattr(model, "fit_to"):
        model.fit_to(shape[1:])
    return model, {"loss": as_loss(loss_fn)} | ({} if shape is None else {"input_shape": tuple(shape[1:])})
