"""Models in the form in which each exporter writes them."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.models.gradients import forward, numbers


def written(text, parameters, x=(4,), *, producer="", graph="g", imports=(), constants=(), **options):
    """Return a model as an exporter writes it: its name, the graph's, imports, and weights in Constant nodes."""
    proto = onnx.load_model_from_string(forward(text, parameters, x, **options))
    proto.producer_name, proto.graph.name = producer, graph
    proto.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in imports)
    held = {entry.name: entry for entry in proto.graph.initializer if entry.name in constants}
    kept = [entry for entry in proto.graph.initializer if entry.name not in held]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    nodes = [helper.make_node("Constant", [], [name], value=entry) for name, entry in held.items()]
    nodes += proto.graph.node
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


def node(op, inputs, outputs, name="", domain="", **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), name=name, domain=domain, **attributes)


def insert(proto, *nodes, at=None):
    whole = list(proto.graph.node)
    whole[len(whole) if at is None else at : len(whole) if at is None else at] = nodes
    del proto.graph.node[:]
    proto.graph.node.extend(whole)
    return proto


def paddle2onnx():
    """All weights in Constant nodes, and numbers of formulas among them: a hard swish as it writes it."""
    parameters = {
        "conv.w": numbers((3, 2, 3), 1),
        "conv.b": numbers((1, 3, 1), 2),
        "three": np.float32([3]),
        "sixth": np.float32([1 / 6]),
        "low": np.float32(0),
        "high": np.float32(6),
        "fc.w": numbers((18, 3), 3),
        "fc.b": numbers((3,), 4),
    }
    return written(
        "a = Conv<pads=[1, 1]>(x, conv_w)\nb = Add(a, conv_b)\nc = Add(b, three)\nd = Clip(c, low, high)\n"
        "e = Mul(b, d)\nf = Mul(e, sixth)\ng = Flatten(f)\nh = MatMul(g, fc_w)\nz = Add(h, fc_b)\ny = Softmax(z)",
        {name.replace(".", "_"): value for name, value in parameters.items()},
        (2, 6),
        graph="Model from PaddlePaddle.",
        constants={name.replace(".", "_") for name in parameters},
    )


def jax2tf():
    """A slice of the whole batch that ends at a thousand million, and a softmax by arithmetic."""
    text = (
        "s = Slice(x, starts, ends, axes)\na = MatMul(s, w)\nb = Add(a, c)\nh = Tanh(b)\n"
        "k = Slice(h, starts, ends, axes)\nz = MatMul(k, v)\nm = ReduceMax(z, one)\nd = Sub(z, m)\ne = Exp(d)\n"
        "t = ReduceSum(e, one)\ny = Div(e, t)"
    )
    parameters = {
        "w": numbers((4, 5), 1),
        "c": numbers((5,), 2),
        "v": numbers((5, 3), 3),
        "one": np.array([1]),
        "starts": np.array([0, 0]),
        "ends": np.array([10**9, 10**9]),
        "axes": np.array([0, 1]),
    }
    return named(written(text, parameters, producer="tf2onnx"), "PartitionedCall/jax2tf_fun_/pjit")


def named(proto, prefix):
    for place, each in enumerate(proto.graph.node):
        each.name = f"{prefix}/{each.op_type}_{place}"
    return proto


def keras():
    """A layer whose bias of zeros is gone, and a convolution that a batch norm was folded into."""
    text = (
        "t = Transpose<perm=[0, 2, 1]>(x)\na = Conv<pads=[1, 1]>(t, fused, shift)\nr = Relu(a)\nf = Flatten(r)\n"
        "h = MatMul(f, w)\nk = Relu(h)\ny = MatMul(k, v)"
    )
    proto = named(
        written(
            text,
            {
                "fused": numbers((3, 2, 3), 1),
                "shift": numbers((3,), 2),
                "w": numbers((18, 5), 3),
                "v": numbers((5, 3), 4),
            },
            (6, 2),
            producer="tf2onnx",
        ),
        "functional_1",
    )
    for each in proto.graph.node:
        each.input[:] = ["conv2d/Conv2D_weights_fused_bn" if name == "fused" else name for name in each.input]
    next(
        entry for entry in proto.graph.initializer if entry.name == "fused"
    ).name = "conv2d/Conv2D_weights_fused_bn"
    return proto


