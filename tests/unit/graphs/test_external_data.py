"""Values in files beside a model: those that exporters write are read, and no others."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeasync.errors import GraphError
from edgeasync.graphs.graph_model import MODEL_BYTES_MAX, load_graph, read_onnx_file
from edgeasync.graphs.onnx_model import OnnxModel

WEIGHTS = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
BIAS = np.array([5, 6], np.float32)
OF_TORCH = {"w": "m.onnx.data", "b": "m.onnx.data"}


def write(folder: Path, places: Mapping[str, str] = OF_TORCH) -> Path:
    """Write a classifier whose weights are in other files, one after the other."""
    value = helper.make_tensor_value_info
    arrays = [numpy_helper.from_array(WEIGHTS, "w"), numpy_helper.from_array(BIAS, "b")]
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        "g", [value("x", TensorProto.FLOAT, ("n", 4))], [value("y", TensorProto.FLOAT, ("n", 2))], arrays,
    )  # fmt: skip
    for name in set(places.values()):
        (folder / name).write_bytes(b"")
    for array in graph.initializer:
        place = folder / places[array.name]
        facts = {"location": places[array.name], "offset": place.stat().st_size, "length": len(array.raw_data)}
        place.write_bytes(place.read_bytes() + array.raw_data)
        array.ClearField("raw_data")
        array.data_location = TensorProto.EXTERNAL
        for key, fact in facts.items():
            array.external_data.add(key=key, value=str(fact))
    path = folder / "m.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString())
    return path


def changed(path: Path, **facts: str | bytes) -> OnnxModel:
    """Change where the file says that `w` is stored; without a value, say nothing."""
    proto = onnx.load(path, load_external_data=False)
    kept = {entry.key: entry.value for entry in proto.graph.initializer[0].external_data} | facts
    del proto.graph.initializer[0].external_data[:]
    for key, fact in kept.items():
        if fact:
            proto.graph.initializer[0].external_data.add(key=key, value=str(fact))
    path.write_bytes(proto.SerializeToString())
    return OnnxModel(file=str(path))


@pytest.mark.parametrize("places", [OF_TORCH, {"w": "m.onnx_data", "b": "m.onnx_data_1"}])
def test_files_beside_the_model_are_read_and_kept_in_one(tmp_path, places):
    built = load_graph(OnnxModel(file=str(write(tmp_path, places))))
    values = built.spec.views(built.initial)
    np.testing.assert_array_equal(values["w"], WEIGHTS)
    np.testing.assert_array_equal(values["b"], BIAS)
    for name in places.values():
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "m.onnx").write_bytes(built.forward or b"")
    assert load_graph(OnnxModel(file=str(tmp_path / "m.onnx"))).forward == built.forward


def test_an_offset_and_a_length_may_be_missing(tmp_path):
    write(tmp_path, {"w": "m.onnx.w", "b": "m.onnx.b"})
    changed(tmp_path / "m.onnx", offset="", length="")
    (array, _) = onnx.load_model_from_string(read_onnx_file(tmp_path / "m.onnx")).graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(array), WEIGHTS)


SECRETS = ["secret", "../secret", "/etc/passwd", "m.onnx/../secret", "m.onnx.d/../../secret", "", "m.onnx\\s"]


@pytest.mark.parametrize("name", SECRETS)
def test_no_other_file_is_read(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "m.onnx.d").mkdir()
    for folder in (tmp_path, tmp_path / "in"):
        (folder / "secret").write_bytes(WEIGHTS.tobytes())
    why = r"w' is stored in the external file .* whose names begin with 'm.onnx' are read; .*onnx.load\('m.onnx'\)"
    with pytest.raises(GraphError, match=why):
        load_graph(changed(write(tmp_path / "in"), location=name))


def test_links_and_folders_are_refused(tmp_path):
    path = write(tmp_path)
    (tmp_path / "m.onnx.data").rename(tmp_path / "secret")
    (tmp_path / "m.onnx.data").symlink_to("secret")
    with pytest.raises(GraphError, match=r"'m.onnx.data', which is a link; replace the link by the file"):
        read_onnx_file(path)
    (tmp_path / "m.onnx.data").unlink()
    (tmp_path / "m.onnx.data").mkdir()
    with pytest.raises(GraphError, match=r"'m.onnx.data', which cannot be read: Is a directory; correct the file"):
        read_onnx_file(path)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"location": "m.onnx.gone"}, "'m.onnx.gone', which is missing; copy it to the model's folder"),
        ({"offset": "9"}, "w' ends at byte 41 of the external file 'm.onnx.data', which has only 40 bytes"),
        ({"offset": "1000", "length": ""}, "w' ends at byte 1000 of .* which has only 40 bytes; copy or download"),
        ({"length": "4611686018427387904"}, "which has only 40 bytes"),
        ({"offset": "-8"}, "'-8' as its offset or length"),
        ({"length": "8 "}, "'8 ' as its offset or length in an external file; export the model again"),
        ({"length": "9" * 5000}, "'9{30}' as its offset"),
        ({"length": "30"}, r"not a readable ONNX model: .*w.* .30 bytes.* .32 bytes required"),
    ],
)  # fmt: skip
def test_places_that_are_wrong(tmp_path, facts, why):
    with pytest.raises(GraphError, match=why):
        load_graph(changed(write(tmp_path), **facts))


def test_a_file_that_only_mentions_a_location(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"no model, but a location")
    with pytest.raises(GraphError, match=r"m.onnx: not a readable ONNX model"):
        read_onnx_file(tmp_path / "m.onnx")


def test_the_size_of_all_values_is_limited(tmp_path):
    path = write(tmp_path)
    with (tmp_path / "m.onnx.data").open("r+b") as file:
        file.truncate(MODEL_BYTES_MAX + 4096)  # it occupies no space on the disk
    model = changed(path, length=str(MODEL_BYTES_MAX))
    with pytest.raises(GraphError, match="has more than 2147483648 bytes, which is the limit of an ONNX file"):
        load_graph(model)
