"""Pickles Python objects for workers in other processes, by value if they are not importable."""

import pickle
import traceback
from typing import Any

from edgeasync.errors import ConfigError, EdgeAsyncError
from edgeasync.sdk.workers.base import note_worker

HOW = "define it without open files, locks, sockets or running threads, or create these in `begin`"


def dump(value: object, what: str) -> bytes:
    """Serialize an object with cloudpickle.

    Raises `ConfigError` if it cannot be pickled or cloudpickle is missing.
    """
    try:
        import cloudpickle  # noqa: PLC0415 - not installed on devices
    except ModuleNotFoundError:
        raise ConfigError(
            "engine='processes' needs the package cloudpickle; run pip install 'edgeasync[processes]'"
        ) from None
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be pickled for a process: {' '.join(str(error).split())}; {HOW}, or use engine='tasks'"
        ) from error


def load(content: bytes) -> Any:
    """Unpickle an object; this program wrote the bytes to a folder that only its user may write."""
    return pickle.loads(content)  # noqa: S301


def dump_error(error: BaseException) -> bytes:
    """Pickle an error with its traceback; if it cannot be pickled, use only the error's text."""
    trace = "".join(traceback.format_exception(error))
    try:
        if not isinstance(error, Exception):
            raise TypeError("it would end the hub's process, too")  # noqa: TRY301 - handled like a pickling error
        content = dump((error, trace), "an error")
        load(content)  # fails if the error's constructor takes other arguments
    except Exception:  # noqa: BLE001 - the error's class may raise any error
        content = pickle.dumps((EdgeAsyncError(f"{type(error).__name__}: {error}"), trace))
    return content


def load_error(content: bytes, name: str) -> BaseException:
    """Unpickle a worker's error, and add the worker's name and the traceback as a note."""
    error, trace = load(content)
    return note_worker(error, name, trace)
