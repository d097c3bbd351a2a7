"""Frozen arrays of torch and JAX: what is in their checksum, and what becomes of a device whose differ."""

import copy
import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import edgeasync.jax
import edgeasync.torch
from edgeasync import Agent, Hub, Stop, join, train
from edgeasync.errors import ModelMismatchError
from edgeasync.sdk.torch_modules import frozen_of
from edgeasync.training.frozen import PIECE
from tests.support.programs.processes import PATIENCE_S, until

nn = torch.nn


class Lora(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(4, 4, bias=False).requires_grad_(False)
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("weight_q", torch.arange(-8, 8, dtype=torch.int8).reshape(4, 4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("rotation", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("positions", torch.arange(4), persistent=False)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        return self.norm(self.base(x) + self.b(self.a(x)))


class Holder(nn.Module):
    """A module with a frozen parameter of a given type."""

    def __init__(self, tensor):
        super().__init__()
        self.frozen = nn.Parameter(tensor, requires_grad=False)
        self.trained = nn.Linear(2, 1)


def set_to(name, values):
    def change(module):
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, values)

    return change


def move_counters(module):
    module.norm.num_batches_tracked += 7
    module.steps += 3


def train_the_rest(module):
    with torch.no_grad():
        for tensor in (module.a.weight, module.norm.bias, module.norm.running_mean):
            tensor.add_(1.0)


def to_channels(module):
    module.base.weight = nn.Parameter(module.base.weight.detach().t().contiguous().t(), requires_grad=False)


def in_place(name, change):
    def changed(module):
        with torch.no_grad():
            change(module.get_parameter(name) if name == "base.weight" else module.get_buffer(name))

    return changed


@pytest.mark.parametrize(
    "change",
    [
        train_the_rest,
        move_counters,
        to_channels,
        lambda module: module.double(),
        set_to("positions", torch.arange(1, 5)),
        lambda module: module.eval(),
    ],
    ids=["trained", "counters", "strides", "float64", "not persistent", "eval"],
)
def test_what_does_not_change_the_checksum(change):
    module = Lora()
    before = frozen_of(module)
    change(module)
    assert frozen_of(module) == before


@pytest.mark.parametrize(
    "change",
    [
        in_place("base.weight", lambda tensor: tensor[0, 0].add_(1e-6)),
        lambda module: module.base.bfloat16(),
        lambda module: module.a.requires_grad_(False),
        set_to("base", nn.Linear(5, 4, bias=False).requires_grad_(False)),
        in_place("weight_q", lambda tensor: tensor[0, 0].add_(1)),
        in_place("mask", lambda tensor: tensor[0].logical_not_()),
        in_place("rotation", lambda tensor: tensor[0].mul_(1j)),
    ],
    ids=["value", "rounded", "frozen too", "shape", "int8", "bool", "complex"],
)
def test_what_changes_it(change):
    module = Lora()
    before = frozen_of(module)
    change(module)
    assert frozen_of(module) != before


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool], ids=str
)
def test_every_type_has_one(dtype):
    values = torch.tensor([1.0, 0.0, 2.0])
    found = frozen_of(Holder(values.to(dtype)))
    assert found.framework == "torch"
    assert (found == frozen_of(Holder(values))) == dtype.is_floating_point, "these hold the values exactly"
    assert found != frozen_of(Holder(torch.zeros(3).to(dtype)))


def test_wrappers_and_ties_do_not_change_it():
    module = Lora()
    plain = frozen_of(module)
    assert frozen_of(torch.compile(module, backend="eager")) == plain
    assert frozen_of(nn.DataParallel(module)) == plain
    module.base = torch.compile(module.base, backend="eager")
    assert frozen_of(module) == plain
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight.requires_grad_(False)
    again = copy.deepcopy(tied)
    assert frozen_of(tied) == frozen_of(again)


def test_a_large_parameter_is_read_in_pieces():
    large = torch.arange(2 * PIECE + 5, dtype=torch.float32)
    changed = large.clone()
    changed[-1] = 0.0
    assert frozen_of(Holder(large)) != frozen_of(Holder(changed))


def test_no_checksum_of_nothing_and_of_what_cannot_be_read(caplog):
    assert frozen_of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) is None
    with caplog.at_level(logging.WARNING):
        assert frozen_of(Holder(torch.empty(3, device="meta"))) is None
    assert "cannot compare the frozen parameters" in caplog.text


