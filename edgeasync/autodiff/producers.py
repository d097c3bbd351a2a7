"""Recognizes the exporter that wrote a model, and recommends options for a trainable export.

Exporters are recognized by the producer's name and by typical patterns in the model. The advice
mentions the arguments of the recognized exporter.
"""

from collections.abc import Iterator

import msgspec
import onnx


class Producer(msgspec.Struct, frozen=True):
    """An exporter, and advice for each kind of problem.

    Each piece of advice is the end of a sentence.
    """

    name: str
    opset: str = "export it with opset 18"
    plain: str = "export it without optimization and constant folding"
    """Advice if parameters were merged, folded or precomputed."""
    sizes: str = "export it with fixed sizes for all axes but the batch"
    batch: str = "export it so that it accepts any batch size, or with a fixed one"
    """Advice if a file has a dynamic batch size, but fails at some batch sizes."""
    foreign: str = (
        "use the original file, before it was optimized, quantized or compiled, or write that part of the model "
        "with other operators"
    )
    """Advice if a file contains operators outside ONNX."""


UNKNOWN = Producer("the exporter")

UNCONVERTED = (
    "the converter left this TensorFlow operator in the file; write that part of the model with other operations, "
    "or convert it with the newest tf2onnx, --opset 18 and no --custom-ops"
)

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
        sizes="export it with dynamic_shapes=({0: torch.export.Dim('batch')},), so that only the batch size "
        "varies",
        batch=_FIXED_BATCH,
    ),
    "torchscript": Producer(
        "torch's exporter (dynamo=False)",
        opset="export it with torch.onnx.export(..., opset_version=18)",
        plain=f"export without optimization: {_TORCHSCRIPT}, or {_DYNAMO}",
        sizes="export it with dynamic_axes={'x': {0: 'batch'}}, so that only the batch size varies",
        batch=_FIXED_BATCH,
    ),
    "keras": Producer(
        "tf2onnx, for Keras",
        opset="export it with tf2onnx.convert.from_keras(model, opset=18)",
        plain="set equal parameters to different values before tf2onnx.convert.from_keras, which merges them",
        sizes="export it with input_signature=[tf.TensorSpec([None, SIZE, ...], tf.float32)], so that only the "
        "batch size varies",
        foreign=UNCONVERTED,
    ),
    "jax2tf": Producer(
        "jax2tf and tf2onnx",
        opset="train the JAX model itself with edgeasync.jax.model, or convert it with tf2onnx's opset=18",
        plain="train the JAX model itself with edgeasync.jax.model",
        sizes="convert it with jax2tf's polymorphic_shapes=['b, ...'], so that only the batch size varies, or "
        "train the JAX model itself with edgeasync.jax.model",
        foreign=UNCONVERTED,
    ),
    "tf2onnx": Producer(
        "tf2onnx",
        opset="convert it with python -m tf2onnx.convert --opset 18",
        plain="set equal parameters to different values before tf2onnx, which merges them",
        sizes="convert it with python -m tf2onnx.convert --inputs 'x:0[-1,SIZE,...]', so that only the batch size "
        "varies",
        foreign=UNCONVERTED,
    ),
    "paddle2onnx": Producer(
        "paddle2onnx",
        opset="export it with paddle2onnx --opset_version 18",
        plain="export the model in training mode, with paddle2onnx --optimize_tool None",
        sizes="export it with paddle.static.InputSpec([None, SIZE, ...]), so that only the batch size varies",
    ),
    "tflite2onnx": Producer(
        "tflite2onnx",
        opset="convert the TensorFlow Lite file with python -m tf2onnx.convert --tflite FILE --opset 18",
        plain="convert the TensorFlow model itself, because TensorFlow Lite folds and merges parameters",
        sizes="convert it with python -m tf2onnx.convert --tflite FILE --inputs 'x:0[-1,SIZE,...]', so that only "
        "the batch size varies",
        foreign=UNCONVERTED,
    ),
    "skl2onnx": Producer(
        "skl2onnx",
        opset="export it with skl2onnx.to_onnx(..., target_opset=18)",
        plain="train an SGDClassifier or MLPClassifier itself with edgeasync.sklearn.model",
        sizes="export it with initial_types=[('X', FloatTensorType([None, FEATURES]))]",
        foreign="train an SGDClassifier or MLPClassifier itself with edgeasync.sklearn.model, or a network of "
        "edgeasync.nn",
    ),
    "onnxruntime": Producer(
        "onnxruntime's optimizer",
        opset="use the original file, before onnxruntime optimized it, and export it with opset 18",
        plain="use the original file, before onnxruntime optimized it",
        sizes="use the original file, before onnxruntime optimized it, and export it with fixed sizes for all "
        "axes but the batch",
        foreign="use the original file, before onnxruntime optimized or quantized it",
    ),
}
"""Exporters by the keys that `kind_of_producer` returns."""


def producer_of(model: onnx.ModelProto) -> Producer:
    """Return the exporter that wrote a model, and its advice."""
    return PRODUCERS.get(kind_of_producer(model), UNKNOWN)


def kind_of_producer(model: onnx.ModelProto) -> str:
    """Return a key of `PRODUCERS`, or "" for an unknown exporter.

    onnxruntime's optimizer does not change the producer's name, but it adds imports of all its own
    domains to the model.
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
    """Yield the metadata keys of nodes and inputs, which identify torch's newer exporter."""
    for part in (*model.graph.node, *model.graph.input):
        yield from (entry.key for entry in part.metadata_props)
