"""Small forward models as text, their training graphs run by onnxruntime, and gradients by finite differences.

Every model multiplies its input by a parameter `p` first, so that what comes after it gets a gradient that
differs by example. The forward model is evaluated in float64, by onnx's own reference evaluator.
"""

import math

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper, parser, shape_inference
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.training.graph_check import check_graph
from tests.support.size import repetitions

BATCH = 4
ALONE = (1,)
"""Batch sizes besides, where the batch is free."""
THREADS = (1, 2, 4)


def numbers(shape, seed=0, *, positive=False):
    """Normal numbers, or such that lie between 0.5 and 3."""
    values = np.random.Generator(np.random.PCG64(seed)).standard_normal(shape)
    return (np.clip(np.abs(values), 0, 2.5) + 0.5 if positive else values).astype(np.float32)


def forward(text, parameters, x, *, batch="batch", opset=18, kind=TensorProto.FLOAT, output="y", ir=9):
    """Return a serialized model of nodes written as text, one a line; `x` is the input's shape without batch."""
    nodes = [parser.parse_node(line) for line in text.strip().splitlines()]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, [batch, *x])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in parameters.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    opsets += [helper.make_opsetid(domain, 1) for domain in {node.domain for node in nodes} - {""}]
    model = shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=ir))
    if not model.graph.output[0].type.tensor_type.HasField("shape"):
        model.graph.output[0].type.tensor_type.shape.SetInParent()  # it must be there; nobody reads it
    return model.SerializeToString()


def session(model, threads=1):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])


def run(graph, feeds, threads=1):
    """Run a training graph at its initial parameters; return its outputs by name."""
    opened = session(graph.model, threads)
    names = [entry.name for entry in opened.get_outputs()]
    return dict(zip(names, opened.run(names, feeds | graph.spec.views(graph.initial)), strict=True))


def doubled(model):
    """Return a model that computes in float64."""
    proto = onnx.load_model_from_string(model)
    for entry in (*proto.graph.input, *proto.graph.output):
        if entry.type.tensor_type.elem_type == TensorProto.FLOAT:
            entry.type.tensor_type.elem_type = TensorProto.DOUBLE
    tensors = [*proto.graph.initializer]
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
            elif attribute.name == "value" and attribute.t.data_type:
                tensors.append(attribute.t)
    for entry in tensors:
        if entry.data_type == TensorProto.FLOAT:
            entry.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(entry).astype(np.float64), entry.name))
    return proto


class Erf(OpRun):
    """onnx's own works in float32, whatever it is given."""

    def _run(self, x):
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


class Reference:
    """A forward model in float64, by onnx or by a formula: its output at parameters that were moved."""

    def __init__(self, model, formula=None):
        self._formula = formula
        proto = doubled(model)
        self.start = {entry.name: numpy_helper.to_array(entry) for entry in proto.graph.initializer}
        for name, value in self.start.items():
            proto.graph.input.append(
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(value.dtype), list(value.shape)
                )
            )
        del proto.graph.initializer[:]
        self._evaluator = None if formula else ReferenceEvaluator(proto, new_ops=[Erf])  # it lacks some operators

    def __call__(self, x, moved=None):
        x = x.astype(np.float64) if x.dtype == np.float32 else x
        if self._formula is not None:
            return self._formula(x, self.start | (moved or {}))
        return self._evaluator.run(None, {"x": x} | self.start | (moved or {}))[0]


def assert_same_values(model, x, **settings):
    """Check that a training graph predicts what onnxruntime's own operators compute."""
    graph = build_training_graph(model, GraphSettings(loss="mse", **settings))
    (expected,) = session(model).run(None, {"x": x})
    found = run(graph, {"x": x, "target": np.zeros_like(expected)})
    np.testing.assert_allclose(found["y"], expected, rtol=1e-5, atol=1e-6)
    assert all(np.isfinite(value).all() for value in found.values())
    return graph


def squares(y, target):
    return np.mean((y - target) ** 2)


def assert_slopes(gradients, reference, x, loss, *, step=1e-5, tolerance=3e-5):
    """Compare gradients with central differences of `loss(y)` along random directions."""
    for place, (name, gradient) in enumerate(gradients.items()):
        start = reference.start[name]
        assert gradient.shape == start.shape
        assert gradient.dtype == np.float32
        scale = np.linalg.norm(gradient)
        for number in range(repetitions("directions of a gradient")):
            way = numbers(start.shape, 1000 * place + number + 7).astype(np.float64)
            ahead, behind = (loss(reference(x, {name: start + sign * step * way})) for sign in (1, -1))
            expected = (ahead - behind) / (2 * step)
            found = float((gradient.astype(np.float64) * way).sum())
            off = abs(found - expected) / (scale * np.linalg.norm(way) + 1e-6)
            assert off < tolerance, f"{name}: the slope is {expected}, the graph says {found}"


def check(
    text,
    x=(3,),
    parameters=None,
    *,
    positive=False,
    before="h = Mul(x, p)",
    reference=None,
    opset=18,
    compared=True,
    seed=0,
    **settings,
):
    """Check the gradients of everything a model trains, for a free and a fixed batch, by 1, 2 and 4 threads.

    `reference` replaces onnx's evaluator by a function of x and parameters. Returns the last training graph.
    """
    parameters = dict(parameters or {})
    if before:
        parameters = {"p": numbers((1, *x), seed + 1, positive=positive)} | parameters
    text = f"{before}\n{text}" if before else text
    graphs = {}
    for batch in ("batch", BATCH):
        model = forward(text, parameters, x, batch=batch, opset=opset)
        graphs[batch] = build_training_graph(model, GraphSettings(loss="mse", **settings))
        check_graph(graphs[batch].model, bytes_max=1 << 20)  # no rule may use what devices refuse
        for rows in (*ALONE, BATCH) if batch == "batch" else (BATCH,):
            given = numbers((rows, *x), seed + 2, positive=positive)
            oracle = Reference(model, reference)
            y = oracle(given)
            if compared:
                own = session(model).run(None, {"x": given})[0]
                np.testing.assert_allclose(own, y, rtol=1e-4, atol=1e-5)
            target = numbers(y.shape, seed + 3)
            found = [
                run(graphs[batch], {"x": given, "target": target}, threads)
                for threads in ((2,) if batch == BATCH else THREADS if rows == BATCH else (1,))
            ]
            np.testing.assert_allclose(found[0]["loss"], squares(y, target), rtol=1e-5)
            for other in found[1:]:
                for name, value in other.items():
                    np.testing.assert_allclose(value, found[0][name], rtol=1e-5, atol=1e-6, err_msg=name)
            gradients = {
                name.removesuffix(".grad"): value for name, value in found[0].items() if name.endswith(".grad")
            }
            assert gradients
            assert_slopes(gradients, oracle, given, lambda y, target=target: squares(y, target))
    return graphs["batch"]
