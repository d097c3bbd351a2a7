"""A model's file is not to be trusted: it reads no other file, and takes nobody's time for good."""

import asyncio
import signal
import subprocess
import threading

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeasync import nn, train
from edgeasync.autodiff.build import build_training_graph, read_training_graph
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.config import ByteCount
from edgeasync.data.dataset import Dataset
from edgeasync.errors import EdgeAsyncError, GraphError
from edgeasync.graphs.graph_model import HubGraph, load_graph
from edgeasync.graphs.graph_process import load_graph_apart
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.net.network import ZmqNetwork
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.optimizers import SGD
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.hub import HubRuntime
from edgeasync.training.graph_check import check_graph
from edgeasync.training.scan_lengths import SCAN_STEPS_MAX
from tests.support.models.trainers import onnx_trainer
from tests.support.parts.agents import agent_parts
from tests.support.parts.hubs import run_settings, zeros
from tests.support.programs.command_line import GRAPH, mistake
from tests.support.programs.processes import PATIENCE_S, Commands

SECRET = np.arange(4, dtype=np.float32)

# -- values in another file ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def secret(tmp_path, monkeypatch):
    """A file of the hub's machine, in the folder that the command runs in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_bytes(SECRET.tobytes())


def outside(name="v", kind=TensorProto.FLOAT, place="secret", location=TensorProto.EXTERNAL):
    """Return a tensor whose values lie in the file."""
    made = TensorProto(name=name, dims=(4,), data_type=kind, data_location=location)
    entry = made.external_data.add()
    entry.key, entry.value = "location", place
    return made


def inside(name="v", shape=(4,)):
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def value(name, shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def model(nodes=(), initializers=()):
    """Return a classifier, with more nodes and initializers; node `v` is added to its scores."""
    graph = helper.make_graph(
        [*nodes, helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "v"], ["y"])],
        "g",
        [value("x", ("n", 4))],
        [value("y", ("n", 4))],
        [inside("w", (4, 4)), *initializers],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def sparse(values, indices=None):
    indices = indices or numpy_helper.from_array(np.arange(4), "i")
    return onnx.SparseTensorProto(values=values, indices=indices, dims=(4,))


def in_constant():
    return model([helper.make_node("Constant", [], ["v"], value=outside())])


def in_sparse_constant():
    node = helper.make_node("Constant", [], ["v"])
    node.attribute.append(helper.make_attribute("sparse_value", sparse(outside())))
    return model([node])


def in_sparse_initializer():
    made = model(initializers=[inside()])
    made.graph.sparse_initializer.append(sparse(outside("s")))
    return made


def in_sparse_indices():
    made = model(initializers=[inside()])
    made.graph.sparse_initializer.append(sparse(inside("s"), outside("i", TensorProto.INT64)))
    return made


def in_list(field):
    made = model([helper.make_node("Identity", ["w"], ["v"])])
    attribute = made.graph.node[0].attribute.add()
    attribute.name = "list"
    if field == "tensors":
        attribute.type = onnx.AttributeProto.TENSORS
        attribute.tensors.append(outside())
    elif field == "sparse_tensors":
        attribute.type = onnx.AttributeProto.SPARSE_TENSORS
        attribute.sparse_tensors.append(sparse(outside()))
    else:
        attribute.type = onnx.AttributeProto.GRAPHS
        attribute.graphs.append(body(initializers=[outside()]))
    return made


def body(nodes=None, initializers=()):
    nodes = nodes or [helper.make_node("Identity", ["v"], ["o"])]
    return helper.make_graph(nodes, "b", [], [value("o", (4,))], initializers)


def in_branch(**parts):
    """Return a model with an If, one of whose branches has the values."""
    other = body(initializers=[inside()])
    branch = helper.make_node("If", ["c"], ["v"], then_branch=body(**parts), else_branch=other)
    return model([branch], [numpy_helper.from_array(np.array(True), "c")])


def in_nested_branch():
    inner = helper.make_node(
        "If", ["c"], ["o"], then_branch=body(initializers=[outside()]), else_branch=body(initializers=[inside()])
    )
    return in_branch(nodes=[inner])


def in_function():
    made = model([helper.make_node("Given", [], ["v"], domain="own")])
    made.opset_import.append(helper.make_opsetid("own", 1))
    node = helper.make_node("Constant", [], ["o"], value=outside())
    made.functions.append(helper.make_function("own", "Given", [], ["o"], [node], [helper.make_opsetid("", 18)]))
    return made


def in_training_info():
    made = model(initializers=[inside()])
    made.training_info.add().algorithm.initializer.append(outside())
    return made


def in_memory():
    """Return what onnxruntime takes for an address of its own memory."""
    return model(initializers=[outside(place="*/_ORT_MEM_ADDR_/*")])


def without_saying_so():
    return model(initializers=[outside(location=TensorProto.DEFAULT)])


PLACES = {
    "an initializer": lambda: model(initializers=[outside()]),
    "a constant": in_constant,
    "a sparse constant": in_sparse_constant,
    "a sparse initializer": in_sparse_initializer,
    "the indices of a sparse initializer": in_sparse_indices,
    "a list of tensors": lambda: in_list("tensors"),
    "a list of sparse tensors": lambda: in_list("sparse_tensors"),
    "a list of graphs": lambda: in_list("graphs"),
    "a branch's initializer": lambda: in_branch(initializers=[outside()]),
    "a branch's constant": lambda: in_branch(nodes=[helper.make_node("Constant", [], ["o"], value=outside())]),
    "a branch in a branch": in_nested_branch,
    "a function": in_function,
    "a training_info": in_training_info,
    "a place in memory": in_memory,
    "a tensor that does not say so": without_saying_so,
}


@pytest.fixture(params=PLACES)
def content(request):
    return PLACES[request.param]().SerializeToString()


def test_a_hub_reads_no_other_file_for_a_forward_model(content):
    with pytest.raises(GraphError, match="external file"):
        build_training_graph(content, GraphSettings(loss="mse"))


def test_nor_when_it_exports_a_trained_model(content):
    with pytest.raises(GraphError, match="external file"):
        export_model(content, {"w": np.ones((4, 4), np.float32)})


def test_nor_for_a_training_graph_that_was_built_before(content, tmp_path):
    made = onnx.load_model_from_string(content)
    helper.set_model_props(made, {"edgeasync.contract": "1"})
    with pytest.raises(GraphError, match="external file"):
        read_training_graph(made.SerializeToString(), {"w": np.ones((4, 4), np.float32)})
    path = tmp_path / "training.onnx"
    path.write_bytes(made.SerializeToString())
    (tmp_path / "training.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(GraphError, match="external file"):
        load_graph(OnnxModel(file=str(path)))


def test_a_device_screens_such_a_graph_out(content):
    with pytest.raises(GraphError):
        check_graph(content, bytes_max=1 << 20)


@pytest.mark.parametrize("field", ["tensors", "graphs", "sparse_tensors", "type_protos", "sparse_tensor", "tp"])
def test_a_device_lets_nothing_empty_pass_for_what_it_does_not_read(field):
    made = model([helper.make_node("Relu", ["w"], ["v"])])
    attribute = made.graph.node[0].attribute.add()
    attribute.name = "a"
    place = getattr(attribute, field)
    if hasattr(place, "add"):
        place.add()
    else:
        place.SetInParent()
    with pytest.raises(GraphError, match=r"an attribute of .* has "):
        check_graph(made.SerializeToString(), bytes_max=1 << 20)


def test_a_sound_model_is_trained():
    made = build_training_graph(model(initializers=[inside()]).SerializeToString(), GraphSettings(loss="mse"))
    assert made.spec.length == 20


# -- loops that never end --------------------------------------------------------------------------------------

ENDLESS = 1 << 26


def scan(length, *, inner=None, name="x", axis=None):
    """Return a Scan over tensor `name` that sums, or whose body has the node `inner` for that."""
    inner = inner or helper.make_node("Add", ["s", "i"], ["t"])
    nodes = [inner, helper.make_node("Identity", ["t"], ["o"])]
    body = helper.make_graph(nodes, "b", [value("s", ()), value("i", length)], [value("t", ()), value("o", ())])
    axes = {} if axis is None else {"scan_input_axes": [axis]}
    return helper.make_node("Scan", ["q", name], ["last", "all"], num_scan_inputs=1, body=body, **axes)


def looping(nodes, *, x=(), initializers=()):
    graph = helper.make_graph(
        nodes, "g", [value("q", ()), *([value("x", x)] if x else [])], [value("last", ())], initializers
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def numbers(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def expanded(length):
    nodes = [helper.make_node("Expand", ["q", "n"], ["x"]), scan(())]
    return looping(nodes, initializers=[numbers("n", length)])


def filled(length):
    nodes = [
        helper.make_node("Constant", [], ["n"], value=numbers("", 2, length)),
        helper.make_node("ConstantOfShape", ["n"], ["x"]),
        scan((2,), axis=-1),
    ]
    return looping(nodes)


def nested(length):
    """Return a Scan in a Scan, each over the root of the length."""
    root = round(length**0.5)
    inner = scan((), name="i")
    inner.input[0], inner.output[0], inner.output[1] = "s", "t", "u"
    return looping([scan((root,), inner=inner)], x=(root, root))


LENGTHS = {
    "of an input": lambda length: looping([scan(())], x=(length,)),
    "of an input's other axis": lambda length: looping([scan((3,), axis=1)], x=(3, length)),
    "of an initializer": lambda length: looping(
        [scan(())], initializers=[TensorProto(name="x", dims=(length,), data_type=1, raw_data=bytes(4 * length))]
    ),
    "of an expanded tensor": expanded,
    "of a filled tensor": filled,
    "of two, one in the other": nested,
}


@pytest.mark.parametrize("make", LENGTHS.values(), ids=LENGTHS)
def test_a_device_refuses_a_scan_that_is_known_to_be_too_long(make):
    check_graph(make(SCAN_STEPS_MAX).SerializeToString(), bytes_max=1 << 30)
    with pytest.raises(GraphError, match=rf"over the limit of {SCAN_STEPS_MAX}"):
        check_graph(make(4 * SCAN_STEPS_MAX).SerializeToString(), bytes_max=1 << 30)


def test_a_scan_of_unknown_length_passes_the_screen():
    check_graph(looping([scan(())], x=("n",)).SerializeToString(), bytes_max=1 << 20)


def hidden_loop():
    """Return a training graph whose loss is that of a Scan of 2^26 steps: no constant says its length."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], end=1),
        helper.make_node("Mul", ["s", "n"], ["l"]),
        helper.make_node("Expand", ["q", "l"], ["z"]),
        scan((), name="z"),
        helper.make_node("Add", ["last", "q"], ["loss"]),
        helper.make_node("Identity", ["q"], ["loss_weight"]),
        helper.make_node("Identity", ["x"], ["y"]),
        helper.make_node("Identity", ["w"], ["w.grad"]),
        helper.make_node("Shape", ["target"], ["rows"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            value("x", ("batch", 1)),
            helper.make_tensor_value_info("target", TensorProto.INT64, ("batch",)),
            value("w", (2,)),
        ],
        [
            value("loss", ()),
            value("loss_weight", ()),
            value("y", ("batch", 1)),
            value("w.grad", (2,)),
            helper.make_tensor_value_info("rows", TensorProto.INT64, (1,)),
        ],
        [numpy_helper.from_array(np.float32(0.0), "q"), numbers("n", ENDLESS)],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    helper.set_model_props(made, {"edgeasync.output": "y"})
    return made.SerializeToString()


@pytest.mark.asyncio
async def test_an_agent_that_stops_ends_a_graph_that_never_returns(tmp_path):
    graph, spec = hidden_loop(), ParameterSpec((Parameter("w", (2,)),))
    check_graph(graph, bytes_max=1 << 20)
    dataset = Dataset.of(np.zeros((4, 1), np.float32), np.zeros(4, np.int64))
    trainer = onnx_trainer(graph, spec, dataset, (SGD(learning_rate=0.1),), batch_size=4)
    stepping = asyncio.Event()
    loop, step = asyncio.get_running_loop(), trainer.step
    trainer.step = lambda: loop.call_soon_threadsafe(stepping.set) and step()
    network, address = ZmqNetwork(), "inproc://hub"
    hub = HubRuntime(run_settings(tmp_path / "run", address), zeros(spec), network=network)
    agent = AgentRuntime(*agent_parts(lambda _: trainer, hub=address), network=network)
    try:
        async with asyncio.timeout(PATIENCE_S):
            serving, running = asyncio.create_task(hub.run()), asyncio.create_task(agent.run())
            await stepping.wait()
            training = [thread for thread in threading.enumerate() if thread.name == "train"]
            agent.request_stop()
            assert await running == "stopped"
            for thread in training:
                await asyncio.to_thread(thread.join, PATIENCE_S / 4)
            hub.request_stop()
            await serving
    finally:
        network.close()
    assert [thread for thread in training if thread.is_alive()] == [], "the graph keeps the thread"


# -- a hub's time and memory -----------------------------------------------------------------------------------


def slow():
    """Return a model whose forward run is a Scan of 2^26 steps."""
    made = model([
        helper.make_node("Constant", [], ["n"], value=numbers("", ENDLESS)),
        helper.make_node("Constant", [], ["q"], value=numpy_helper.from_array(np.float32(0.0))),
        helper.make_node("Expand", ["q", "n"], ["z"]),
        scan((), name="z"),
        helper.make_node("Identity", ["last"], ["v"]),
    ])  # fmt: skip
    return made.SerializeToString()


def large():
    """Return a model whose forward run takes 4 GiB."""
    made = model([
        helper.make_node("Constant", [], ["n"], value=numbers("", 1 << 30)),
        helper.make_node("ConstantOfShape", ["n"], ["z"]),
        helper.make_node("ReduceSum", ["z"], ["v"], keepdims=0),
    ])  # fmt: skip
    return made.SerializeToString()


def write(path, content):
    path.write_bytes(content)
    return str(path)


def test_a_graph_that_is_built_apart_is_the_same(tmp_path):
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    content = nn.to_onnx(layers, (3,)).SerializeToString()
    settings = OnnxModel(file=write(tmp_path / "m.onnx", content), train=["2.*"])
    here, apart = load_graph(settings), load_graph_apart(settings)
    assert here.frozen is not None
    for field in {*HubGraph.__struct_fields__} - {"initial"}:
        assert getattr(here, field) == getattr(apart, field)
    np.testing.assert_array_equal(here.initial, apart.initial)


@pytest.mark.parametrize(
    "settings",
    [
        OnnxModel(file="nowhere.onnx"),
        OnnxModel(file="secret"),
        OnnxModel(file="outside.onnx"),
        OnnxModel(file="sound.onnx", train=("none of them",)),
    ],
    ids=lambda settings: settings.file,
)
def test_what_is_wrong_with_a_file_is_told_as_ever(tmp_path, settings):
    write(tmp_path / "outside.onnx", in_constant().SerializeToString())
    write(tmp_path / "sound.onnx", model(initializers=[inside()]).SerializeToString())
    with pytest.raises(EdgeAsyncError) as here:
        load_graph(settings)
    with pytest.raises(type(here.value)) as apart:
        load_graph_apart(settings)
    assert str(here.value) == str(apart.value)


def test_a_model_that_takes_too_long_is_given_up(tmp_path):
    settings = OnnxModel(file=write(tmp_path / "slow.onnx", slow()), loss="mse", build_s_max=4.0)
    with pytest.raises(
        GraphError, match=r"slow\.onnx: .* took longer than 4 s, the limit of \[model\] build_s_max;"
    ):
        load_graph_apart(settings)


def test_a_model_that_takes_too_much_memory_is_given_up(tmp_path):
    settings = OnnxModel(
        file=write(tmp_path / "large.onnx", large()), loss="mse", build_memory_bytes_max=ByteCount(512 << 20)
    )
    with pytest.raises(
        GraphError, match=r"large\.onnx: .* the memory limit is 536870912 bytes, set by .*build_memory_bytes_max"
    ):
        load_graph_apart(settings)


def test_so_is_one_that_ends_the_process(tmp_path, monkeypatch):
    settings = OnnxModel(file=write(tmp_path / "m.onnx", slow()), loss="mse")
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -signal.SIGSEGV, b"", b"")
    )
    with pytest.raises(GraphError, match=r"m\.onnx: building its training graph was ended by SIGSEGV"):
        load_graph_apart(settings)


