"""A module that the loop changes after `join`: the session follows, or says what it cannot exchange."""

import copy
import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import edgeasync.torch
from edgeasync import SGD, Hub, Policy, join
from edgeasync.errors import ConfigError, EdgeAsyncError, ModelMismatchError
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.sdk.torch_modules import tensors_of
from edgeasync.sdk.torch_participant import TorchParticipant
from edgeasync.sdk.torch_steps import STEPS_UNSEEN_MAX
from tests.support.programs.processes import PATIENCE_S

nn = torch.nn

PLAIN = Policy(aggregate=ImmediateAggregator(), optimizer=(SGD(),))


def make(out=2):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, out))
    module[0].requires_grad_(False)
    return module


def values_of(participant):
    arrays = {each.name: np.empty(each.shape, np.float32) for each in participant.parameters}
    participant.read(arrays)
    return arrays


# -- what the session follows ----------------------------------------------------------------------------------


def assign(module):
    module.load_state_dict({name: tensor + 1 for name, tensor in module.state_dict().items()}, assign=True)


def replace_parameter(module):
    module[2].weight = nn.Parameter(module[2].weight.detach() + 1)


def replace_head(module):
    module[2] = nn.Linear(8, 2)


def replace_buffer(module):
    module[3].running_mean = torch.full((2,), 5.0)


def freeze(module):
    module[2].bias.requires_grad_(False)


def to_half_and_back(module):
    module.half()


@pytest.mark.parametrize(
    "change", [assign, replace_parameter, replace_head, replace_buffer, freeze, to_half_and_back]
)
def test_what_keeps_names_and_shapes_is_followed(change):
    module = make().append(nn.BatchNorm1d(2))
    held = TorchParticipant(module)
    change(module)
    for name, array in values_of(held).items():
        np.testing.assert_array_equal(array, module.state_dict()[name].float().numpy())
    held.write({each.name: np.full(each.shape, 0.5, np.float32) for each in held.parameters})
    assert all((module.state_dict()[each.name] == 0.5).all() for each in held.parameters)


