"""A device's cache of training graphs, so that it fetches each graph only once."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from edgeasync.durable.files import replace_file
from edgeasync.errors import StorageError
from edgeasync.protocol.graph import fingerprint_of
from edgeasync.regular_file import read_regular

GRAPHS_MAX = 4

Warn = Callable[[str], None]


class GraphCache:
    """A folder with up to `GRAPHS_MAX` files `<SHA-256>.onnx`, least recently used evicted first.

    If the disk fails, the cache passes a message to `warn`, and the device fetches the graph again
    at its next start.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, fingerprint: str, warn: Warn) -> bytes | None:
        """Return the verified graph with this fingerprint, or `None`. A damaged file is deleted."""
        file = self._file(fingerprint)
        try:
            graph = read_regular(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            warn(f"{file}: cannot be read: {error.strerror}; fetching the graph again")
            return None
        if fingerprint_of(graph) != fingerprint:
            warn(f"{file}: damaged; deleting it and fetching the graph again")
            with contextlib.suppress(OSError):
                file.unlink()
            return None
        with contextlib.suppress(OSError):
            file.touch()
        return graph

    def keep(self, fingerprint: str, graph: bytes, warn: Warn) -> None:
        """Store a graph, and evict the least recently used ones."""
        try:
            replace_file(self._file(fingerprint), graph)
            files = sorted(self._folder.glob("*.onnx"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
            for file in files[GRAPHS_MAX:]:
                file.unlink()
        except StorageError as error:
            warn(f"{error}; the next start fetches the graph again")
        except OSError as error:
            warn(f"{self._folder}: old graphs cannot be deleted: {error.strerror}; check its permissions")

    def _file(self, fingerprint: str) -> Path:
        return self._folder / f"{fingerprint}.onnx"