def test_trees_of_jax():
    base = {"w": jax.numpy.ones(3, "bfloat16"), "table": jax.numpy.arange(3)}
    other = base | {"table": jax.numpy.arange(3) + 1}
    tree = {"a": jax.numpy.zeros(2)}
    held = edgeasync.jax.params(tree, frozen=base)
    assert held.frozen.framework == "jax"
    assert held.frozen == edgeasync.jax.params(tree, frozen=dict(reversed(base.items()))).frozen
    assert held.frozen == edgeasync.jax.model(tree, lambda params, x, y: 0.0, frozen=base).frozen
    assert held.frozen != edgeasync.jax.params(tree, frozen=other).frozen
    assert edgeasync.jax.params(tree).frozen is None


# -- devices ---------------------------------------------------------------------------------------------------


X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)


def start_hub(folder, model, **settings):
    return Hub(model, run=folder / "run", bind="tcp://127.0.0.1:*", **settings)


def take_steps(address, module, name, count=8):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with join(address, module, optimizer, name=name, timeout_s=PATIENCE_S) as session:
        for _ in range(count):
            optimizer.zero_grad()
            module(torch.from_numpy(X)).square().mean().backward()
            optimizer.step()
    return session


def test_what_happens_after_it_has_joined_does_not_matter(tmp_path):
    module = Lora()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with (
        start_hub(tmp_path, edgeasync.torch.model(Lora())) as hub,
        join(hub.address, module, optimizer, name="a", timeout_s=PATIENCE_S) as session,
    ):
        with torch.no_grad():
            module.base.weight += 1.0
        module.a.requires_grad_(False)
        session.abort()
        until(lambda: not session.connected, "it has left")
        session.resume()
        until(lambda: session.connected, "it is back")


def test_a_loop_with_another_base_is_refused(tmp_path):
    with start_hub(tmp_path, edgeasync.torch.model(Lora())) as hub:
        assert take_steps(hub.address, Lora(), "right").exchanges
        with pytest.raises(
            ModelMismatchError, match=r"arrays of other, which are not transmitted, differ from the hub's"
        ):
            take_steps(hub.address, Lora(1), "other")
        model = edgeasync.torch.model(Lora(1))
        for kind in ({"data": (X, X), "model": model}, {"trainer": model.trainer((X, X))}):
            agent = Agent(hub.address, name="agent", **kind).start()
            with pytest.raises(ModelMismatchError, match=r"frozen = 'warn'"):
                agent.wait()
        assert [device["id"] for device in hub.status()["devices"]] == ["right"]


def test_a_module_that_trains_other_parameters_is_told_which(tmp_path):
    """The hub leaves that to the device, although its frozen arrays differ, too."""
    module = Lora()
    module.a.requires_grad_(False)
    with (
        start_hub(tmp_path, edgeasync.torch.model(Lora())) as hub,
        pytest.raises(ModelMismatchError, match=r"'a\.weight'"),
    ):
        take_steps(hub.address, module, "other")


def test_a_hub_may_warn_instead(tmp_path, caplog):
    with start_hub(tmp_path, edgeasync.torch.model(Lora()), frozen="warn") as hub:
        assert take_steps(hub.address, Lora(1), "other").exchanges
    assert "other the frozen arrays of other, which are not transmitted, differ from the hub's" in caplog.text


def test_a_hub_does_not_resume_with_another_base(tmp_path):
    with start_hub(tmp_path, edgeasync.torch.model(Lora())) as hub:
        take_steps(hub.address, Lora(), "right")
    with pytest.raises(ModelMismatchError, match="differ from those that this run was trained with"):
        start_hub(tmp_path, edgeasync.torch.model(Lora(1))).start()
    with start_hub(tmp_path, edgeasync.torch.model(Lora(1)), frozen="warn") as hub:
        assert hub.status()["version"]


def test_workers_of_one_call_have_the_same(tmp_path):
    model = edgeasync.torch.model(Lora())
    assert train(model, (X, X), workers=2, until=Stop(updates=4), run=tmp_path / "run").version