def tf2onnx():
    """A yes-or-no classifier that ends in a sigmoid."""
    text = "a = MatMul(x, w)\nb = Add(a, c)\nr = Relu(b)\nd = MatMul(r, v)\nz = Add(d, e)\ny = Sigmoid(z)"
    parameters = {"w": numbers((4, 5), 1), "c": numbers((5,), 2), "v": numbers((5, 1), 3), "e": numbers((1,), 4)}
    return named(written(text, parameters, producer="tf2onnx"), "StatefulPartitionedCall2")


KERAS_GRU = """<ir_version: 8, opset_import: ["" : 18], producer_name: "tf2onnx">
g (float[batch, 6, 4] x) => (float[batch, 3] y)
<int32 start = {0}, float zero = {0}, int64[1] axes0 = {0}, int64[1] one = {1}, int32[1] sizes = {8},
 int64[1] back = {-1}, int64[1] far = {2147483647}> {
  times = Transpose<perm=[1, 0, 2]>(x)
  shape1 = Shape(times)
  shape32 = Cast<to=6>(shape1)
  cut = Slice(shape32, axes0, one, axes0)
  length = Squeeze(cut, axes0)
  limit = Cast<to=1>(length)
  less = Less(zero, limit)
  begins = And(less, less)
  trips = Cast<to=7>(length)
  shape2 = Shape(x)
  shape2_32 = Cast<to=6>(shape2)
  rows = Slice(shape2_32, axes0, one, axes0)
  packed = Concat<axis=0>(rows, sizes)
  packed64 = Cast<to=7>(packed)
  zeros = Expand(zero, packed64)
  end0, end1, end2, end3, end4, end5, states = Loop(
    trips, begins, start, zeros, length, bias, kernel, recurrent) <body = body (
      int64 turn, bool going, int32 count, float[batch2, 8] state,
      int32 reached, float[2, 24] b, float[4, 24] k, float[8, 24] r)
      => (bool goes_on, int32 count2, float[batch2, 8] state2, int32 reached, float[2, 24] b,
      float[4, 24] k, float[8, 24] r, float[batch2, 8] item)
      <int32 step = {1}, float whole = {1}, int64[1] first = {0},
       int64[2] s0 = {0, 0}, int64[2] s1 = {0, 8},
       int64[2] s2 = {0, 16}, int64[2] e2 = {2147483647, 2147483647}, int64[2] e0 = {2147483647, 8},
       int64[2] e1 = {2147483647, 16}, int64[2] both = {0, 1}> {
    b0, b1 = Split<axis=0, num_outputs=2>(b)
    m1 = MatMul(state, r)
    count2 = Add(count, step)
    now = Gather<axis=0>(times, count)
    m0 = MatMul(now, k)
    reached_f = Cast<to=1>(reached)
    count_f = Cast<to=1>(count2)
    length_f = Cast<to=1>(length)
    turn_f = Cast<to=1>(turn)
    less1 = Less(turn_f, length_f)
    less0 = Less(count_f, reached_f)
    goes_on = And(less1, less0)
    q0 = Squeeze(b0, first)
    a0 = Add(m0, q0)
    z0, r0, h0 = Split<axis=1, num_outputs=3>(a0)
    q1 = Squeeze(b1, first)
    a1 = Add(m1, q1)
    h1 = Slice(a1, s2, e2, both)
    r1 = Slice(a1, s1, e1, both)
    r2 = Add(r0, r1)
    r3 = Sigmoid(r2)
    h2 = Mul(r3, h1)
    h3 = Add(h0, h2)
    h4 = Tanh(h3)
    z1 = Slice(a1, s0, e0, both)
    z2 = Add(z0, z1)
    z3 = Sigmoid(z2)
    z4 = Sub(whole, z3)
    new = Mul(z4, h4)
    old = Mul(z3, state)
    state2 = Add(old, new)
    item = Identity(state2)
  }>
  last = Slice(states, back, far, axes0)
  h = Squeeze(last, axes0)
  scores = MatMul(h, dense)
  y = Add(scores, dense_bias)
}"""


