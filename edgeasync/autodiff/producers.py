"""Which exporter wrote a model, and how to call it so that edgeasync can train what it writes.

An exporter is recognized by the producer's name and by patterns that it leaves. The advice names its own
arguments.
"""

from collections.abc import Iterator

import msgspec
import onnx


class Producer(msgspec.Struct, frozen=True):
    """An exporter, and for each kind of damage the call that avoids it, as the end of a sentence."""

    name: str
    opset: str = "export it with opset 18"
    plain: str = "export it without optimization and constant folding"
    """For a file whose parameters were merged, folded or computed."""
    sizes: str = "export it with fixed sizes for all axes but the batch"
    batch: str = "export it so that it takes any batch size, or with a fixed one"
    """For a file that has a free batch and does not run on all sizes of it."""
    foreign: str = "use the file from before it was optimized, quantized or compiled"
    """For operators outside the standard domain."""


UNKNOWN = Producer("the exporter")

_DYNAMO = "torch.onnx.export(..., dynamo=True, optimize=False, external_data=False)"
_TORCHSCRIPT = (
    "torch.onnx.export(..., dynamo=False, training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False)"
)

_FIXED_BATCH = "write x.shape[0] where forward has len(x), which fixes the batch size in the file"

PRODUCERS = {
    "dynamo": Producer(
        "torch's exporter (dynamo=True)",
        opset="export it with torch.onnx.export(..., opset_version=18)",
        plain=f"export without optimization: {_DYNAMO}",
        sizes="export it with dynamic_shapes=({0: torch.export.Dim('batch')},), which frees the batch alone",
        batch=_FIXED_BATCH,
    ),
    "torchscript": Producer(
        "torch's exporter (dynamo=False)",
        opset="export it with torch.onnx.export(..., opset_version=18)",
        plain=f"export without optimization: {_TORCHSCRIPT}, or {_DYNAMO}",
        sizes="export it with dynamic_axes={'x': {0: 'batch'}}, which frees the batch alone",
        batch=_FIXED_BATCH,
    ),
    "keras": Producer(
        "tf2onnx, for Keras",
        opset="export it with tf2onnx.convert.from_keras(model, opset=18)",
        plain="give equal parameters different values before tf2onnx.convert.from_keras, which merges them",
        sizes="export it with input_signature=[tf.TensorSpec([None, SIZE, ...], tf.float32)], which frees the "
        "batch alone",
    ),
    "jax2tf": Producer(
        "jax2tf and tf2onnx",
        opset="train the JAX model itself, by edgeasync.jax.model, or convert it with tf2onnx's opset=18",
        plain="train the JAX model itself, by edgeasync.jax.model",
        sizes="convert it with jax2tf's polymorphic_shapes=['b, ...'], which frees the batch alone, or train the "
        "JAX model itself, by edgeasync.jax.model",
    ),
    "tf2onnx": Producer(
        "tf2onnx",
        opset="convert it with python -m tf2onnx.convert --opset 18",
        plain="give equal parameters different values before tf2onnx, which merges them",
        sizes="convert it with python -m tf2onnx.convert --inputs 'x:0[-1,SIZE,...]', which frees the batch alone",
    ),
    "paddle2onnx": Producer(
        "paddle2onnx",
        opset="export it with paddle2onnx --opset_version 18",
        plain="export the model in training mode, with paddle2onnx --optimize_tool None",
        sizes="export it with paddle.static.InputSpec([None, SIZE, ...]), which frees the batch alone",
    ),
    "tflite2onnx": Producer(
        "tflite2onnx",
        opset="convert the TensorFlow Lite file with python -m tf2onnx.convert --tflite FILE --opset 18",
        plain="convert the TensorFlow model itself: TensorFlow Lite has folded and merged its parameters",
        sizes="convert it with python -m tf2onnx.convert --tflite FILE --inputs 'x:0[-1,SIZE,...]', which frees "
        "the batch alone",
    ),
    "skl2onnx": Producer(
        "skl2onnx",
        opset="export it with skl2onnx.to_onnx(..., target_opset=18)",
        plain="train an SGDClassifier or MLPClassifier itself, by edgeasync.sklearn.model",
        sizes="export it with initial_types=[('X', FloatTensorType([None, FEATURES]))]",
        foreign="train an SGDClassifier or MLPClassifier itself, by edgeasync.sklearn.model, or a network of "
        "edgeasync.nn",
    ),
    "onnxruntime": Producer(
        "onnxruntime's optimizer",
        opset="use the file from before onnxruntime optimized it, exported with opset 18",
        plain="use the file from before onnxruntime optimized it",
        sizes="use the file from before onnxruntime optimized it, exported with fixed sizes for all axes but the "
        "batch",
        foreign="use the file from before onnxruntime optimized or quantized it",
    ),
}
"""By the name that `kind_of_producer` returns."""


def producer_of(model: onnx.ModelProto) -> Producer:
    """Return the exporter that wrote a model, with its advice."""
    return PRODUCERS.get(kind_of_producer(model), UNKNOWN)


def kind_of_producer(model: onnx.ModelProto) -> str:
    """Return a key of `PRODUCERS`; empty for an exporter that we do not know.

    onnxruntime's optimizer keeps the producer's name, but adds all its own domains to the imports.
    """
    producer, domains = model.producer_name.lower(), {entry.domain for entry in model.opset_import}
    if "com.microsoft.nchwc" in domains or producer.startswith(("onnxruntime", "onnx.quantize")):
        return "onnxruntime"
    if producer == "pytorch":
        return "dynamo" if any(key.startswith("pkg.") for key in _notes(model)) else "torchscript"
    if producer.startswith("tf2onnx"):
        names = [node.name for node in model.graph.node]
        if any("jax2tf" in name or "XlaCallModule" in name or "pjit" in name for name in names):
            return "jax2tf"
        keras = ("functional", "sequential", "model", "StatefulPartitionedCall/")
        return "keras" if any(name.startswith(keras) for name in names) else "tf2onnx"
    if "paddle" in producer or model.graph.name.startswith("Model from PaddlePaddle"):
        return "paddle2onnx"
    if "tflite" in producer:
        return "tflite2onnx"
    if producer == "skl2onnx" or any(node.domain == "ai.onnx.ml" for node in model.graph.node):
        return "skl2onnx"
    return ""


def _notes(model: onnx.ModelProto) -> Iterator[str]:
    """Yield the keys of what torch's newer exporter notes of nodes and inputs."""
    for part in (*model.graph.node, *model.graph.input):
        yield from (entry.key for entry in part.metadata_props)
