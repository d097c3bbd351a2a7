"""Opens the training graph that a hub sends, with its base in a mapped file."""

import mmap
from pathlib import Path

from edgeasync.durable.files import protect
from edgeasync.errors import StorageError
from edgeasync.graphs.split_base import split_base
from edgeasync.protocol.graph import ShippedBase, ShippedGraph
from edgeasync.protocol.wire import Buffer
from edgeasync.regular_file import open_regular


def ship_graph(graph: Buffer, folder: Path) -> ShippedGraph:
    """Write the base of a training graph, if it has one, to `folder`; return what devices fetch.

    The base is mapped, so it uses no memory of the hub. Raises `StorageError`.
    """
    split = split_base(graph, folder)
    if split.base is None:
        return ShippedGraph(split.graph)
    path = folder / split.base.file_name
    try:
        with open_regular(path) as file:
            protect(file.fileno())
            content = mmap.mmap(file.fileno(), split.base.nbytes, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: cannot be mapped: {error}; start the hub again") from error
    shipped = ShippedGraph(split.graph, ShippedBase(split.base, memoryview(content)))
    content.madvise(mmap.MADV_DONTNEED)  # the checksum has read all pages
    return shipped
