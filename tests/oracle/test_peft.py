"""LoRA adapters against PEFT: it loads the exported ones, and has the same outputs and gradients."""

import msgspec
import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

import edgeasync.torch
from edgeasync import Hub, join
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import ConfigError, GraphError
from edgeasync.graphs.peft import write_peft
from edgeasync.lora import LoRA
from tests.support.models.gradients import forward, numbers, run, session
from tests.support.models.language_models import language_model
from tests.support.programs.processes import PATIENCE_S

nn = torch.nn

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's exporters and PEFT warn of themselves


class Mixed(nn.Module):
    """A module with each kind of layer, and with names that contain one another."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(6, 8, 3, stride=2, padding=1)
        self.point = nn.Conv1d(8, 8, 1, bias=False)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"q_proj": nn.Linear(8, 8), "o_proj": nn.Linear(8, 8, bias=False)}) for _ in range(2)]
        )
        self.score = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.point(torch.tanh(self.conv(x))).transpose(1, 2))
        for block in self.blocks:
            x = x + block["o_proj"](torch.tanh(block["q_proj"](x)))
        return self.score(x.mean(1))


def mixed():
    torch.manual_seed(3)
    module = Mixed()
    x = numbers((4, 6, 10), 1)
    return module, edgeasync.torch.to_onnx(module, torch.from_numpy(x)).SerializeToString(), x, np.arange(4) % 3


def llama():
    """The language model of the example, and Hugging Face's with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - seconds

    proto = language_model(hidden=32, intermediate=48, vocabulary=40, tokens=7)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-5, attn_implementation="eager",
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    weights = {
        entry.name: torch.from_numpy(onnx.numpy_helper.to_array(entry).copy()) for entry in proto.graph.initializer
    }
    told = module.load_state_dict(weights, strict=False)
    assert told.missing_keys == ["lm_head.weight"]
    assert not told.unexpected_keys
    words = np.random.default_rng(0).integers(0, 40, (3, 8))
    return module, proto.SerializeToString(), words[:, :-1], words[:, 1:]


def scores_of(model, x):
    found = model(torch.from_numpy(x))
    return getattr(found, "logits", found).transpose(1, -1)  # the axis of classes comes second


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (mixed, {"lora": LoRA(rank=2, alpha=5.0)}),
        (mixed, {"lora": LoRA(rank=3, targets="*.q_proj,conv"), "train": ("score.*", "norm.weight")}),
        (llama, {"lora": LoRA(rank=4, targets="*.[qv]_proj,*.down_proj")}),
        (llama, {"lora": LoRA(rank=4, targets="*.[qv]_proj,*.down_proj"), "recompute": True}),
    ],
    ids=["all layers", "a head besides", "llama", "llama, recomputed"],
)
def test_peft_loads_adapters_and_agrees(make, settings, tmp_path):
    module, content, x, target = make()
    built = build_training_graph(content, GraphSettings(**settings))
    shapes = {parameter.name: parameter.shape for parameter in built.spec.parameters}
    arrays = {name: 0.3 * numbers(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    write_peft(tmp_path / "tuned", built.forward, arrays)
    tuned = peft.PeftModel.from_pretrained(module, tmp_path / "tuned", is_trainable=True).eval()
    scores = scores_of(tuned, x)

    opened = session(export_model(built.forward, arrays))
    (exported,) = opened.run(None, {opened.get_inputs()[0].name: x})
    np.testing.assert_allclose(exported, scores.detach(), rtol=1e-5, atol=1e-5)

    filled = msgspec.structs.replace(built, initial=built.spec.flatten(arrays))
    feeds = {opened.get_inputs()[0].name: x, "target": target.astype(np.int64)}
    results = run(filled, feeds)
    loss = nn.functional.cross_entropy(scores, torch.from_numpy(feeds["target"]))
    loss.backward()
    np.testing.assert_allclose(results["loss"], loss.item(), rtol=1e-5)
    slopes = {
        name.removeprefix("base_model.model.").replace(".default", "").replace(".modules_to_save", ""): slope
        for name, tensor in tuned.named_parameters()
        if tensor.requires_grad and (slope := tensor.grad) is not None
    }
    for name in shapes:
        exact = slopes[name].numpy()
        assert np.abs(results[f"{name}.grad"] - exact).max() <= 1e-4 * np.abs(exact).max(), name


class Normed(nn.Module):
    """A module with a batch norm, after a convolution or a linear layer."""

    def __init__(self, convolves):
        super().__init__()
        self.body = nn.Conv1d(6, 8, 3) if convolves else nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.score = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.norm(self.body(x)))
        return self.score(x if x.ndim == 2 else x.mean(2))


@pytest.mark.parametrize("train", ["norm.*", "norm.weight"])
@pytest.mark.parametrize("convolves", [False, True])
def test_peft_loads_a_batch_norm_that_was_trained_besides(convolves, train, tmp_path):
    """Its statistics move with it, and PEFT needs its counter, which the run does not have."""
    torch.manual_seed(3)
    module, x = Normed(convolves), numbers((4, 6, 10) if convolves else (4, 6), 1)
    content = edgeasync.torch.to_onnx(module, torch.from_numpy(x)).SerializeToString()
    built = build_training_graph(content, GraphSettings(lora="2:body", train=(train,)))
    arrays = {
        parameter.name: np.abs(0.3 * numbers(parameter.shape, seed)) + np.float32(0.1)
        for seed, parameter in enumerate(built.spec.parameters)
    }
    assert {"norm.running_mean", "norm.running_var"} <= arrays.keys()
    write_peft(tmp_path / "tuned", built.forward, arrays)
    tuned = peft.PeftModel.from_pretrained(module, tmp_path / "tuned").eval()
    state = tuned.state_dict()
    for name in ("weight", "running_mean", "running_var"):
        found = state[f"base_model.model.norm.modules_to_save.default.{name}"]
        np.testing.assert_array_equal(found, arrays[f"norm.{name}"])
    counter = state["base_model.model.norm.modules_to_save.default.num_batches_tracked"]
    assert (counter.dtype, counter.item()) == (torch.int64, 0)
    (exported,) = session(export_model(built.forward, arrays)).run(None, {"x": x})
    np.testing.assert_allclose(exported, tuned(torch.from_numpy(x)).detach(), rtol=1e-5, atol=1e-5)
    tuned.save_pretrained(tmp_path / "again")
    again = peft.PeftModel.from_pretrained(Normed(convolves), tmp_path / "again").eval()
    assert again.state_dict().keys() == state.keys()


def test_names_that_torch_has_not_are_refused_with_the_list(tmp_path):
    weights = {"first": numbers((4, 4)), "fc_weight": numbers((4, 4), 1)}
    content = forward("h = MatMul(x, first)\ny = MatMul(h, fc_weight)", weights, (4,))
    built = build_training_graph(content, GraphSettings(loss="mse", lora=2))
    arrays = built.spec.views(built.initial)
    with pytest.raises(GraphError, match=r"names in torch, but these are others: fc_weight, first; .*safetensors"):
        write_peft(tmp_path / "tuned", built.forward, arrays)
    assert not (tmp_path / "tuned").exists()
    with pytest.raises(ConfigError, match="has no LoRA adapters"):
        write_peft(tmp_path / "tuned", content, {})
    _, content, _, _ = mixed()
    built = build_training_graph(content, GraphSettings(lora="2:score", train=("score.bias",)))
    with pytest.raises(
        GraphError, match="PEFT cannot load adapters together with other arrays of the same module: score"
    ):
        write_peft(tmp_path / "tuned", built.forward, built.spec.views(built.initial))


def nested(width=8):
    """A module in which the names of layers end as the names of other modules do."""
    torch.manual_seed(3)
    module = nn.Sequential(
        nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width)), nn.Tanh(), nn.Linear(width, 3)
    )
    return module, edgeasync.torch.to_onnx(module, torch.zeros(2, 6)).SerializeToString(), numbers((4, 6), 1)


