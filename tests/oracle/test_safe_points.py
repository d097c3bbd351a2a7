"""Loops in which another backward pass is to come when an optimizer steps: exchanges wait for it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import edgeasync.torch
from edgeasync import Hub, join
from edgeasync.errors import ConfigError
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.policy import Policy
from edgeasync.sdk.own_loop import STEPS_PENDING_MAX
from edgeasync.sdk.torch_modules import TorchParticipant
from tests.support.processes import PATIENCE_S

nn, functional = torch.nn, torch.nn.functional


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


def gan(module):
    """The discriminator learns from pictures that the generator made, then the generator from the same."""
    generator, discriminator = optimizers_of(module)
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


def one_optimizer(module):
    """One optimizer of both, which skips what has no gradient."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    while True:
        fake = module["generator"](noise())
        optimizer.zero_grad()
        (real_or_fake(module, PICTURES, 1.0) + real_or_fake(module, fake.detach(), 0.0)).backward()
        yield optimizer
        optimizer.zero_grad()
        torch.autograd.backward(real_or_fake(module, fake, 1.0), inputs=list(module["generator"].parameters()))
        yield optimizer


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


LOOPS = {
    "gan": (convolutional, gan, [True, False]),
    "gan with a penalty": (convolutional, gan_with_a_penalty, [True, True, True, False]),
    "one optimizer": (convolutional, one_optimizer, [True, False]),
    "actor and critic": (actor_and_critic, learns_from_rewards, [True, False]),
    "usual": (convolutional, usual, [False]),
}


@pytest.mark.parametrize(("make", "loop", "pending"), LOOPS.values(), ids=LOOPS)
def test_a_backward_pass_that_is_to_come_is_seen(make, loop, pending):
    module = make()
    held = TorchParticipant(module)
    arrays = {each.name: np.empty(each.shape, np.float32) for each in held.parameters}
    steps = loop(module)
    seen = []
    for _ in range(5 * len(pending)):
        next(steps).step()
        seen.append(held.pending() is not None)
        if not seen[-1]:
            held.read(arrays)
            held.write(arrays)  # the next backward passes run, or torch raises
    assert seen == 5 * pending


@pytest.mark.parametrize(("make", "loop", "pending"), LOOPS.values(), ids=LOOPS)
def test_such_a_loop_exchanges_and_every_change_counts(tmp_path, make, loop, pending):
    module = make()
    each_step = Policy(frequency=FixedFrequency(local_steps=1))
    with Hub(edgeasync.torch.model(make()), run=tmp_path, bind="tcp://127.0.0.1:*", policy=each_step) as hub:
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


def test_a_loop_without_a_safe_point_is_told_so(tmp_path):
    module = convolutional()
    _, discriminator = optimizers_of(module)
    told = pytest.raises(ConfigError, match=r"before a backward pass.*join without optimizer")
    with (
        Hub(edgeasync.torch.model(convolutional()), run=tmp_path, bind="tcp://127.0.0.1:*") as hub,
        told,
        join(hub.address, module, discriminator, timeout_s=PATIENCE_S),
    ):
        for _ in range(STEPS_PENDING_MAX):
            fake = module["generator"](noise())
            discriminator.zero_grad()
            real_or_fake(module, fake.detach(), 0.0).backward()
            discriminator.step()
