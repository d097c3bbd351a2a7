"""The graphs a device was sent, kept by their fingerprints: a second start fetches nothing again."""

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
    """Files `<SHA-256>.onnx` in one folder, at most `GRAPHS_MAX`, the longest unused go first.

    A disk that fails costs a warning, a sentence given to `warn`, and a fetch at the next start, nothing more.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, fingerprint: str, warn: Warn) -> bytes | None:
        """Return the graph of this fingerprint, verified; a damaged one is deleted."""
        file = self._file(fingerprint)
        try:
            graph = read_regular(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            warn(f"{file}: cannot be read: {error.strerror}; the graph is fetched again")
            return None
        if fingerprint_of(graph) != fingerprint:
            warn(f"{file}: damaged; it is deleted, and the graph fetched again")
            with contextlib.suppress(OSError):
                file.unlink()
            return None
        with contextlib.suppress(OSError):
            file.touch()
        return graph

    def keep(self, fingerprint: str, graph: bytes, warn: Warn) -> None:
        """Write a graph, and delete those unused for longest."""
        try:
            replace_file(self._file(fingerprint), graph)
            files = sorted(self._folder.glob("*.onnx"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
            for file in files[GRAPHS_MAX:]:
                file.unlink()
        except StorageError as error:
            warn(f"{error}; the next start fetches the graph again")
        except OSError as error:
            warn(f"{self._folder}: old graphs cannot be deleted: {error.strerror}; fix its rights")

    def _file(self, fingerprint: str) -> Path:
        return self._folder / f"{fingerprint}.onnx"
