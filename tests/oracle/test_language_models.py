"""Language models beside torch: scores in chunks, a tied embedding, and layers that are computed twice."""

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import edgeasync.torch
from edgeasync.autodiff import chunks
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from tests.support.models.gradients import run

nn = torch.nn
CLASSES, TOKENS, WIDTH, LAYERS = 300, 16, 8, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.transpose(1, 2) + mask, -1) @ v)
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=not tied)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.register_buffer("mask", torch.full((TOKENS, TOKENS), -1e9).triu(1))
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table(x)
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.head(x).transpose(1, 2)


@pytest.mark.parametrize(("exporter", "tied"), [("dynamo", True), ("legacy", False)])
@pytest.mark.parametrize("train", [("*",), ("layers.*.norms.*",)], ids=str)
def test_the_gradients_are_those_of_torch(train, tied, exporter, monkeypatch):
    monkeypatch.setattr(chunks, "SCORES_BYTES_MIN", 0)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100 * TOKENS * 4)
    monkeypatch.setattr(chunks, "CLASSES_MIN", 2)
    torch.manual_seed(0)
    model = Model(tied=tied)
    tokens = torch.randint(0, CLASSES, (3, TOKENS))
    targets = tokens.roll(-1, 1)
    proto = edgeasync.torch.to_onnx(model, tokens, exporter=exporter)
    graph = build_training_graph(proto.SerializeToString(), GraphSettings(train=train, recompute=True))
    stored = onnx.load_model_from_string(graph.model)
    assert any((entry.key, entry.value) == ("edgeasync.chunks", "3") for entry in stored.metadata_props)
    assert any("::Softmax" in name for node in stored.graph.node for name in node.output)  # computed again
    tables = [entry.name for entry in stored.graph.initializer if np.prod(entry.dims) == CLASSES * WIDTH]
    assert len(tables) == (0 if train == ("*",) else 2 - tied)
    found = run(graph, {"x": tokens.numpy(), "target": targets.numpy()})
    model.double()
    loss = nn.functional.cross_entropy(model(tokens), targets)
    loss.backward()
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-6)
    wanted = {name: value.grad.numpy() for name, value in model.named_parameters()}
    names = [parameter.name for parameter in graph.spec.parameters]
    assert set(names) == ({*wanted} if train == ("*",) else {name for name in wanted if "norms" in name})
    for name in names:
        error = np.abs(found[f"{name}.grad"] - wanted[name]).max()
        assert error <= 1e-4 * np.abs(wanted[name]).max(), name
