"""A quiet hub in virtual time: its fleet rests once it has learnt, keeps its leases, and wakes at a word."""

import numpy as np

from benchmarks import rest_fleet
from benchmarks.rest_fleet import Case
from edgeasync.protocol import wire
from edgeasync.protocol.messages import PROTOCOL_VERSIONS, Wake

REST_S = 4200.0
"""The fleet rests at nearly its longest period by then."""


def test_a_fleet_that_has_learnt_rests_and_wakes_at_an_operators_word():
    run = rest_fleet._Run(Case(1))
    run.clock.run(lambda: False, REST_S)
    core = run.hub.core
    assert run.resting
    assert rest_fleet.accuracy_of(run.model, run.hub.model, run.held_out) > 0.95
    tempo = core.status(run.clock.now_s)["tempo"]
    assert tempo["resting"]
    assert tempo["rest_period_s"] > 300.0
    assert tempo["still_s"] > 1200.0
    assert {device["state"] for device in core.status(run.clock.now_s)["devices"]} == {"training"}
    updates = core.updates_applied
    run.clock.run(lambda: False, REST_S + 2 * tempo["rest_period_s"])
    assert core.updates_applied - updates <= 3 * len(run.devices)
    begun_s, updates = run.clock.now_s, core.updates_applied
    told = []
    run.hub.connect(b"operator", lambda header, payload: told.append((wire.decode(header), payload)))
    run.hub.receive(b"operator", wire.encode(Wake(), PROTOCOL_VERSIONS[0]), None)
    assert b'"rest_cause":"an operator said so"' in bytes(told[0][1])
    run.clock.run(lambda: False, begun_s + 30.0)
    assert core.updates_applied - updates >= 5 * len(run.devices)
    names = [report.event for _, report in run.hub.reports]
    assert "lost" not in names
    assert "paused" not in names
    assert names.index("resting") < names.index("awake")
    rests = [report.detail for _, report in run.devices[0].told if report.event == "resting"]
    assert rests
    assert all(detail.endswith(" s: the model stands still") for detail in rests)
    core.check()


def test_a_device_that_exchanges_while_the_others_rest_counts_as_one_of_all():
    run = rest_fleet._Run(Case(2))
    run.clock.run(lambda: False, REST_S)
    engine = run.hub.core.policy_engine
    engine._members.members["device-1"].history.roused = 3
    before, weights = run.hub.core.version, []
    share = engine._share_of_voters
    engine._share_of_voters = lambda contributions: weights.append(share(contributions)) or weights[-1]
    run.clock.run(lambda: run.hub.core.version >= before + 4, REST_S + 1300.0)
    assert min(weights) <= 0.5
    assert np.isfinite(run.hub.model).all()
