"""What an operator must know about the whole fleet, in words, for the terminal and the page."""

from collections.abc import Iterator, Mapping

from edgeasync.core.hub.attention import duration
from edgeasync.core.hub.device_words import seconds
from edgeasync.protocol.feed import Notice
from edgeasync.protocol.status import HubSummary

REMEDIES = {
    "alert": "nothing was changed",
    "probation": "its updates have limited weight",
    "excluded": "excluded by an operator",
    "increase_frequency": "intervals were halved",
    "reduce_lr": "the hub's learning rate was halved",
    "reduce_local_lr": "the devices' learning rates were halved",
    "rollback": "rolled back to an earlier model, at half the hub's learning rate",
}

DENIALS = {
    "hub_key": "with the wrong hub key",
    "plain": "without encryption",
    "protocol": "with a broken handshake",
    "revoked": "with a revoked key",
    "routing_id": "with a custom routing id",
    "token": "with a used or expired token",
    "unfinished": "with an unfinished handshake",
    "unknown_key": "with an unknown key",
}


def find_notices(hub: HubSummary) -> Iterator[Notice]:
    """Yield what an operator must know about the whole fleet, the most urgent first."""
    if hub.disk_trouble:
        cost = "the hub accepts no updates until it can write again"
        if hub.durability == "checkpoint":
            cost = "training continues, but a crash of the hub loses everything after the last checkpoint"
        yield Notice("bad", f"cannot write the run's folder: {hub.disk_trouble}; {cost}")
    for alarm in hub.alarms:
        if not alarm.device:
            remedy = REMEDIES.get(alarm.remedy, alarm.remedy)
            yield Notice("bad", f"alarm: fleet, for {duration(alarm.since_s)}: {alarm.cause}; {remedy}")
    cadence, factor = hub.cadence, hub.learning_rate_factor
    if cadence.resting:
        still = f"the model has not improved for {duration(cadence.still_s)}"
        yield Notice("info", f"idle: {still}, so devices exchange every {seconds(cadence.rest_period_s)}")
    if factor != 1.0:
        yield Notice("info", f"the hub's learning rate is reduced to {factor:.3g} of its setting")


def denied_words(denied: Mapping[str, int]) -> str:
    """Return how many connections the hub refused for which reasons."""
    return ", ".join(f"{count} {DENIALS.get(why, why)}" for why, count in denied.items())