def keras_gru():
    """A GRU as tf2onnx writes it: a loop whose states are a counter, the length, the state and the weights."""
    model = onnx.parser.parse_model(KERAS_GRU)
    parameters = {
        "kernel": numbers((4, 24), 1),
        "recurrent": numbers((8, 24), 2),
        "bias": numbers((2, 24), 3),
        "dense": numbers((8, 3), 4),
        "dense_bias": numbers((3,), 5),
    }
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in parameters.items())
    return named(model, "sequential_1/gru_1")


def tflite2onnx():
    """Relu6 as a Clip between bounds, fully connected layers as Gemm, and a softmax at the end."""
    text = "a = Gemm<transB=1>(x, w, c)\nr = Clip(a, low, high)\nz = Gemm<transB=1>(r, v, d)\ny = Softmax(z)"
    parameters = {
        "w": numbers((5, 4), 1),
        "c": numbers((5,), 2),
        "v": numbers((3, 5), 3),
        "d": numbers((3,), 4),
        "low": np.float32(0),
        "high": np.float32(6),
    }
    return written(text, parameters, producer="tflite2onnx")


def skl2onnx_mlp():
    """MLPClassifier with its ZipMap: labels, and probabilities in dictionaries."""
    text = (
        "i = Cast<to=1>(x)\na = MatMul(i, coefficient)\nb = Add(a, intercepts)\nh = Relu(b)\n"
        "c = MatMul(h, coefficient1)\n"
        "z = Add(c, intercepts1)\nprobabilities = Softmax(z)\nk = ArgMax<axis=1>(probabilities)"
    )
    parameters = {
        "coefficient": numbers((4, 5), 1),
        "intercepts": numbers((1, 5), 2),
        "coefficient1": numbers((5, 3), 3),
        "intercepts1": numbers((1, 3), 4),
    }
    proto = written(text, parameters, producer="skl2onnx", output="k", imports=[("ai.onnx.ml", 1)])
    insert(
        proto,
        node(
            "ZipMap", "probabilities", "output_probability", "ZipMap", "ai.onnx.ml", classlabels_int64s=[0, 1, 2]
        ),
    )
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    key = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    proto.graph.output.append(helper.make_value_info("output_probability", helper.make_sequence_type_proto(key)))
    return proto


def skl2onnx_mlp_tensor():
    """The same without ZipMap: of its outputs only the probabilities can have a loss."""
    proto = skl2onnx_mlp()
    del proto.graph.node[-1], proto.graph.output[-1]
    proto.graph.output.append(helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [None, 3]))
    return proto


def torchscript():
    """In training mode: batch norm as it is, and equal scales stored once under two names."""
    text = (
        "n2 = Identity(n1)\na = Conv(x, weight, bias)\n"
        "b, p1, q1 = BatchNormalization<training_mode=1>(a, n1, s, mean, var)\n"
        "r = Relu(b)\nm, p2, q2 = BatchNormalization<training_mode=1>(r, n2, s2, mean2, var2)\n"
        "f = Flatten(m)\ny = Gemm(f, w, c)"
    )
    parameters = {
        "n1": np.ones(3, np.float32),
        "weight": numbers((3, 2, 3), 1),
        "bias": numbers((3,), 2),
        "s": numbers((3,), 3),
        "s2": numbers((3,), 7),
        "mean": numbers((3,), 4),
        "var": numbers((3,), 5, positive=True),
        "mean2": numbers((3,), 9),
        "var2": numbers((3,), 8, positive=True),
        "w": numbers((12, 3), 6),
        "c": numbers((3,), 7),
    }
    return written(text, parameters, (2, 6), producer="pytorch")


def dynamo():
    """Two constants that the exporter computed, of which nobody knows whether they are parameters."""
    text = "a = MatMul(x, w)\nb = Mul(a, val_3)\nc = Add(b, val_7)\nh = Tanh(c)\ny = MatMul(h, v)"
    parameters = {
        "w": numbers((4, 5), 1),
        "val_3": numbers((5,), 2),
        "val_7": numbers((5,), 3),
        "v": numbers((5, 3), 4),
    }
    proto = written(text, parameters, producer="pytorch")
    proto.graph.node[0].metadata_props.add(key="pkg.torch.onnx.fx_node", value="%matmul")
    return proto


