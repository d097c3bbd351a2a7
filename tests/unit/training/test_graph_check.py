"""What a device lets in as a graph: standard operators in one self-contained file, and nothing else."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeasync.errors import GraphError
from edgeasync.protocol.graph import Base
from edgeasync.protocol.operators import ALLOWED, ALLOWED_OWN
from edgeasync.training import graph_check
from edgeasync.training.graph_check import DEPTH_MAX, check_graph

LIMIT = 1 << 20


def value(name, shape=(None, 4)):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def tensor(name="w", **fields):
    made = numpy_helper.from_array(np.arange(16, dtype=np.float32).reshape(4, 4), name)
    for field, content in fields.items():
        setattr(made, field, content)
    return made


def model(nodes=None, *, opsets=(("", 21),), initializers=None, **fields):
    nodes = nodes or [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    graph = helper.make_graph(nodes, "g", [value("x")], [value("y")], initializers or [tensor()])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid(*opset) for opset in opsets], **fields)
    helper.set_model_props(made, {"edgeasync.contract": "1"})
    return made


def scan(depth=1):
    """Return a Scan whose body sums, inside as many others as are wanted."""
    inner = (
        helper.make_node("Add", ["s", "i"], ["t"])
        if depth == 1
        else helper.make_node(
            "Scan", ["s", "i"], ["t", "u"], num_scan_inputs=1, body=scan(depth - 1).attribute[1].g
        )
    )
    nodes = [inner, helper.make_node("Identity", ["t"], ["o"])]
    body = helper.make_graph(
        nodes, "b", [value("s", (4,)), value("i", (4,))], [value("t", (4,)), value("o", (4,))]
    )
    node = helper.make_node("Scan", ["z", "x"], ["last", "y"], num_scan_inputs=1, body=body)
    node.attribute.sort(key=lambda attribute: attribute.name == "body")
    return node


def check(made, **limits):
    content = made if isinstance(made, bytes) else made.SerializeToString()
    check_graph(content, **{"bytes_max": LIMIT} | limits)


# -- what passes -----------------------------------------------------------------------------------------------


def test_a_graph_of_standard_operators_passes():
    check(model())
    check(model([scan()]))


def test_the_standard_domain_has_two_names():
    node = helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx")
    check(model([node], opsets=[("ai.onnx", 21)]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.bool_])
def test_constants_of_every_plain_type(dtype):
    array = np.ones((2, 3), dtype)
    check(model(initializers=[numpy_helper.from_array(array, "w")]))
    typed = helper.make_tensor(
        "w", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), (2, 3), array.ravel().tolist()
    )
    check(model(initializers=[typed]))
    check(model([helper.make_node("Constant", [], ["y"], value=typed)]))


def test_every_allowed_operator_is_one_of_onnx():
    assert {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain} >= ALLOWED


OWN = ("com.microsoft", 1)


@pytest.mark.parametrize("name", sorted(ALLOWED_OWN))
def test_operators_of_onnxruntime_itself_that_are_let_in(name):
    node = helper.make_node(name, ["x"], ["y"], domain="com.microsoft")
    check(model([node], opsets=[("", 21), OWN]))


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4])
@pytest.mark.parametrize("size", [4, 5])
def test_constants_of_four_bits(kind, size):
    packed = helper.make_tensor("w", kind, (size,), bytes((size + 1) // 2), raw=True)
    check(model(initializers=[packed]))
    packed.raw_data += b"0"
    with pytest.raises(GraphError, match="does not match its shape"):
        check(model(initializers=[packed]))


BASE = Base("5" * 64, 4096)


def in_base(base=BASE, *, dims=(4, 4), **entries):
    """Return a constant of 64 bytes whose values are in a base."""
    made = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in ({"location": base.file_name, "offset": "128", "length": "64"} | entries).items():
        made.external_data.add(key=key, value=value)
    return made


def test_constants_may_be_in_the_base_that_the_hub_announced():
    check(model(initializers=[in_base(), in_base(offset="4032")]), base=BASE)
    check(model(initializers=[in_base(), tensor("v")]), base=BASE)
    with pytest.raises(GraphError, match="values in another file"):
        check(model(initializers=[in_base()]))
    constant = helper.make_node("Constant", [], ["y"], value=in_base())
    with pytest.raises(GraphError, match="values in another file"):
        check(model([constant]), base=BASE)


def with_both():
    made = in_base()
    made.raw_data = bytes(64)
    return made


def with_a_fourth_entry():
    made = in_base()
    made.external_data.add(key="location", value="/etc/passwd")
    return made


def named_but_not_placed():
    made = in_base()
    made.data_location = TensorProto.DEFAULT
    return made


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (in_base(location="/etc/passwd"), "another file than the hub's base"),
        (in_base(location=f"../{BASE.file_name}"), "another file than the hub's base"),
        (in_base(Base("6" * 64, 4096)), "another file than the hub's base"),
        (in_base(offset="4033"), "64 bytes from byte 4033 on, but the base has 4096"),
        (in_base(offset="-64"), "the offset or length '-64'"),
        (in_base(offset="0x80"), "the offset or length '0x80'"),
        (in_base(offset="\u0661"), "the offset or length"),
        (in_base(offset="9" * 40), "the offset or length '9"),
        (in_base(length="60"), "does not match its shape"),
        (in_base(dims=(1 << 40, 1 << 40)), "does not match its shape"),
        (in_base(checksum="0"), "needs one location, offset and length"),
        (with_a_fourth_entry(), "needs one location, offset and length"),
        (with_both(), "values in two places"),
        (named_but_not_placed(), "values in two places"),
    ],
)
def test_no_constant_reads_anything_but_the_base(made, reason):
    with pytest.raises(GraphError, match=reason):
        check(model(initializers=[made]), base=BASE)


# -- what does not ---------------------------------------------------------------------------------------------


def body():
    return helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "b", [], [value("y")])


def with_function():
    made = model()
    made.functions.append(
        helper.make_function("", "Relu", ["x"], ["y"], [helper.make_node("Abs", ["x"], ["y"])], made.opset_import)
    )
    return made


def with_training_info():
    made = model()
    made.training_info.add().algorithm.name = "sgd"
    return made


def external(**fields):
    made = tensor(**fields)
    entry = made.external_data.add()
    entry.key, entry.value = "location", "/etc/passwd"
    return made


def sparse():
    made = model()
    made.graph.sparse_initializer.add().values.CopyFrom(tensor())
    return made


def typed_attribute(field):
    node = helper.make_node("Relu", ["x"], ["y"])
    attribute = node.attribute.add()
    attribute.name = "a"
    place = getattr(attribute, field)
    if field in ("tensors", "graphs", "sparse_tensors", "type_protos"):
        place.add().Clear()
        content = {"tensors": tensor(), "graphs": body()}.get(field)
        if content is None:
            content = onnx.SparseTensorProto(dims=[1]) if "sparse" in field else onnx.TypeProto(denotation="d")
        place[0].CopyFrom(content)
    elif field == "ref_attr_name":
        attribute.ref_attr_name = "outer"
    else:
        content = {"sparse_tensor": onnx.SparseTensorProto(dims=[1]), "tp": onnx.TypeProto(denotation="d")}[field]
        place.CopyFrom(content)
    return model([node])


def lying(**fields):
    return model(initializers=[tensor(**fields)])


def shaped(*dims):
    made = tensor()
    made.dims[:] = dims
    return model(initializers=[made])


HOSTILE = {
    "a foreign domain": (lambda: model([helper.make_node("Relu", ["x"], ["y"], domain="evil")]), "'evil'"),
    "microsoft's operators": (
        lambda: model([helper.make_node("Attention", ["x"], ["y"], name="n", domain="com.microsoft")]),
        r"node 'n' \(Attention\): this operator is not supported on devices",
    ),
    "microsoft's operators twice": (lambda: model(opsets=[("", 21), OWN, OWN]), "3 operator sets"),
    "microsoft's operators alone": (lambda: model(opsets=[OWN]), "1 operator sets"),
    "another version of microsoft's operators": (
        lambda: model(opsets=[("", 21), ("com.microsoft", 2)]), "'com.microsoft'"
    ),
    "a standard name in microsoft's domain": (
        lambda: model([helper.make_node("Loop", ["x"], ["y"], domain="com.microsoft")]), "not supported on devices"
    ),
    "microsoft's name in the standard domain": (
        lambda: model([helper.make_node("MatMulNBits", ["x"], ["y"])]), "is not supported on devices"
    ),
    "blocks of no values": (
        lambda: model([helper.make_node("MatMulNBits", ["x"], ["y"], domain="com.microsoft", block_size=0)]),
        "block_size must be from 1 to",
    ),
    "a foreign set of operators": (lambda: model(opsets=[("", 21), ("evil", 1)]), "'evil'"),
    "two sets of operators": (lambda: model(opsets=[("", 21), ("ai.onnx", 18)]), "2 operator sets"),
    "no set of operators": (lambda: model(opsets=[]), "0 operator sets"),
    "an old opset": (lambda: model(opsets=[("", 7)]), "opset 7"),
    "an opset to come": (lambda: model(opsets=[("", 1000)]), "opset 1000"),
    "an operator nobody knows": (lambda: model([helper.make_node("Evil", ["x"], ["y"], name="e")]), "'e' .Evil"),
    "If": (
        lambda: model([helper.make_node("If", ["x"], ["y"], then_branch=body(), else_branch=body())]),
        "a node .If.: this operator is not supported",
    ),
    "Loop": (lambda: model([helper.make_node("Loop", ["n", "c"], ["y"], body=body())]), "Loop"),
    "a division by no groups": (
        lambda: model([helper.make_node("ConvTranspose", ["x", "w"], ["y"], group=0)]),
        "group must be from 1 to",
    ),
    "less than no groups": (
        lambda: model([helper.make_node("Conv", ["x", "w"], ["y"], group=-1)]),
        "group must be from 1 to",
    ),
    "randomness": (lambda: model([helper.make_node("RandomNormal", [], ["y"], shape=[2])]), "RandomNormal"),
    "a graph where none belongs": (lambda: model([helper.make_node("Relu", ["x"], ["y"], body=body())]), "Scan"),
    "a bad node inside a Scan": (
        lambda: model([helper.make_node("Scan", ["x"], ["y"], num_scan_inputs=1, body=model(
            [helper.make_node("Evil", ["x"], ["y"])]).graph)]),
        "Evil",
    ),
    "graphs too deep": (lambda: model([scan(DEPTH_MAX)]), f"more than {DEPTH_MAX} levels deep"),
    "functions": (with_function, "functions of its own"),
    "training_info": (with_training_info, "training_info"),
    "an external tensor": (lambda: model(initializers=[external(data_location=1)]), "another file"),
    "an external tensor that does not say so": (lambda: model(initializers=[external()]), "another file"),
    "a location alone": (lambda: lying(data_location=1), "another file"),
    "an external constant": (
        lambda: model([helper.make_node("Constant", [], ["y"], value=external(data_location=1))]), "another file"
    ),
    "a sparse initializer": (sparse, "sparse"),
    **{
        f"an attribute's {field}": (lambda field=field: typed_attribute(field), "attribute .* has ")
        for field in ("tensors", "graphs", "sparse_tensor", "sparse_tensors", "tp", "type_protos", "ref_attr_name")
    },
    "text": (lambda: model(initializers=[helper.make_tensor("w", TensorProto.STRING, [1], [b"a"])]), "text"),
    "a type of no numbers": (lambda: lying(data_type=14), "type 14"),
    "a shape without its values": (lambda: shaped(1 << 40), "does not match its shape"),
    "a shape whose product is right by wrapping": (lambda: shaped(-4, -4), "does not match its shape"),
    "too many dimensions": (lambda: shaped(*[1] * 40), "dimensions"),
    "no bytes": (lambda: b"", "no graph"),
    "text for a model": (lambda: b"not a model at all", "damaged|unknown field"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "sentence"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_refused(make, sentence):
    with pytest.raises(GraphError, match=sentence) as told:
        check(make())
    assert len(str(told.value)) < 400
    assert str(told.value).isprintable()


def test_what_is_too_large(monkeypatch):
    content = model().SerializeToString()
    check(content, bytes_max=len(content))
    with pytest.raises(GraphError, match=f"{len(content)} bytes, over the limit of {len(content) - 1}"):
        check(content, bytes_max=len(content) - 1)
    monkeypatch.setattr(graph_check, "NODES_MAX", 3)
    check(model([scan()]))
    monkeypatch.setattr(graph_check, "NODES_MAX", 2)
    with pytest.raises(GraphError, match="more than 2 nodes"):
        check(model([scan()]))


def test_a_message_of_nothing_but_fields_is_given_up():
    with pytest.raises(GraphError, match="fields"):
        check(b"\x72\x00" * (2 << 20), bytes_max=1 << 30)


def test_a_second_graph_is_not_merged_into_the_first():
    """Protobuf merges them: onnxruntime would run what a reader of either one alone does not see."""
    evil = model([helper.make_node("Loop", ["n", "c"], ["y"], body=body())])
    with pytest.raises(GraphError, match="two values of graph"):
        check(model().SerializeToString() + onnx.ModelProto(graph=evil.graph).SerializeToString())


@pytest.mark.parametrize(
    "tail", [b"\x38\x00", b"\x3b\x3c", b"\x00", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\xda\x01\x00"]
)
def test_what_protobuf_would_skip_is_refused(tail):
    with pytest.raises(GraphError):
        check(model().SerializeToString() + tail)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_truncated_graph_is_refused(share):
    content = model().SerializeToString()
    with pytest.raises(GraphError):
        check(content[: int(len(content) * share)])
