"""Loops in which another backward pass is to come when an optimizer steps: exchanges wait for it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import edgeasync.torch
from edgeasync import Hub, join
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.policy import Policy
from edgeasync.sdk.torch_participant import TorchParticipant
from edgeasync.sdk.torch_pending import STEPS_PENDING_MAX
from tests.support.programs.processes import PATIENCE_S

nn, functional = torch.nn, torch.nn.functional

EACH_STEP = Policy(frequency=FixedFrequency(local_steps=1))


def convolutional():
    """A generator of 8x8 pictures, and a discriminator."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "generator": nn.Sequential(
                nn.ConvTranspose2d(4, 8, 4),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.ConvTranspose2d(8, 1, 4, 2, 1),
                nn.Tanh(),
            ),
            "discriminator": nn.Sequential(
                nn.Conv2d(1, 8, 4, 2, 1, bias=False),
                nn.LeakyReLU(0.2),
                nn.Conv2d(8, 1, 4, bias=False),
                nn.Flatten(),
            ),
        }
    )


def optimizers_of(module):
    return [torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999)) for part in module.values()]


PICTURES = torch.sin(torch.arange(16 * 64, dtype=torch.float32)).reshape(16, 1, 8, 8)


def noise():
    return torch.randn(16, 4, 1, 1)


def real_or_fake(module, pictures, label):
    scores = module["discriminator"](pictures)
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


def gan(module, optimizers=None):
    """The discriminator learns from pictures that the generator made, then the generator from the same."""
    generator, discriminator = optimizers or optimizers_of(module)
    while True:
        fake = module["generator"](noise())
        discriminator.zero_grad()
        real_or_fake(module, PICTURES, 1.0).backward()
        real_or_fake(module, fake.detach(), 0.0).backward()
        yield discriminator
        generator.zero_grad()
        loss = real_or_fake(module, fake, 1.0)
        loss.backward()
        yield generator


def gan_with_a_penalty(module):
    """Wasserstein, three steps of the discriminator for one; parts of its graphs are kept."""
    generator, discriminator = optimizers_of(module)
    while True:
        for _ in range(3):
            fake = module["generator"](noise())
            mixed = (0.5 * PICTURES + 0.5 * fake).detach().requires_grad_()
            scores = module["discriminator"](mixed)
            (slope,) = torch.autograd.grad(scores.sum(), mixed, create_graph=True)
            penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
            loss = (
                module["discriminator"](fake.detach()).mean() - module["discriminator"](PICTURES).mean() + penalty
            )
            discriminator.zero_grad()
            loss.backward()
            yield discriminator
        generator.zero_grad()
        (-module["discriminator"](fake).mean()).backward()
        yield generator


def actor_and_critic():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"actor": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), "critic": nn.Linear(4, 1)}
    )


def learns_from_rewards(module):
    """The actor steps first, though the critic's values are part of a graph already."""
    actor, critic = optimizers_of(module)
    while True:
        states = torch.randn(8, 4)
        choice = torch.distributions.Categorical(logits=module["actor"](states))
        actions = choice.sample()
        rewards = (actions == (states[:, 0] > 0)).float()
        advantage = rewards - module["critic"](module["critic"].weight * states).squeeze(1)
        actor.zero_grad()
        (-choice.log_prob(actions) * advantage.detach()).mean().backward()
        yield actor
        critic.zero_grad()
        advantage.square().mean().backward()
        yield critic


def usual(module):
    """One optimizer, whose loss and outputs are kept until the next step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    kept = []
    while True:
        fake = module["generator"](noise())
        kept = [fake, module["discriminator"](fake)]
        optimizer.zero_grad()
        loss = kept[1].square().mean()
        loss.backward(retain_graph=True)
        yield optimizer


def unused_outputs(module):
    """One optimizer; outputs that no loss uses are kept until the next step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    while True:
        fake = module["generator"](noise())
        unused = module["discriminator"](fake)
        optimizer.zero_grad()
        fake.square().mean().backward(inputs=list(module["generator"].parameters()))
        yield optimizer
        del unused


def retained(module):
    """The actor steps first; the critic's graph is kept after its backward."""
    actor, critic = optimizers_of(module)
    kept = module["critic"](torch.randn(8, 4)).sum()  # looked at before the first step
    while True:
        states = torch.randn(8, 4)
        kept = module["critic"](module["critic"].weight * states).square().mean()
        actor.zero_grad()
        module["actor"](states).square().mean().backward()
        yield actor
        critic.zero_grad()
        kept.backward(retain_graph=True)
        yield critic


