"""Settings of an ONNX model.

Other modules read the file, because most agents do not need that code.
"""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from edgeasync.autodiff.settings import GraphSettings
from edgeasync.config import ByteCount, FilePath
from edgeasync.training.local_parameters import Patterns

BUILD_S = 300.0
"""Default time limit for building a training graph, in seconds."""


class OnnxModel(GraphSettings, frozen=True, tag_field="kind", tag="onnx", kw_only=True):
    """A model from an ONNX file: a forward model, or a training graph that was built from one.

    The limits apply only if a separate process builds the graph, as the commands do
    (`graph_process.py`).
    """

    file: FilePath
    """Model to train: an ONNX model, or a training graph built from one. A training graph needs a
    `.safetensors` file of the same name beside it with the initial values, and none of the keys
    above.
    """
    build_s_max: Annotated[float, Meta(gt=0, le=86_400)] = BUILD_S
    """Time limit for building the training graph. A hub that exceeds it ends with exit code 10."""
    build_memory_bytes_max: ByteCount | None = None
    """Memory limit for building the training graph, without the libraries' own memory. The default
    is half of the machine's memory. A hub that exceeds it ends with exit code 10.
    """
    local: Patterns | UnsetType = UNSET
    """Arrays with separate values on each device, by name. `edgeasync model inspect` lists the
    names. See [Local parameters](/train/local.md).
    """
