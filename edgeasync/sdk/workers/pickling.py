"""Python objects as bytes, for a worker in another process: by value where it could not import them."""

import pickle
import traceback
from typing import Any

from edgeasync.errors import ConfigError, EdgeAsyncError
from edgeasync.sdk.workers.base import note_worker

HOW = "define it without open files, locks, sockets or running threads, or make these in `begin`"


def dump(value: object, what: str) -> bytes:
    """Return an object as bytes; raises `ConfigError` for one that has none, or without cloudpickle."""
    try:
        import cloudpickle  # noqa: PLC0415 - a device has none
    except ModuleNotFoundError:
        raise ConfigError(
            "engine='processes' needs the package cloudpickle; install it by pip install 'edgeasync[processes]'"
        ) from None
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be handed to a process: {' '.join(str(error).split())}; {HOW}, or use engine='tasks'"
        ) from error


def load(content: bytes) -> Any:
    """Return the object; the bytes are those of this program, in a folder that nobody else may write to."""
    return pickle.loads(content)  # noqa: S301


def dump_error(error: BaseException) -> bytes:
    """Return an error with the place where it was raised; one that cannot be pickled by what it says."""
    trace = "".join(traceback.format_exception(error))
    try:
        if not isinstance(error, Exception):
            raise TypeError("it would end the hub's process, too")  # noqa: TRY301 - as one that has no bytes
        content = dump((error, trace), "an error")
        load(content)  # an error whose constructor takes other arguments is found out here
    except Exception:  # noqa: BLE001 - of the error's own class
        content = pickle.dumps((EdgeAsyncError(f"{type(error).__name__}: {error}"), trace))
    return content


def load_error(content: bytes, name: str) -> BaseException:
    """Return the error of a worker, with a note of the worker and the place."""
    error, trace = load(content)
    return note_worker(error, name, trace)