def dynamo_folded():
    """Two convolutions that the exporter folded batch norms into."""
    text = (
        "getitem_1 = Conv(x, k1)\nr = Relu(getitem_1)\ngetitem_4 = Conv(r, k2)\nf = Flatten(getitem_4)\n"
        "y = MatMul(f, w)"
    )
    parameters = {"k1": numbers((3, 2, 3), 1), "k2": numbers((3, 3, 3), 2), "w": numbers((6, 3), 3)}
    proto = written(text, parameters, (2, 6), producer="pytorch")
    proto.graph.node[0].metadata_props.add(key="pkg.torch.onnx.fx_node", value="%conv")
    return proto


def onnxruntime():
    """What onnxruntime's optimizer leaves: merged scales, and a layer fused with its activation."""
    text = "n = LayerNormalization(x, s, t)\na = MatMul(n, w)\nm = LayerNormalization(g, s, t)\ny = MatMul(m, v)"
    parameters = {
        "s": np.ones(4, np.float32),
        "t": np.zeros(4, np.float32),
        "w": numbers((4, 4), 1),
        "b": numbers((4,), 2),
        "v": numbers((4, 3), 3),
    }
    proto = written(
        text, parameters, producer="pytorch", imports=[("com.microsoft", 1), ("com.microsoft.nchwc", 1)]
    )
    return insert(proto, node("BiasGelu", "a b", "g", "BiasGelu", "com.microsoft"), at=2)


def nbits():
    """Adapters on two stacked layers of 4-bit weights."""
    size, parameters, nodes = 32, {}, []
    for place in (0, 1):
        generator = np.random.Generator(np.random.PCG64(place))
        parameters |= {
            f"q{place}": generator.integers(0, 255, (size, 1, 16)).astype(np.uint8),
            f"s{place}": np.full(size, 0.01, np.float32),
            f"lora_a{place}": numbers((size, 4), place + 1) / 10,
            f"lora_b{place}": numbers((4, size), place + 3) / 10,
        }
        nodes += [
            node(
                "MatMulNBits",
                f"h{place} q{place} s{place}",
                f"b{place}",
                "",
                "com.microsoft",
                K=size,
                N=size,
                bits=4,
                block_size=32,
            ),
            node("MatMul", f"h{place} lora_a{place}", f"d{place}"),
            node("MatMul", f"d{place} lora_b{place}", f"u{place}"),
            node("Add", f"b{place} u{place}", f"v{place}"),
            node("Relu", f"v{place}", f"h{place + 1}"),
        ]
    proto = written("h0 = Identity(x)\ny = Identity(h2)", parameters, (size,), imports=[("com.microsoft", 1)])
    return insert(proto, *nodes, at=1)


def quantize_dynamic():
    """A frozen body of dynamically quantized weights, and a head in float32."""
    text = (
        "q, scale, zero = DynamicQuantizeLinear(x)\ni = MatMulInteger(q, body, zero, middle)\nf = Cast<to=1>(i)\n"
        "k = Mul(scale, unit)\nh = Mul(f, k)\nr = Relu(h)\ny = Gemm(r, w, c)"
    )
    parameters = {
        "body": np.arange(20).reshape(4, 5).astype(np.uint8),
        "middle": np.uint8(9),
        "unit": np.float32(0.1),
        "w": numbers((5, 3), 1),
        "c": numbers((3,), 2),
    }
    return written(text, parameters, producer="onnx.quantize")


FILES = {
    "paddle2onnx": (paddle2onnx, {}, {}),
    "jax2tf": (jax2tf, {}, {}),
    "keras": (keras, {}, {}),
    "keras with a loop": (keras_gru, {}, {}),
    "tf2onnx": (tf2onnx, {}, {"loss": "bce_with_logits"}),
    "tflite2onnx": (tflite2onnx, {}, {}),
    "skl2onnx": (skl2onnx_mlp, {}, {}),
    "skl2onnx without zipmap": (skl2onnx_mlp_tensor, {}, {}),
    "torchscript": (torchscript, {}, {}),
    "dynamo": (dynamo, {}, {"freeze": ("val_3", "val_7")}),
    "dynamo, folded": (dynamo_folded, {}, {"freeze": ("k1", "k2")}),
    "onnxruntime": (onnxruntime, {}, {"freeze": ("s", "t")}),
    "nbits": (nbits, {"loss": "mse", "train": ("lora_*",)}, {"freeze": ("lora_a0", "lora_b0")}),
    "onnxruntime, quantized": (quantize_dynamic, {}, {}),
}