def test_peft_adapts_no_module_whose_name_ends_as_that_of_a_layer(tmp_path):
    """PEFT compares the ends of names, and would adapt the layer `0.2` as well, or fail at a Tanh."""
    module, content, x = nested()
    built = build_training_graph(content, GraphSettings(lora="2:2"))
    arrays = {parameter.name: numbers(parameter.shape) for parameter in built.spec.parameters}
    write_peft(tmp_path / "tuned", built.forward, arrays)
    tuned = peft.PeftModel.from_pretrained(module, tmp_path / "tuned").eval()
    assert tuned.targeted_module_names == ["2"]
    (exported,) = session(export_model(built.forward, arrays)).run(None, {"x": x})
    np.testing.assert_allclose(exported, tuned(torch.from_numpy(x)).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora": "2:0.*", "train": ("2.weight",)}, r"PEFT confuses the module 2, .* besides, with 0\.2, because"),
        ({"lora": "2:0.0", "train": ("2.weight",)}, r"PEFT confuses the module 2, .* besides, with 0\.2, because"),
        ({"lora": "2:2", "train": ("0.2.bias",), "base": "int8"}, r"saves the module 0\.2 as a whole, .* --model"),
    ],
    ids=["a layer", "a module", "quantized"],
)
def test_a_module_that_peft_could_not_load_is_refused(settings, told, tmp_path):
    """PEFT fails when it loads them, because it misses weights of the module."""
    _, content, _ = nested(64)
    built = build_training_graph(content, GraphSettings(**settings))
    with pytest.raises(GraphError, match=told):
        write_peft(tmp_path / "tuned", built.forward, built.spec.views(built.initial))


def test_the_initial_values_are_those_of_peft():
    """Both draw from the same range, and start from the model itself."""
    module, content, _, _ = mixed()
    built = build_training_graph(content, GraphSettings(lora=LoRA(rank=64)))
    tuned = peft.get_peft_model(module, peft.LoraConfig(r=64, target_modules=["score", "conv"]))
    own = built.spec.views(built.initial)
    for layer in ("score", "conv"):
        theirs = tuned.get_parameter(f"base_model.model.{layer}.lora_A.default.weight").detach().numpy()
        ours = own[f"{layer}.lora_A.weight"]
        assert ours.shape == theirs.shape
        np.testing.assert_allclose([ours.min(), ours.max()], [theirs.min(), theirs.max()], rtol=0.05)
        np.testing.assert_allclose(ours.std(), theirs.std(), rtol=0.1)
        assert not own[f"{layer}.lora_B.weight"].any()


def test_a_module_with_peft_joins(tmp_path):
    """Only its adapters and what it saves besides are exchanged."""

    def make():
        module, _, x, target = mixed()
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["score"])
        return peft.get_peft_model(module, config), torch.from_numpy(x), torch.from_numpy(target)

    module, x, target = make()
    trained = {name for name, entry in module.named_parameters() if entry.requires_grad}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with (
        Hub(edgeasync.torch.model(make()[0]), run=tmp_path, bind="tcp://127.0.0.1:*") as hub,
        join(hub.address, module, optimizer, timeout_s=PATIENCE_S) as session,
    ):
        for _ in range(8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), target).backward()
            optimizer.step()
        assert {*hub.snapshot()} == trained
    assert session.exchanges
    assert len(trained) == 2 * 2 + 2
