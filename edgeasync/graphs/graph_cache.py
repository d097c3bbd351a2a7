"""Caches graphs that a device received, so that it need not download them after a restart."""

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
    """A folder with at most `GRAPHS_MAX` graphs in files named `<SHA-256>.onnx`.

    If there are more, the least recently used files are deleted. If the disk fails, `warn` is
    called with a message, and the device downloads the graph again at its next start.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, fingerprint: str, warn: Warn) -> bytes | None:
        """Return the graph with this SHA-256 hash, or `None`. Delete the file if it is damaged."""
        file = self._file(fingerprint)
        try:
            graph = read_regular(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            warn(f"{file}: cannot be read: {error.strerror}; downloading the graph again")
            return None
        if fingerprint_of(graph) != fingerprint:
            warn(f"{file}: damaged; deleting it and downloading the graph again")
            with contextlib.suppress(OSError):
                file.unlink()
            return None
        with contextlib.suppress(OSError):
            file.touch()
        return graph

    def keep(self, fingerprint: str, graph: bytes, warn: Warn) -> None:
        """Store a graph, and delete the least recently used graphs beyond the limit."""
        try:
            replace_file(self._file(fingerprint), graph)
            files = sorted(self._folder.glob("*.onnx"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
            for file in files[GRAPHS_MAX:]:
                file.unlink()
        except StorageError as error:
            warn(f"{error}; the next start downloads the graph again")
        except OSError as error:
            warn(f"{self._folder}: cannot delete old graphs: {error.strerror}; correct the folder's permissions")

    def _file(self, fingerprint: str) -> Path:
        return self._folder / f"{fingerprint}.onnx"
