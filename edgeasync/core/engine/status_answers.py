"""Answers to those who ask for the hub's status: in slices where there are many devices to tell of."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from edgeasync.core.engine.hub_shell import HubShell
from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.machine import HubCore

DEVICES_AT_A_TIME = 256
"""How many devices are told of at a time: their parts take some milliseconds."""


class StatusAnswers:
    """Describes the hub for one peer after another; `send` sends the text.

    Where a slice does not do, what is told of the hub is of the beginning, and devices are told of as they are
    when their slice comes.
    """

    def __init__(self, core: HubCore, shell: HubShell) -> None:
        self._core = core
        self._shell = shell

    def answer(self, peer: Peer, header: bytes, sender: Sender, now_s: float) -> None:
        """Send the status: to a device's key what is about its own devices, to all others everything."""
        own = sender.key if sender.role == "device" else b""
        members = self._core.members.of_key(own) if own else list(self._core.members.members.values())
        status = self._core.describe(members, now_s) | self._shell.describe()
        if own:
            status = _own(status, sender)
        told: list[bytes] = []

        def tell(begin: int) -> None:
            end = begin + DEVICES_AT_A_TIME
            devices = self._core.describe_devices(members[begin:end], now_s)
            told.append(msgspec.json.encode(devices)[1:-1])
            if end < len(members):
                self._shell.after(0.0, partial(tell, end))
                return
            text = msgspec.json.encode({**status, "devices": msgspec.Raw(b"[" + b",".join(told) + b"]")})
            self._shell.send(peer, header, text)

        tell(0)


def _own(status: Mapping[str, Any], sender: Sender) -> dict[str, Any]:
    """Return what a device may see of a status that is about its key's devices."""
    alarms = [alarm for alarm in status["alarms"] if not alarm["device"] or sender.speaks_for(alarm["device"])]
    return {**status, "alarms": alarms, "denied": {}}
