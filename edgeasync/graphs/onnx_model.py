"""A model of an ONNX file, as settings name it; what reads the file is apart: most agents need none of it."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from edgeasync.autodiff.settings import GraphSettings
from edgeasync.config import ByteCount, FilePath
from edgeasync.training.local_parameters import Patterns

BUILD_S = 300.0
"""How long the training graph of a model that nobody vouches for may take to build."""


class OnnxModel(GraphSettings, frozen=True, tag_field="kind", tag="onnx", kw_only=True):
    """A model from an ONNX file: a forward model, or a training graph that was built from one before.

    The limits hold where it is built in a process of its own, as the commands do (`graph_process.py`).
    """

    file: FilePath
    build_s_max: Annotated[float, Meta(gt=0, le=86_400)] = BUILD_S
    build_memory_bytes_max: ByteCount | None = None
    local: Patterns | UnsetType = UNSET