@pytest.mark.process
def test_the_commands_build_within_the_limits(tmp_path):
    file = write(tmp_path / "slow.onnx", slow())
    table = f'[model]\nkind = "onnx"\nfile = "{file}"\nloss = "mse"\nbuild_s_max = 4\n'
    (tmp_path / "hub.toml").write_text(table)
    with Commands(tmp_path) as commands:
        mistake(commands, GRAPH, "build_s_max", arguments=["hub", "hub.toml"])


@pytest.mark.process
@pytest.mark.parametrize("command", ["build", "inspect", "check"])
def test_commands_for_models_do_so_too(tmp_path, monkeypatch, command):
    told = []
    monkeypatch.setattr(
        "edgeasync.ops.inspection.load_graph_apart", lambda settings: told.append(settings.file) or stop()
    )
    with Commands(tmp_path) as commands:
        out = ["--out", "out.onnx"] if command == "build" else []
        mistake(commands, GRAPH, "stopped", arguments=["model", command, "m.onnx", *out])
    assert told == [str(tmp_path / "m.onnx")]


def test_python_does_so_too(tmp_path, monkeypatch):
    monkeypatch.setattr("edgeasync.sdk.models.load_graph_apart", lambda settings: stop())
    with pytest.raises(GraphError, match="stopped here"):
        train(tmp_path / "m.onnx", (np.eye(3), np.arange(3)), workers=1)


def stop():
    raise GraphError("stopped here")
