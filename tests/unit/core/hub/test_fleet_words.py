"""What an operator must know about the whole fleet."""

import msgspec

from edgeasync.core.hub.fleet_words import denied_words, find_notices
from edgeasync.protocol.feed import Notice
from tests.support.parts.statuses import alarm, device, status


def test_a_fleet_without_trouble_has_no_notices():
    assert [*find_notices(status([device("pi")], alarms=[alarm("pi")]))] == []


def test_trouble_comes_before_information():
    told = status(
        alarms=[alarm("", "the loss is 9", "rollback")], disk_trouble="disk full", learning_rate_factor=0.5
    )
    idle = msgspec.structs.replace(told.cadence, resting=True, still_s=240.0, rest_period_s=30.0)
    assert [*find_notices(msgspec.structs.replace(told, cadence=idle))] == [
        Notice(
            "bad", "cannot write the run's folder: disk full; the hub accepts no updates until it can write again"
        ),
        Notice(
            "bad",
            "alarm: fleet, for 90 s: the loss is 9; "
            "rolled back to an earlier model, at half the hub's learning rate",
        ),
        Notice("info", "idle: the model has not improved for 4 min, so devices exchange every 30.00 s"),
        Notice("info", "the hub's learning rate is reduced to 0.5 of its setting"),
    ]


def test_refused_connections_are_counted_by_reason():
    assert denied_words({}) == ""
    assert denied_words({"revoked": 2, "new": 1}) == "2 with a revoked key, 1 new"
