"""Turn sounds into embeddings, with openWakeWord's networks."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper


def published(name: str) -> Path:
    """Return an ONNX file of the installed package openwakeword."""
    package = find_spec("openwakeword")
    if package is None or package.origin is None:
        raise SystemExit("the models are missing: pip install --no-deps -r examples/wake_word/requirements.txt")
    return Path(package.origin).parent / "resources/models" / f"{name}.onnx"


def session(model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Embedder:
    """The networks that turn sound into embeddings."""

    def __init__(self) -> None:
        self._mel = session(published("melspectrogram").read_bytes())
        self._embed = session(_of_any_length(onnx.load(published("embedding_model"))))

    def embed(self, sound: np.ndarray) -> np.ndarray:
        """Return one embedding per 80 ms of sound (n, 96)."""
        whole = np.clip(sound, -32768, 32767).astype(np.int16).astype(np.float32)
        mel = np.asarray(self._mel.run(None, {"input": whole[None]})[0]).reshape(1, -1, 32, 1) / 10 + 2
        embeddings = np.asarray(self._embed.run(None, {"input_1": mel})[0])
        return embeddings[0, :, :, 0].T


def _of_any_length(model: onnx.ModelProto) -> bytes:
    """Return the embedding network for spectrograms of any length.

    The file reads 76 frames at a time. Its convolutions have no padding in time, so one run on a
    long spectrogram gives the same embeddings in a tenth of the time.
    """
    graph = model.graph
    first, last = (node for node in graph.node if node.op_type == "Reshape")
    (shape,) = (each for each in graph.initializer if each.name == first.input[1])
    shape.CopyFrom(numpy_helper.from_array(np.array([1, 1, -1, 34]), shape.name))
    graph.input[0].type.tensor_type.shape.dim[1].dim_param = "frames"
    graph.output[0].CopyFrom(helper.make_tensor_value_info(last.input[0], onnx.TensorProto.FLOAT, None))
    graph.node.remove(last)
    return bytes(model.SerializeToString())
