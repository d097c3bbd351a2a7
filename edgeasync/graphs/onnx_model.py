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
    """What to train: an ONNX model, or a training graph built from one. A `.safetensors` file beside a graph, of
    the same name, holds its first values; you then leave out the keys above.
    """
    build_s_max: Annotated[float, Meta(gt=0, le=86_400)] = BUILD_S
    """Time to build the training graph, in a process of its own. More ends in exit code 10."""
    build_memory_bytes_max: ByteCount | None = None
    """Memory that this process may take beyond its libraries; without it, half of the machine's. More ends in exit
    code 10.
    """
    local: Patterns | UnsetType = UNSET
    """Arrays that each device keeps to itself, by name: as `edgeasync model inspect` lists them. [Local
    parameters](/train/local.md).
    """
