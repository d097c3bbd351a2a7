"""A fleet as the feed of a hub shows it, drawn from a seed: for pages of any size, without a hub."""

import random

import msgspec

from edgeasync.core.hub.attention import find_attention
from edgeasync.core.hub.device_status import device_row
from edgeasync.core.hub.device_words import device_lines
from edgeasync.core.hub.fleet_words import denied_words, find_notices
from edgeasync.protocol.feed import (
    ATTENTION_MAX,
    EVENTS_SHOWN,
    DeviceDetails,
    DeviceRow,
    FeedUpdate,
    HistoryPoint,
    PendingKey,
)
from edgeasync.protocol.status import (
    ActiveAlarm,
    CadenceStatus,
    DeviceStatus,
    EvaluationStatus,
    FleetStatus,
    HubStatus,
    HubSummary,
    Quarantine,
    RecentEvent,
    TrafficStatus,
)

START = 1_796_000_000.0
"""The hub's time at which a fleet begins."""

MACHINES = (
    "Raspberry Pi 5 Model B",
    "Raspberry Pi Zero 2 W",
    "Jetson Orin Nano",
    "x86_64",
    "Raspberry Pi 4 Model B",
)
PLACES = ("greenhouse", "barn", "silo", "field", "pump", "gate")
EXCLUDED = Quarantine("excluded by an operator", "when an operator releases it")
CADENCE = CadenceStatus(
    *(0.215, 0.3, "", 1.0, ""), warming_up=False, resting=False, rest_period_s=0.0, still_s=0.0, rest_cause=""
)
ADDRESS = "tcp://192.168.1.10:5555"


