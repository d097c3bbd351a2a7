"""A model of several inputs is trained and evaluated as the same model of one input that has them side by side."""

import numpy as np
import onnx
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.data.dataset import Dataset
from edgeasync.data.files import load
from edgeasync.data.partition import dirichlet, iid
from edgeasync.errors import DataError, GraphError
from edgeasync.graphs.evaluation import OnnxEvaluator
from edgeasync.policies.optimizers import SGD
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.models.trainers import onnx_trainer

N = 40
GENERATOR = np.random.default_rng(0)
IMAGE, AGE = (GENERATOR.normal(size=(N, width)).astype(np.float32) for width in (4, 2))
TOKENS = GENERATOR.integers(0, 5, (N, 3))
LABELS = GENERATOR.integers(0, 3, N)
TWO = Dataset.of({"age": AGE, "image": IMAGE}, LABELS)
ONE = Dataset.of(np.concatenate([IMAGE, AGE], 1), LABELS)
WEIGHT = GENERATOR.normal(size=(6, 3)).astype(np.float32)


def model_of(inputs, body, **arrays):
    proto = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 18]> g ({inputs}) => (float[batch, 3] y) {{ {body} }}'
    )
    proto.graph.initializer.extend([onnx.numpy_helper.from_array(value, name) for name, value in arrays.items()])
    return proto.SerializeToString()


def two(batch="batch"):
    joined = "joined = Concat<axis = 1>(image, age) y = MatMul(joined, w)"
    return model_of(f"float[{batch}, 4] image, float[{batch}, 2] age", joined, w=WEIGHT)


def one():
    return model_of("float[batch, 6] x", "y = MatMul(x, w)", w=WEIGHT)


def trained(model, data, **options):
    graph = build_training_graph(model, GraphSettings())
    trainer = onnx_trainer(graph.model, graph.spec, data, [SGD(learning_rate=0.1)], provider="cpu", **options)
    vector = graph.initial.copy()
    trainer.begin(vector)
    return [trainer.step() for _ in range(8)], vector, graph


@pytest.mark.parametrize("options", [{"batch_size": 16}, {"batch_size": 16, "micro_batch_size": 5}])
def test_two_inputs_are_trained_as_one_that_has_both(options):
    found, vector, _ = trained(two(), TWO, **options)
    expected, same, _ = trained(one(), ONE, **options)
    assert [result.loss for result in found] == pytest.approx([result.loss for result in expected])
    np.testing.assert_allclose(vector, same, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", ["batch", 16])
def test_two_inputs_are_evaluated_as_one_that_has_both(batch):
    _, vector, graph = trained(two(batch), TWO, batch_size=16)
    evaluated = OnnxEvaluator(two(batch), graph.spec, GraphSettings(), TWO)(vector)
    same = OnnxEvaluator(one(), graph.spec, GraphSettings(), ONE)(vector)
    assert evaluated.loss == pytest.approx(same.loss)
    assert (evaluated.accuracy, evaluated.examples) == (same.accuracy, N)


def test_each_input_has_a_type_of_its_own():
    body = "found = Gather(table, tokens) mean = ReduceMean<keepdims = 0>(found, one) y = Add(mean, image)"
    arrays = {"table": GENERATOR.normal(size=(5, 3)).astype(np.float32), "one": np.array([1])}
    model = model_of("int64[batch, 3] tokens, float[batch, 3] image", body, **arrays)
    data = Dataset.of({"tokens": TOKENS, "image": IMAGE[:, :3]}, LABELS)
    results, _, _ = trained(model, data)
    assert results[-1].loss < results[0].loss
    with pytest.raises(DataError, match="examples are not whole numbers"):
        trained(model, Dataset.of({"tokens": IMAGE[:, :3], "image": IMAGE[:, :3]}, LABELS))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            ONE,
            "the data has one array x, but the hub's model expects image, age; pass an array for each",
        ),
        (
            Dataset.of({"image": IMAGE}, LABELS),
            "has the inputs image, but the hub's model expects image, age",
        ),
        (
            Dataset.of({"image": IMAGE, "sex": AGE}, LABELS),
            "has the inputs image, sex, but the hub's model expects image, age",
        ),
        (
            Dataset.of({"image": AGE, "age": IMAGE}, LABELS),
            r"examples of shape \(2,\), but the hub's model expects \(4,\)",
        ),
    ],
)
def test_other_inputs_are_refused(data, words):
    with pytest.raises(DataError, match=words):
        trained(two(), data)
    graph = build_training_graph(two(), GraphSettings())
    with pytest.raises(DataError, match=words):
        OnnxEvaluator(two(), graph.spec, GraphSettings(), data)


def test_inputs_of_two_sizes_of_the_batch_are_refused():
    proto = onnx.load_model_from_string(build_training_graph(two(), GraphSettings()).model)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 16
    graph = build_training_graph(two(), GraphSettings())
    with pytest.raises(GraphError, match="the graph's inputs image, age have no common batch size"):
        onnx_trainer(proto.SerializeToString(), graph.spec, TWO, [SGD()], provider="cpu")


def test_a_model_of_one_input_takes_it_by_its_name_too():
    named, vector, _ = trained(one(), Dataset.of({"x": ONE.x}, LABELS))
    plain, same, _ = trained(one(), ONE)
    assert named == plain
    np.testing.assert_array_equal(vector, same)


def test_models_in_numpy_take_one():
    with pytest.raises(DataError, match="the data has the inputs age, image, but a single array x is expected"):
        SoftmaxModel(inputs=6, classes=3).check_data(TWO)


# -- data ------------------------------------------------------------------------------------------------------


def test_a_file_has_an_array_for_each_input(tmp_path):
    path = tmp_path / "two.npz"
    np.savez(path, **{"x.image": IMAGE, "x.age": AGE, "y": LABELS})
    found = load(path)
    assert list(found.features.arrays) == ["image", "age"]
    np.testing.assert_array_equal(found.features.arrays["age"], AGE)
    for arrays, words in (
        ({"x": IMAGE, "x.age": AGE, "y": LABELS}, r"has both x and x\.age; use x for one input, or x\.NAME"),
        ({"x.image": IMAGE, "x.age": AGE}, "array 'y' is missing"),
    ):
        np.savez(path, **arrays)
        with pytest.raises(DataError, match=words):
            load(path)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ({}, "x is empty; pass an array for each input of the model, by its name"),
        ({"a": IMAGE, "b": AGE[1:]}, r"39 examples in x\['b'\] but 40 labels"),
        ({"a": IMAGE, "b": AGE[:, 0]}, r"x\['b'\] has 1 dimensions; pass one row of features"),
        ({"a": IMAGE * np.nan}, r"x\['a'\] has values that are not finite"),
        ({"a": IMAGE.astype(str)}, r"x\['a'\] has type .*; use real numbers"),
    ],
)
def test_inputs_that_are_no_examples(x, words):
    with pytest.raises(DataError, match=words):
        Dataset.of(x, LABELS)


@pytest.mark.parametrize("part", [iid, lambda data, parts, seed: dirichlet(data, parts, 1.0, seed)])
def test_parts_keep_the_inputs_of_an_example_together(part):
    pairs = {(row.tobytes(), other.tobytes()) for row, other in zip(IMAGE, AGE, strict=True)}
    for piece in part(TWO, 3, 0):
        arrays = piece.features.arrays
        assert len(piece) == len(arrays["image"]) == len(arrays["age"])
        found = zip(arrays["image"], arrays["age"], strict=True)
        assert {(row.tobytes(), other.tobytes()) for row, other in found} <= pairs
