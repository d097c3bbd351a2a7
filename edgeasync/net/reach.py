"""Why a hub cannot be reached, in words for the person at the device."""

import asyncio
from typing import Literal

from edgeasync.net.address import host_of
from edgeasync.net.curve import CUTS_MIN
from edgeasync.net.socket_monitor import Finding

LOOK_UP_S = 5.0
"""How long a name may take to be resolved before that is the reason."""

_WORDS: dict[Finding, str] = {
    "nothing": "no answer, check the address and the network",
    "unresolved": "no answer, check the address and the network",
    "no way": "there is no way to that network, check this device's connection",
    "no answer": "no answer, check the address, the network, and whether that machine is on",
    "refused": "refused: nothing listens there, or a firewall bars it, start the hub or check the address",
    "taken": "the connection is taken, but nothing is said there: not an edgeasync hub, or one that hangs, "
    "check the address and the hub",
    "foreign": "not an edgeasync hub, check the address",
    "mechanism": "one side uses keys and the other does not, enrol this device at that hub",
    "denied": "the hub does not let this device's key in: it was revoked, or is not in the hub's list; "
    "ask the hub's operator, this device waits until then",
    "put off": "the hub lets nobody in for now, or not this device's key so often; this device tries again, "
    "check the hub if that lasts",
    "spoken": "a ZeroMQ peer that does not answer: not an edgeasync hub, or one that is overloaded, "
    "check the address and the hub",
}


KeyMismatch = Literal["unknown", "another hub", "no keys there", "no keys here"]
"""How the keys of this side and of the hub do not fit; `unknown`: the hub does not know this side's key."""

_ENROL = "'edgeasync keys enrol NAME' at the hub, then --enrol TOKEN, or enrol=TOKEN in Python, here"

_MISMATCHES: dict[KeyMismatch, str] = {
    "unknown": f"this hub does not know this device's key, or it was revoked; enrol the device: {_ENROL}",
    "another hub": "the hub at this address has another key than the one this device was enrolled with; "
    "correct the address, or enrol this device again",
    "no keys there": "the hub at this address has no keys, and this device talks to its own hub alone; "
    "start that hub with --keys, or correct the address",
    "no keys here": f"this hub talks to enrolled devices alone, and this one has no key; {_ENROL}",
}


def key_mismatch(*, denied: bool, keyed: bool, mechanism: str, cuts: int) -> KeyMismatch | None:
    """Return how this side's keys and the hub's do not fit; `None` if they are not at fault.

    `denied` says whether the hub has refused this side's key, `keyed` whether this side has keys, `mechanism` how
    the other side secures its connections, `cuts` how many handshakes in a row it has cut.
    """
    if denied:
        return "unknown"
    if keyed and mechanism == "CURVE" and cuts >= CUTS_MIN:
        return "another hub"
    if keyed and mechanism == "NULL":
        return "no keys there"
    return "no keys here" if not keyed and mechanism == "CURVE" else None


def keys_do_not_fit(finding: Finding, *, keyed: bool, mechanism: str, cuts: int) -> str:
    """Return why a device's keys and the hub's do not fit, or nothing if they are not at fault."""
    mismatch = key_mismatch(denied=finding == "denied", keyed=keyed, mechanism=mechanism, cuts=cuts)
    return "" if mismatch is None else _MISMATCHES[mismatch]


async def explain(address: str, finding: Finding, unreadable: str = "") -> str:
    """Return why no hub is reached at an address, and what to check; where the name may be at fault, look it up.

    `unreadable` is why an answer that came could not be read. Takes at most `LOOK_UP_S`; never blocks the loop.
    """
    if unreadable:
        return f"not an edgeasync hub of this version ({unreadable}), check the address and the versions of both"
    host = host_of(address)
    if host is None:  # a path, or a name within this process
        return _WORDS["refused" if finding == "no way" else finding]
    if finding in ("nothing", "unresolved"):
        try:
            async with asyncio.timeout(LOOK_UP_S):
                await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), None)
        except TimeoutError:
            return f"the name {host} is not resolved within {LOOK_UP_S:g} s, check this device's network and DNS"
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return f"the name {host} is unknown ({reason}), check the address and this device's DNS"
    return _WORDS[finding]