class MadeFleet:
    """Devices, events and a history; `tick` lets a second pass and returns what changed.

    A share of the devices is lost, slow, hot, warned and so on; a fleet of three has one slow device.
    """

    def __init__(self, count, seed=7, *, active=0.1):
        self.draw = random.Random(seed)
        self.active = active
        self.lineage = f"{self.draw.getrandbits(64):016x}"
        self.time = START
        self.number = 1
        self.version = 1
        self.updates = 0
        self.alarms = []
        self.events = []
        self.history = []
        self.disk_trouble = ""
        self.denied = {}
        self.pending = None
        self.unseen = []
        self.seen = {}
        self.devices = {}
        self.changed = set()
        self.gone = []
        self.sent = 0
        self.drawn = 0
        for place in range(count):
            self.add(self._name(place, count))
        for device in list(self.devices.values())[:30]:
            self.report("joined", device.id, f"start 1, {device.machine}")
        for _ in range(240):
            self._learn()
        for place, device in enumerate(list(self.devices.values())):
            self._plant(place, device)
        self._settle()

    def add(self, name, **fields):
        """Add a device that trains, or has these fields."""
        at = self.draw
        drawn = {
            "staleness": at.randrange(4),
            "local_steps": at.randrange(10, 40),
            "examples_per_s": at.uniform(900.0, 1500.0),
            "updates_applied": at.randrange(50, 900),
            "pushes_answered": 900,
            "loss": at.lognormvariate(-4.0, 0.3),
            "step_s": at.uniform(0.01, 0.03),
            "talk_s": at.uniform(0.008, 0.015),
            "talk_share": at.uniform(0.02, 0.1),
            "period_s": at.uniform(0.2, 0.6),
            "round_trip_s": at.uniform(0.001, 0.03),
            "temperature_c": at.uniform(45.0, 65.0),
            "bytes_up": at.randrange(10**5, 10**8),
            "bytes_down": at.randrange(10**5, 10**8),
            "day_bytes": 10**5,
            "machine": at.choice(MACHINES),
        }
        self.devices[name] = DeviceStatus(**fields_of(name) | drawn | fields)
        self.seen[name] = self.time - at.uniform(0.0, 5.0)
        self.changed.add(name)

    def forget(self, name):
        """Remove a device."""
        del self.devices[name]
        self.gone.append(name)

    def change(self, name, **fields):
        """Change fields of a device; it was seen just now."""
        self.devices[name] = msgspec.structs.replace(self.devices[name], **fields)
        self.seen[name] = self.time
        self.changed.add(name)

    def report(self, event, device="", detail="", **more):
        """Add an event."""
        number = self.events[-1].number + 1 if self.events else 1
        self.events.append(
            RecentEvent(number=number, event=event, time=self.time, device=device, detail=detail, **more)
        )

    def tick(self):
        """Let a second pass, in which a share of the devices trains; return the update with all changes."""
        self.time += 1.0
        self.number += 1
        names = sorted(self.devices)
        for name in self.draw.sample(names, round(self.active * len(names))):
            if self.devices[name].state == "training":
                self._train(name)
        self._learn()
        names = sorted(self.changed & self.devices.keys())
        update = self._update(self.number - 1, names, self.events[self.sent :], self.history[self.drawn :])
        self._settle()
        return update

    def _settle(self):
        """Consider all changes as sent."""
        self.sent, self.drawn = len(self.events), len(self.history)
        self.changed, self.gone = set(), []

    def whole(self):
        """Return everything, as an update."""
        return self._update(0, list(self.devices), self.events[-EVENTS_SHOWN:], self.history)

    def details(self, name):
        """Return everything about a device; `None` if there is no such device."""
        if name not in self.devices and name not in self.unseen:
            return None
        status = self.status()
        known = {device.id: device for device in status.devices}
        return DeviceDetails(
            time=self.time,
            device=known.get(name),
            facts=[*device_lines(known[name])] if name in known else [],
            attention=next((one for one in find_attention(status) if one.device == name), None),
            events=[event for event in self.events if event.device == name][-50:],
        )

    def status(self):
        """Return the hub's status."""
        devices = [self._now(device) for device in self.devices.values()]
        return HubStatus(**msgspec.structs.asdict(self._summary()), devices=devices)

    def _now(self, device):
        """Return a device as it is now."""
        silent_s = self.time - self.seen[device.id]
        return msgspec.structs.replace(
            device,
            last_seen_s=silent_s,
            joined_s=self.time - START + 4000.0,
            stalled_s=silent_s if device.state == "joining" else device.stalled_s,
        )

    def _name(self, place, count):
        return f"{PLACES[place % len(PLACES)]}-{place // len(PLACES) + 1 if count > 3 else place + 1}"

    def _plant(self, place, device):
        """Let every 40th device be lost, the next one slow, and so on."""
        name, kind = device.id, place % 40 if len(self.devices) > 3 else (21 if place == 2 else 1)
        changes = {
            20: {"state": "lost", "why_left": "no message for 15 s"},
            21: {"examples_per_s": device.examples_per_s / 20.0, "machine": "Raspberry Pi Zero 2 W"},
            22: {"pace_percent": 40, "pace_reason": "78 C is above 75 C", "temperature_c": 78.0},
            23: {"talk_share": 0.8, "talk_s": 2.4, "period_s": 3.0},
            24: {"state": "paused", "pace_percent": 0, "pace_reason": "on battery, 12 % left"},
            25: {"state": "joining", "updates_applied": 0, "loss": None, "examples_per_s": 0.0, "period_s": 0.0},
            26: {"state": "quarantined", "quarantine": EXCLUDED},
            27: {"state": "left", "examples_per_s": 0.0, "why_left": "stopped by a signal"},
            28: {"loss": 8.37},
            29: {
                "updates_rejected": {"stale": 210, "norm": 3},
                "last_error": "stale: 9 versions",
                "last_error_s": 4.0,
            },
        }.get(kind, {})
        self.change(name, **changes)
        if kind in (20, 25):
            self.seen[name] = self.time - self.draw.uniform(100.0, 9000.0)
        if kind == 20:
            self.report("lost", name, "the hub received nothing for 15 s")
        if kind == 28:
            cause = "the model does not fit its data (loss 8.37, the fleet's 0.0525): check labels and inputs"
            self.alarms.append(ActiveAlarm(name, cause, "alert", 92.0, []))
            self.report("alarm", name, cause)
        elif not changes:
            self.seen[name] = self.time - self.draw.uniform(0.0, 5.0)

    def _train(self, name):
        device = self.devices[name]
        self.updates += 1
        self.change(
            name,
            updates_applied=device.updates_applied + 1,
            staleness=self.draw.randrange(4),
            loss=None if device.loss is None else device.loss * self.draw.uniform(0.97, 1.025),
            examples_per_s=device.examples_per_s * self.draw.uniform(0.98, 1.02),
        )

    def _learn(self):
        """Fold a version, and evaluate every tenth one."""
        self.version += 1
        progress = len(self.history)
        loss = 2.3 * 0.985**progress * self.draw.uniform(0.95, 1.05) + 0.02
        evaluated = progress % 10 == 9
        self.history.append(
            HistoryPoint(
                time=self.time - 240.0 + progress if self.number == 1 else self.time,
                version=self.version,
                updates=self.updates,
                loss=loss,
                evaluation_loss=loss * 1.2 if evaluated else None,
                evaluation_accuracy=1.0 - min(0.9, loss / 2.5) if evaluated else None,
            )
        )

    def _update(self, previous, names, events, history):
        status = self.status()
        attention = find_attention(status)
        counts = {}
        for device in status.devices:
            counts[device.state] = counts.get(device.state, 0) + 1
        return FeedUpdate(
            lineage=self.lineage,
            number=self.number,
            previous=previous,
            time=self.time,
            summary=self._summary(),
            notices=[*find_notices(status)],
            denied=denied_words(self.denied),
            counts=counts,
            attention=attention[:ATTENTION_MAX],
            attention_count=len(attention),
            columns=[] if previous else list(DeviceRow.__struct_fields__),
            devices=[device_row(self._now(self.devices[name]), self.time) for name in names],
            gone=self.gone,
            events=events,
            history=history,
            pending=self.pending,
        )

    def _summary(self):
        points = [point for point in self.history if point.evaluation_loss is not None]
        evaluated = [
            EvaluationStatus(point.version, point.evaluation_loss, point.evaluation_accuracy) for point in points
        ]
        loss = self.history[-1].loss if self.history else None
        return HubSummary(
            lineage=self.lineage,
            version=self.version,
            pushes_answered=self.updates,
            updates_applied=self.updates,
            updates_rejected=12,
            updates_buffered=0,
            duplicates=3,
            messages_accepted={},
            messages_refused=0,
            messages_ignored=0,
            cadence=CADENCE,
            fleet=FleetStatus(1.2, 0.8, loss, None),
            learning_rate_factor=1.0,
            rollbacks=0,
            evaluation=evaluated[-1] if evaluated else None,
            best=min(evaluated, key=lambda one: one.loss, default=None),
            alarms=self.alarms,
            alarms_past=[],
            traffic=TrafficStatus(1_240_000_000, 3_410_000_000, 812_000_000, 40_000.0, None, None),
            address=ADDRESS,
            pid=24174,
            uptime_s=self.time - START + 7260.0,
            model_file="/var/lib/edgeasync/model.safetensors",
            parameters=61_706,
            durability="journal",
            version_durable=None,
            disk_trouble=self.disk_trouble,
            denied=self.denied,
            enrolled_unseen=self.unseen,
            refused={},
            journal=None,
        )