def test_a_layer_that_joined_may_get_its_optimizer_later(tmp_path):
    module, plain = (make().requires_grad_() for _ in range(2))
    optimizer = torch.optim.SGD(module[2].parameters(), lr=0.1)
    hub = Hub(edgeasync.torch.model(plain), run=tmp_path, bind="tcp://127.0.0.1:*")
    with hub, join(hub.address, module, optimizer, timeout_s=PATIENCE_S) as session:
        for exchanges in (2, 4):
            while session.exchanges < exchanges:
                optimizer.zero_grad()
                module(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            moved = (hub.snapshot()["0.bias"] != plain[0].bias.detach().numpy()).any()
            assert moved == (exchanges == 4)
            if not moved:
                optimizer.add_param_group({"params": module[0].parameters()})


# -- what it cannot exchange ----------------------------------------------------------------------------------


def unfreeze(module):
    module[0].requires_grad_(True)


def add_layer(module):
    module.append(nn.Linear(2, 2))


def add_parameter(module):
    module[2].register_parameter("scale", nn.Parameter(torch.ones(1)))


def remove_parameter(module):
    module[2].bias = None


def remove_layer(module):
    del module[2]


def resize(module):
    module[2] = nn.Linear(8, 3)


def add_adapter(module):
    """As PEFT does: the layer moves into one that has a low-rank part beside it."""

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(8, 1, bias=False), nn.Linear(1, 2, bias=False)

    module[2] = Adapted(module[2])


def resize_data(module):
    module[2].weight.data = torch.zeros(3, 8)


def share(module):
    """Apply weight normalisation, which computes the weight from two other parameters."""
    nn.utils.parametrizations.weight_norm(module[2])


CHANGES = [
    (unfreeze, "newly trained: '0.bias', '0.weight'"),
    (add_layer, "newly trained: '3.bias', '3.weight'"),
    (add_parameter, "newly trained: '2.scale'"),
    (remove_parameter, "missing: '2.bias'"),
    (remove_layer, "missing: '2.weight', '2.bias'"),
    (resize, "resized: '2.weight' from (2, 8) to (3, 8)"),
    (add_adapter, "newly trained: '2.down.weight', '2.up.weight'"),
    (resize_data, "resized: '2.weight' from (2, 8) to (3, 8)"),
    (share, "missing: '2.weight'"),
]


watched_or_given = pytest.mark.parametrize("watched", [True, False], ids=["watched", "given"])


def train(folder, optimizer, module, change, *, watched):
    """Join, take a step, change the module, and train on."""
    hub = Hub(edgeasync.torch.model(make()), run=folder, bind="tcp://127.0.0.1:*")
    with hub, join(hub.address, module, None if watched else optimizer, timeout_s=PATIENCE_S) as session:
        optimizer.step()
        change(module)
        for _ in range(2):
            optimizer.step()
        session.step()  # where the optimizer has nothing left to step


@watched_or_given
@pytest.mark.parametrize(("change", "told"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_what_the_hub_has_no_arrays_for_ends_the_session_with_one_sentence(change, told, watched, tmp_path):
    module = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ModelMismatchError) as raised:
        train(tmp_path, optimizer, module, change, watched=watched)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_error_repeats_until_the_module_fits_again():
    held = TorchParticipant(module := make())
    unfreeze(module)
    for _ in range(2):
        with pytest.raises(ModelMismatchError):
            values_of(held)
    module[0].requires_grad_(False)
    assert values_of(held).keys() == {"2.weight", "2.bias"}


# -- optimizers that step something else ------------------------------------------------------------------------


@watched_or_given
def test_an_optimizer_of_replaced_tensors_is_told(watched, tmp_path):
    module = make()
    optimizer = torch.optim.SGD(module[2].parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="SGD no longer updates any parameter of this session"):
        train(tmp_path, optimizer, module, assign, watched=watched)


def test_an_optimizer_of_another_module_is_told_in_the_log(tmp_path, caplog):
    module = make()
    optimizer = torch.optim.SGD(copy.deepcopy(module).parameters(), lr=0.1)
    hub = Hub(edgeasync.torch.model(make()), run=tmp_path, bind="tcp://127.0.0.1:*")
    with hub, caplog.at_level(logging.WARNING), join(hub.address, module, timeout_s=PATIENCE_S) as session:
        for _ in range(2 * STEPS_UNSEEN_MAX):
            optimizer.step()
        assert session.steps == 0
    assert sum("steps stepped the module that joined" in record.message for record in caplog.records) == 1


def test_another_optimizer_than_the_one_that_was_given_is_told_in_the_log(tmp_path, caplog):
    module = make()
    given = torch.optim.SGD(module[2].parameters(), lr=0.1)
    hub = Hub(edgeasync.torch.model(make()), run=tmp_path, bind="tcp://127.0.0.1:*")
    with hub, caplog.at_level(logging.WARNING), join(hub.address, module, given, timeout_s=PATIENCE_S) as session:
        replace_head(module)
        optimizer = torch.optim.SGD(module[2].parameters(), lr=0.1)
        for _ in range(2 * STEPS_UNSEEN_MAX):
            optimizer.step()
        assert session.steps == 0
    assert sum("join again with the optimizer that trains" in record.message for record in caplog.records) == 1
    assert session.steps == 1, "the last steps are sent together"


def test_an_optimizer_that_trains_a_copy_of_the_module_is_told_in_the_log(tmp_path, caplog):
    module = make()
    optimizer = torch.optim.SGD(copy.deepcopy(module).parameters(), lr=0.1)
    hub = Hub(edgeasync.torch.model(make()), run=tmp_path, bind="tcp://127.0.0.1:*")
    with hub, join(hub.address, module, optimizer, timeout_s=PATIENCE_S) as session:
        while session.exchanges < 3:
            optimizer.step()
    assert "the steps of the optimizer passed to join do not change the module" in caplog.text


def test_the_last_steps_of_another_optimizer_than_the_one_that_was_given_are_sent(tmp_path):
    module = make()
    given, other = (torch.optim.SGD(module[2].parameters(), lr=0.1) for _ in range(2))
    hub = Hub(edgeasync.torch.model(make()), run=tmp_path, bind="tcp://127.0.0.1:*", policy=PLAIN)
    with hub:
        with join(hub.address, module, given, timeout_s=PATIENCE_S):
            for optimizer in (given, other, other):
                optimizer.zero_grad()
                module(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        np.testing.assert_allclose(hub.snapshot()["2.bias"], module[2].bias.detach().numpy(), rtol=1e-3)


def test_a_replaced_layer_that_no_optimizer_steps_is_told_in_the_log(tmp_path, caplog):
    module = make().requires_grad_()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    hub = Hub(edgeasync.torch.model(make().requires_grad_()), run=tmp_path, bind="tcp://127.0.0.1:*")
    with hub, join(hub.address, module, optimizer, timeout_s=PATIENCE_S):
        replace_head(module)
        for _ in range(2 * STEPS_UNSEEN_MAX):
            optimizer.step()
    assert caplog.text.count("no optimizer steps '2.bias', '2.weight', which was replaced") == 1


@pytest.mark.parametrize("join_or_serve", [TorchParticipant, edgeasync.torch.model])
def test_a_buffer_that_is_not_finite_is_named(join_or_serve):
    module = make()
    module.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    with pytest.raises(ConfigError, match=r"'mask' contains values that are not finite.*persistent=False"):
        join_or_serve(module)


def test_a_buffer_that_the_module_computes_stays_here():
    module = make()
    module.register_buffer("cache", torch.tensor([0.0, -torch.inf]), persistent=False)
    assert [each.name for each in TorchParticipant(module).parameters] == ["2.weight", "2.bias"]


def test_an_optimizer_that_was_given_may_train_the_module_by_copies(tmp_path):
    module = make()
    copies = [tensor.detach().clone().requires_grad_() for tensor in module[2].parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    hub = Hub(edgeasync.torch.model(make()), run=tmp_path, bind="tcp://127.0.0.1:*")
    with hub, join(hub.address, module, optimizer, timeout_s=PATIENCE_S) as session:
        for _ in range(3):
            optimizer.step()
        assert session.steps == 3


def test_a_new_head_with_a_new_optimizer_loses_no_step(tmp_path):
    module = make()
    hub = Hub(edgeasync.torch.model(make()), run=tmp_path, bind="tcp://127.0.0.1:*")
    with hub, join(hub.address, module, timeout_s=PATIENCE_S) as session:
        for _ in range(2):
            replace_head(module)
            optimizer = torch.optim.SGD(module[2].parameters(), lr=0.1)
            for _ in range(3):
                optimizer.step()
        assert session.steps == 6


# -- other sessions, and sessions that exchange nothing -----------------------------------------------------------


def test_the_change_of_one_module_is_no_error_of_anothers_optimizer(tmp_path):
    changed, other = make(), make()
    theirs = torch.optim.SGD(other[2].parameters(), lr=0.1)
    hub = Hub(edgeasync.torch.model(make()), run=tmp_path, bind="tcp://127.0.0.1:*")
    with (
        hub,
        join(hub.address, changed, timeout_s=PATIENCE_S),
        join(hub.address, other, timeout_s=PATIENCE_S) as session,
    ):
        unfreeze(changed)
        for _ in range(3):
            theirs.step()
        assert session.steps == 3
        changed[0].requires_grad_(False)


def test_a_session_that_is_aborted_allows_any_change(tmp_path):
    module = make()
    hub = Hub(edgeasync.torch.model(make()), run=tmp_path, bind="tcp://127.0.0.1:*")
    with hub, join(hub.address, module, timeout_s=PATIENCE_S) as session:
        session.abort()
        unfreeze(module)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        module[0].requires_grad_(False)
        session.resume()


def test_the_last_value_of_a_buffer_that_changes_its_shape_is_exchanged(caplog):
    module = make()
    module.register_buffer("cache", torch.ones(3))
    held = TorchParticipant(module)
    for rows in (4, 5):
        module.cache = torch.zeros(rows)
        assert values_of(held)["cache"].tolist() == [1.0, 1.0, 1.0]
    assert caplog.text.count("buffer 'cache' was resized or removed") == 1


# -- wrappers -------------------------------------------------------------------------------------------------


def compiled(module):
    return torch.compile(module, backend="eager")


def compiled_inside(module):
    module[2] = torch.compile(module[2], backend="eager")
    return module


WRAPPERS = [compiled, compiled_inside, nn.DataParallel, lambda module: compiled(nn.DataParallel(module))]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["compiled", "compiled inside", "parallel", "both"])
def test_a_wrapped_module_has_the_names_of_the_plain_one(wrap, tmp_path):
    wrapped = wrap(make())
    assert list(tensors_of(wrapped)) == list(tensors_of(make()))
    assert edgeasync.torch.model(wrapped).spec == edgeasync.torch.model(make()).spec
    hub = Hub(edgeasync.torch.model(make()), run=tmp_path, bind="tcp://127.0.0.1:*")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with hub, join(hub.address, wrapped, optimizer, timeout_s=PATIENCE_S) as session:
        while session.exchanges < 3:
            optimizer.zero_grad()
            wrapped(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert (hub.snapshot()["2.bias"] < make()[2].bias.detach().numpy()).all()


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize(("ours", "hubs", "whose"), [(Wrapper, None, "your"), (None, Wrapper, "the hub's")])
def test_another_wrapper_is_named(ours, hubs, whose, tmp_path):
    module, model = (make() if wrap is None else wrap(make()) for wrap in (ours, hubs))
    hub = Hub(edgeasync.torch.model(model), run=tmp_path, bind="tcp://127.0.0.1:*")
    with hub, pytest.raises(EdgeAsyncError, match=rf"{whose} model is wrapped: its arrays begin with 'module\.'"):
        join(hub.address, module, timeout_s=PATIENCE_S)


def test_a_lazy_module_is_asked_for_a_batch():
    with pytest.raises(ConfigError, match=r"'0\.weight' has no shape yet; call the module on one batch first"):
        TorchParticipant(nn.Sequential(nn.LazyLinear(3)))


def test_a_complex_parameter_is_refused():
    module = nn.Module()
    module.scale = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="'scale' is complex"):
        TorchParticipant(module)