def only_buffers():
    """A generator whose graph needs no parameter, only a batch norm's statistics."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, affine=False))
    return nn.ModuleDict({"generator": generator, "discriminator": nn.Linear(2, 1)})


def two_networks(module):
    generator, discriminator = optimizers_of(module)
    while True:
        fake = module["generator"](torch.randn(16, 4))
        discriminator.zero_grad()
        real_or_fake(module, fake.detach(), 0.0).backward()
        yield discriminator
        generator.zero_grad()
        real_or_fake(module, fake, 1.0).backward()
        yield generator


def left_out(module):
    """Parameters that no optimizer steps yet, of which views are kept."""
    optimizer = torch.optim.SGD(module["discriminator"].parameters(), lr=1e-3)
    kept = [module.state_dict(), {name: one.detach().numpy() for name, one in module.named_parameters()}]
    while kept:
        optimizer.zero_grad()
        loss = real_or_fake(module, module["generator"](noise()), 1.0)
        loss.backward()
        yield optimizer


LOOPS = {
    "gan": (convolutional, gan, [True, False]),
    "actor and critic": (actor_and_critic, learns_from_rewards, [True, False]),
    "retained": (actor_and_critic, retained, [True, False]),
    "only buffers": (only_buffers, two_networks, [True, False]),
    "usual": (convolutional, usual, [False]),
    "unused outputs": (convolutional, unused_outputs, [False]),
    "left out of the optimizer": (convolutional, left_out, [False]),
}


def looks(module, steps, count):
    """Take steps, with an exchange after each that allows one; return after which something was pending."""
    held = TorchParticipant(module)
    arrays = {each.name: np.empty(each.shape, np.float32) for each in held.parameters}
    found = []

    def on_step():
        found.append(held.pending() is not None)
        if not found[-1]:
            held.read(arrays)
            held.write(arrays)  # the next backward passes run, or torch raises

    end = held.attach(on_step)
    for _ in range(count):
        next(steps).step()
    end()
    return found


@pytest.mark.parametrize(("make", "loop", "pending"), LOOPS.values(), ids=LOOPS)
def test_a_backward_pass_that_is_to_come_is_seen(make, loop, pending):
    module = make()
    assert looks(module, loop(module), 5 * len(pending)) == 5 * pending


def test_what_is_left_of_a_graph_that_has_run_holds_exchanges_up_for_a_while_only():
    module = convolutional()
    found = looks(module, gan_with_a_penalty(module), STEPS_PENDING_MAX + 12)
    assert found == [True] * (STEPS_PENDING_MAX + 3) + [False] + 2 * [True, True, True, False]


def test_graphs_that_never_run_hold_exchanges_up_for_a_while_only(caplog):
    """Another optimizer owns what they need."""
    module = convolutional()

    def steps():
        _, discriminator = optimizers_of(module)
        while True:
            fake = module["generator"](noise())
            discriminator.zero_grad()
            real_or_fake(module, fake.detach(), 0.0).backward()
            yield discriminator

    found = looks(module, steps(), 2 * STEPS_PENDING_MAX + 2)
    assert found == [True] * (2 * STEPS_PENDING_MAX - 1) + 3 * [False]
    assert caplog.text.count("although a backward pass may still need it") == 1


@pytest.mark.parametrize(("make", "loop", "pending"), LOOPS.values(), ids=LOOPS)
def test_such_a_loop_exchanges_and_every_change_counts(tmp_path, make, loop, pending):
    module = make()
    with Hub(edgeasync.torch.model(make()), run=tmp_path, bind="tcp://127.0.0.1:*", policy=EACH_STEP) as hub:
        with join(hub.address, module, timeout_s=PATIENCE_S) as session:
            steps = loop(module)
            for _ in range(6 * len(pending)):
                next(steps).step()
            assert session.steps == 6
            assert session.exchanges > 1
        hubs = hub.snapshot()
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            np.testing.assert_allclose(hubs[name], tensor.numpy(), atol=1e-2, err_msg=name)


def test_the_last_steps_count_though_a_backward_pass_is_to_come(tmp_path):
    module = convolutional()
    with Hub(edgeasync.torch.model(convolutional()), run=tmp_path, bind="tcp://127.0.0.1:*") as hub:
        with join(hub.address, module, timeout_s=PATIENCE_S) as session:
            next(steps := gan(module)).step()
            assert session.steps == 0
        assert session.steps == 1
        steps.close()


def test_a_loop_without_a_safe_point_is_told_what_to_do(tmp_path, caplog):
    module = convolutional()
    optimizers = optimizers_of(module)

    def train(address):
        steps = gan(module, optimizers)
        with join(address, module, optimizers[1], timeout_s=PATIENCE_S):
            for _ in range(8 * STEPS_PENDING_MAX):
                next(steps).step()

    hub = Hub(edgeasync.torch.model(convolutional()), run=tmp_path, bind="tcp://127.0.0.1:*", policy=EACH_STEP)
    with hub, pytest.raises(RuntimeError, match="modified by an inplace operation") as told:
        train(hub.address)
    assert "join without optimizer" in caplog.text
    assert "docs/train/join.md" in told.value.__notes__[0]
