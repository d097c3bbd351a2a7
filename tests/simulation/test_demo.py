"""The demo's own settings and devices in virtual time: what it promises must not depend on luck."""

import tomllib

import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.cli.demo import SETTINGS, SLOWNESS, STEP_S, make_model, measure_accuracy, split_digits
from edgeasync.config import convert
from edgeasync.runtime.hub_settings import HubSettings
from edgeasync.training.plan import ReceivedGraph, ShippedModel, TrainingPlan
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from tests.support.simulation.hubs import simulated_hub
from tests.support.size import repetitions

TRAINED_S = 6.0
"""Far less than starting the processes leaves of the demo's 15 seconds."""


@pytest.mark.parametrize("seed", range(repetitions("seeds of the demo")))
def test_the_demo_reaches_its_accuracy(seed):
    settings = convert(
        tomllib.loads(SETTINGS.format(run='"unused"', model='"unused.onnx"', seed=seed)),
        HubSettings,
        where="the demo",
    )
    parts, held_out = split_digits(len(SLOWNESS), seed)
    forward = make_model(seed)
    graph = build_training_graph(forward, GraphSettings(loss=settings.model.loss))
    clock = VirtualClock()
    hub = simulated_hub(clock, graph, settings.policy, seed=seed, initial=graph.initial)
    plan = TrainingPlan(model=ShippedModel(), local=settings.local)
    received = ReceivedGraph(graph.model, graph.spec)
    for number, (part, slowness) in enumerate(zip(parts, SLOWNESS, strict=True), start=1):
        trainer = plan.make_trainer(part, seed=0, received=received)
        device = SimulatedDevice(
            hub, f"device-{number}", trainer, step_s=STEP_S * slowness, link=LinkProfile(delay_s=0.001)
        )
        device.start()
    clock.run(lambda: False, TRAINED_S)
    trained = export_model(forward, graph.spec.views(hub.model.copy()))
    assert measure_accuracy(trained, held_out) >= 0.95
