"""A small BERT that onnxruntime's optimizer has fused trains as in torch."""

import math

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sympy")  # onnxruntime.transformers needs it

from onnxruntime.transformers import optimizer
from onnxruntime.transformers.fusion_options import FusionOptions

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.training.graph_check import check_graph
from tests.support.models.torch_exports import distance, open_graph

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's exporters and what they call warn of themselves

nn, F = torch.nn, torch.nn.functional
WIDTH, HEADS, LENGTH = 8, 2, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.norm, self.last = nn.LayerNorm(WIDTH, 1e-12), nn.LayerNorm(WIDTH, 1e-12)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)

    def forward(self, x, bias):
        query, key, value = [self.heads(layer(x)) for layer in (self.query, self.key, self.value)]
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS) + bias
        mixed = (scores.softmax(-1) @ value).permute(0, 2, 1, 3).contiguous()
        x = self.norm(self.out(mixed.view(mixed.shape[0], mixed.shape[1], WIDTH)) + x)
        return self.last(self.down(F.gelu(self.up(x))) + x)


class Bert(nn.Module):
    """BERT as transformers writes it, with eager attention."""

    def __init__(self):
        super().__init__()
        self.words, self.kinds, self.places = [nn.Embedding(size, WIDTH) for size in (20, 2, LENGTH)]
        self.norm, self.head = nn.LayerNorm(WIDTH, 1e-12), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("positions", torch.arange(LENGTH)[None])

    def forward(self, ids, mask, kinds):
        x = self.words(ids) + self.kinds(kinds) + self.places(self.positions[:, : ids.shape[1]])
        x = self.norm(x)
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * -10000.0
        for block in self.blocks:
            x = block(x, bias)
        return self.head(x[:, 0])


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    model = Bert()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    return model


DATA = {
    "ids": torch.tensor([[1, 5, 7, 2, 0, 0], [1, 9, 9, 4, 6, 2], [1, 2, 0, 0, 0, 0]]),
    "mask": torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]),
    "kinds": torch.tensor([[0, 0, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]),
}
TARGET = torch.tensor([2, 0, 1])


def fused(model, path, opset, level, *, separate=False):
    """Return the optimized file, and the operators of onnxruntime in it."""
    options = FusionOptions("bert")
    options.use_multi_head_attention = separate
    torch.onnx.export(
        model, tuple(DATA.values()), path, input_names=[*DATA], output_names=["y"], opset_version=opset,
        dynamo=False, dynamic_axes={name: {0: "batch"} for name in (*DATA, "y")},
    )  # fmt: skip
    made = optimizer.optimize_model(
        str(path), "bert", num_heads=HEADS, hidden_size=WIDTH, opt_level=level, optimization_options=options
    )
    made.save_model_to_file(str(path))
    return path.read_bytes(), {node.op_type for node in onnx.load(path).graph.node if node.domain}


FUSED = {"EmbedLayerNormalization", "Attention", "SkipLayerNormalization", "BiasGelu"}
CASES = {
    "transformers": (18, 0, False, FUSED),
    "separate matrices": (20, 0, True, FUSED - {"Attention"} | {"MultiHeadAttention"}),
    "after onnxruntime's basic ones": (18, 1, False, FUSED),
    "after all of onnxruntime": (18, 99, False, FUSED),
    "an old opset": (14, 0, False, FUSED),
}
"""Opsets, levels of onnxruntime's own optimizer, whether attention has several matrices, and what is fused."""


@pytest.mark.parametrize("case", CASES)
def test_gradients(bert, tmp_path, case):
    opset, level, separate, operators = CASES[case]
    data, own = fused(bert, tmp_path / "bert.onnx", opset, level, separate=separate)
    graph = build_training_graph(data, GraphSettings())
    check_graph(graph.model, bytes_max=1 << 20)
    opened = open_graph(graph)
    values = graph.spec.views(graph.initial)
    feeds = {name: value.numpy() for name, value in DATA.items()} | {"target": TARGET.numpy()} | values
    names = [entry.name for entry in opened.get_outputs()]
    found = dict(zip(names, opened.run(names, feeds), strict=True))

    exact = Bert().double()
    exact.load_state_dict(bert.state_dict())
    loss = F.cross_entropy(exact(*DATA.values()), TARGET)
    loss.backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    slopes = {}
    for parameter in exact.parameters():
        numbers = parameter.detach().numpy().ravel().astype(np.float32)
        slopes |= dict(zip(numbers.tolist(), parameter.grad.numpy().ravel(), strict=True))
    assert sum(value.size for value in values.values()) == len(slopes)
    for name, value in values.items():
        expected = np.array([slopes[number] for number in value.ravel().tolist()]).reshape(value.shape)
        assert distance(found[f"{name}.grad"], expected, 1e-2) < 1e-5, name
    assert own == operators
