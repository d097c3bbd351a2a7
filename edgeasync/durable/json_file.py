"""Read the JSON files of edgeasync, which may be damaged or manipulated."""

from pathlib import Path
from typing import TypeVar

from edgeasync.errors import StorageError
from edgeasync.protocol.wire import Buffer
from edgeasync.regular_file import read_regular
from edgeasync.structs import parse_json

Kind = TypeVar("Kind")


def read_json(path: Path, kind: type[Kind], *, remedy: str) -> Kind:
    """Read and parse a JSON file as a type.

    Raises `FileNotFoundError` if it is missing, and `StorageError` for other errors. `remedy` tells
    the user what to do if the file cannot be read.
    """
    try:
        content = read_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        cure = "check its permissions" if isinstance(error, PermissionError) else remedy
        raise StorageError(f"{path}: cannot be read: {error.strerror}; {cure}") from error
    return check_json(content, kind, where=str(path), remedy=remedy)


def check_json(content: Buffer, kind: type[Kind], *, where: str, remedy: str) -> Kind:
    """Parse the JSON content of a file as a type.

    If it is invalid, raise `StorageError` with a message that contains `where` and `remedy`.
    """
    try:
        return parse_json(content, kind)
    except ValueError as error:
        raise StorageError(f"{where}: damaged ({error}); {remedy}") from error