def fields_of(name):
    """Return the fields of a device that trains and has done nothing yet."""
    return {
        "id": name,
        "state": "training",
        "quarantine": None,
        "staleness": 0,
        "local_steps": 0,
        "last_seen_s": 0.0,
        "examples_per_s": 0.0,
        "pushes_answered": 0,
        "updates_applied": 0,
        "updates_buffered": 0,
        "duplicates": 0,
        "updates_rejected": {},
        "updates_shortened": 0,
        "weight_kept": 1.0,
        "loss": None,
        "pace_percent": 100,
        "pace_reason": "",
        "temperature_c": None,
        "assigned_steps": 20,
        "why": "to meet the target period",
        "bound": "",
        "step_s": 0.0,
        "talk_s": 0.0,
        "talk_share": 0.0,
        "period_s": 0.0,
        "push_codec": "int8",
        "bytes_up": 0,
        "bytes_down": 0,
        "round_trip_s": 0.0,
        "bandwidth_bytes_per_s": 2_400_000,
        "day_bytes": 0,
        "bytes_per_day_max": None,
        "day_left_bytes": None,
        "rest_s": 0.0,
        "stalled_s": 0.0,
        "machine": "x86_64",
        "software": "edgeasync 0.1.0",
        "address": "192.168.1.20",
        "joined_s": 0.0,
        "clock_offset_s": 0.02,
        "why_left": "",
        "last_error": "",
        "last_error_s": None,
    }


def pending_key(place, *, seen=START - 30.0, refused=False):
    """Return a key that waits for an operator."""
    digits = f"{random.Random(place).getrandbits(80):020x}"
    return PendingKey(
        " ".join(digits[at : at + 4] for at in range(0, 20, 4)), f"192.168.1.{100 + place}", int(seen), refused
    )
