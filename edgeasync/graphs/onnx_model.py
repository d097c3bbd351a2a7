"""Settings of an ONNX model.

The code that reads the file is in other modules, because most agents do not need it.
"""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from edgeasync.autodiff.settings import GraphSettings
from edgeasync.config import ByteCount, FilePath
from edgeasync.training.local_parameters import Patterns

BUILD_S = 900.0
"""Default time limit, in seconds, for building the training graph of an untrusted model. A language
model of 135 million parameters takes 45 s on an idle core of a server, and 170 s on a busy one.
"""


class OnnxModel(GraphSettings, frozen=True, tag_field="kind", tag="onnx", kw_only=True):
    """A model in an ONNX file: either a forward model, or a training graph built from one.

    The limits on time and memory apply only to a build in a separate process (`graph_process.py`).
    All commands build the graph in this way.
    """

    file: FilePath
    """ONNX model to train, or a training graph built from one. The initial values of a training
    graph are read from a `.safetensors` file of the same name in the same folder; the keys above
    must then be omitted.
    """
    build_s_max: Annotated[float, Meta(gt=0, le=86_400)] = BUILD_S
    """Time limit for building the training graph in a separate process. A build that exceeds it
    fails with exit code 10.
    """
    build_memory_bytes_max: ByteCount | None = None
    """Memory limit of that process, not counting libraries. The default is half of the machine's
    memory. A build that exceeds it fails with exit code 10. Large models need about seven times the
    size of their file.
    """
    local: Patterns | UnsetType = UNSET
    """Names of arrays that stay on each device, as listed by `edgeasync model inspect FILE
    --parameters`. See [Local parameters](/train/local.md).
    """
