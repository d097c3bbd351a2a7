"""What programs ask of a GPU: there is none here. edgeasync's own models compute with onnxruntime, on the CPU.

>>> from edgeasync.async_train import cuda
>>> cuda.is_available(), cuda.device_count()
(False, 0)
"""

from edgeasync.async_train.ignored import ignore

__all__ = ["device_count", "empty_cache", "is_available", "set_device", "synchronize"]


def is_available() -> bool:
    """Return False."""
    return False


def device_count() -> int:
    """Return 0."""
    return 0


def set_device(device: object) -> None:
    """Do nothing; say so once."""
    ignore("cuda.set_device", "models of edgeasync compute on the CPU", device=device)


def synchronize() -> None:
    """Do nothing: a call returns when it is done."""


def empty_cache() -> None:
    """Do nothing: there is none."""
