"""Explain to a device's user why its hub cannot be reached."""

import asyncio
from typing import Literal

from edgeasync.net.address import host_of
from edgeasync.net.curve import CUTS_MIN
from edgeasync.net.socket_monitor import Finding

LOOK_UP_S = 5.0
"""Timeout for resolving a name.

After a timeout, the name is reported as the reason for the failure.
"""

_WORDS: dict[Finding, str] = {
    "nothing": "no answer, check the address and the network",
    "unresolved": "no answer, check the address and the network",
    "no way": "no route to that network, check this device's connection",
    "no answer": "no answer, check the address, the network, and whether that machine is running",
    "refused": "connection refused, start the hub, or check the address and firewalls",
    "taken": "connected, but no reply: not an edgeasync hub, or a hub that hangs, check the address and the hub",
    "foreign": "not an edgeasync hub, check the address",
    "mechanism": "only one side uses keys, enrol this device at that hub",
    "denied": "the hub rejected this device's key: it was revoked, or is not in the hub's list, ask the hub's "
    "operator; this device keeps trying",
    "put off": "the hub cannot check keys now, or this key connected too often, check the hub if this lasts; "
    "this device keeps trying",
    "spoken": "connected, but no reply: another ZeroMQ program, or an overloaded hub, check the address and the "
    "hub",
}


KeyMismatch = Literal["unknown", "another hub", "no keys there", "no keys here"]
"""How the keys of this side and the hub differ.

`unknown` means that the hub does not know the key of this side.
"""

_ENROL = "'edgeasync keys enrol NAME' at the hub, then --enrol TOKEN, or enrol=TOKEN in Python, here"

_MISMATCHES: dict[KeyMismatch, str] = {
    "unknown": f"this hub does not know this device's key, or has revoked it; enrol the device: {_ENROL}",
    "another hub": "the hub at this address has another key than the hub that enrolled this device; correct the "
    "address, or enrol this device again",
    "no keys there": "the hub at this address has no keys, but this device is enrolled at a hub with keys; start "
    "that hub with --keys, or correct the address",
    "no keys here": f"this hub admits enrolled devices only, and this device has no key; enrol it: {_ENROL}",
}


def key_mismatch(*, denied: bool, keyed: bool, mechanism: str, cuts: int) -> KeyMismatch | None:
    """Return how the keys of this side and the hub differ, or `None` if they are not the reason.

    `denied` states whether the hub has rejected this side's key, and `keyed` whether this side has
    keys. `mechanism` is the security mechanism of the other side. `cuts` is the number of
    handshakes in a row that the other side has aborted.
    """
    if denied:
        return "unknown"
    if keyed and mechanism == "CURVE" and cuts >= CUTS_MIN:
        return "another hub"
    if keyed and mechanism == "NULL":
        return "no keys there"
    return "no keys here" if not keyed and mechanism == "CURVE" else None


def keys_do_not_fit(finding: Finding, *, keyed: bool, mechanism: str, cuts: int) -> str:
    """Return an explanation of why the keys of device and hub do not match.

    It is empty if the keys are not the reason for the failure.
    """
    mismatch = key_mismatch(denied=finding == "denied", keyed=keyed, mechanism=mechanism, cuts=cuts)
    return "" if mismatch is None else _MISMATCHES[mismatch]


async def explain(address: str, finding: Finding, unreadable: str = "") -> str:
    """Explain why no hub answers at an address, and what the user should check.

    `unreadable` is the error for an answer that could not be parsed. If the host name may be the
    reason, it is resolved. This takes at most `LOOK_UP_S` seconds and does not block the loop.
    """
    if unreadable:
        return f"not an edgeasync hub of this version ({unreadable}), check the address and both versions"
    host = host_of(address)
    if host is None:  # a path, or a name within this process
        return _WORDS["refused" if finding == "no way" else finding]
    if finding in ("nothing", "unresolved"):
        try:
            async with asyncio.timeout(LOOK_UP_S):
                await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), None)
        except TimeoutError:
            return f"cannot resolve the name {host} within {LOOK_UP_S:g} s, check this device's network and DNS"
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return f"cannot resolve the name {host} ({reason}), check the address and this device's DNS"
    return _WORDS[finding]
