"""Whether the hub can be reached, how fast, and what it will let this device do."""

import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from edgeasync.durable.allow_list import read_key
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.keys import KeyPair, Token
from edgeasync.errors import AccessError, AddressError, EdgeAsyncError, HubUnreachableError, ProtocolError
from edgeasync.net.address import check_connect, host_of, is_ipv6
from edgeasync.net.dealer import Pair
from edgeasync.net.status import ask, is_denied
from edgeasync.ops.doctor.finding import Finding, fail, ok, told, warn
from edgeasync.protocol.messages import StatusRequest

CONNECT_S = 2.0
STATUS_S = 3.0

ROUND_TRIP_S_SLOW = 1.0
BANDWIDTH_SLOW = 16 << 10

PERIOD_S = 10.0
"""Between two exchanges, for an estimate before the fleet has a period."""

ENROL = (
    "'edgeasync keys enrol NAME' at the hub, then 'edgeasync agent --enrol TOKEN' here; or 'edgeasync keys "
    "accept' if this device knocks"
)

AGAIN = "make another by 'edgeasync keys enrol NAME' at the hub, then 'edgeasync agent --enrol TOKEN' here"


class Reached(NamedTuple):
    """What came of looking for a hub."""

    findings: list[Finding]
    status: Mapping[str, Any] | None


def examine_hub(
    addresses: tuple[str, ...], keys: DeviceKeys | None, *, token: Token | None, insecure: bool, knocks: bool
) -> Reached:
    """Look for a hub at each address until one answers.

    `keys` are those of a device that is enrolled. One that is not brings its own by a `token`, or `knocks`.
    """
    for address in addresses:
        found = _examine(address, keys, token, insecure=insecure, knocks=knocks)
        if found.status is not None:
            break
    return found


def _examine(
    address: str, keys: DeviceKeys | None, token: Token | None, *, insecure: bool, knocks: bool
) -> Reached:
    enrols = token is not None or knocks
    try:
        check_connect(address, insecure=insecure or keys is not None or enrols)
        round_trip_s = time_connect(address)
    except (HubUnreachableError, AddressError) as error:
        return Reached([told("hub", error)], None)
    shown = "is on this machine" if round_trip_s is None else f"a round trip takes {1000 * round_trip_s:.2g} ms"
    slow = round_trip_s is not None and round_trip_s > ROUND_TRIP_S_SLOW
    cure = "nothing, if that is a satellite; else look at the link"
    reached = warn("hub", f"{address}: {shown}", cure) if slow else ok("hub", f"{address}: {shown}")
    if token is not None and keys is None and is_denied(address, (KeyPair.of(token.secret), token.hub), STATUS_S):
        wrong = "the hub does not take the token: it was used, has expired or was revoked"
        return Reached([reached, fail("key", wrong, AGAIN)], None)
    if enrols and keys is None:
        return Reached([reached, warn("key", "not enrolled yet", "start the agent, which brings its key")], None)
    try:
        status = ask(address, STATUS_S, _pair(keys), StatusRequest())
    except AccessError:
        wrong = "the hub does not let this device in" if keys else "the hub talks to enrolled devices only"
        return Reached([reached, fail("key", wrong, ENROL)], None)
    except HubUnreachableError:
        cure = "check the port: is it an edgeasync hub? Then look at the hub's log"
        return Reached(
            [reached, fail("protocol", "something listens there and does not answer as a hub", cure)], None
        )
    except (ProtocolError, EdgeAsyncError) as error:
        return Reached([reached, told("protocol", error)], None)
    key = ok("key", "the hub lets this device's key in") if keys else ok("key", "none, nor has the hub any")
    protocol = ok("protocol", f"the hub answers, at version {status['version']} of its model")
    return Reached([reached, key, protocol], status)


def _pair(keys: DeviceKeys | None) -> Pair | None:
    return None if keys is None else (keys.own(), read_key(keys.hub().key))


def time_connect(address: str) -> float | None:
    """Return how long a connection over TCP takes, which is one round trip; `None` for an address that is a path.

    Raises `HubUnreachableError` with the reason, and `AddressError`.
    """
    host = host_of(address)
    if host is None:
        return None
    name, port = host.strip("[]"), int(address.rpartition(":")[2])
    try:
        ways = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise HubUnreachableError(
            f"{address}: the name is unknown ({reason}); check the address and DNS"
        ) from error
    wanted = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
    family, kind, protocol, _, place = next((way for way in ways if way[0] == wanted), ways[0])
    with socket.socket(family, kind, protocol) as connection:
        connection.settimeout(CONNECT_S)
        begun_s = time.perf_counter()
        try:
            connection.connect(place)
        except ConnectionRefusedError as error:
            raise HubUnreachableError(
                f"{address}: refused, nothing listens there; start the hub, or correct the address"
            ) from error
        except TimeoutError as error:
            raise HubUnreachableError(
                f"{address}: no answer; check the address, the firewall, and whether that machine is on"
            ) from error
        except OSError as error:
            raise HubUnreachableError(
                f"{address}: no way there ({error.strerror}); check this device's network"
            ) from error
        return time.perf_counter() - begun_s


def judge_bandwidth(status: Mapping[str, Any] | None, device_id: str) -> Finding:
    """Judge the link by what the hub has measured of this device."""
    rate = float(_device(status, device_id).get("bandwidth_bytes_per_s") or 0.0)
    if status is None or not rate:
        return ok("bandwidth", "not measured: the hub does that once the device trains")
    shown = f"{rate / 1e6:.3g} MB/s by the hub's measure"
    if rate < BANDWIDTH_SLOW:
        cure = 'set push = "top_k(0.1)+int8" in [codec] at the hub, or take a better link'
        return warn("bandwidth", shown, cure)
    return ok("bandwidth", shown)


def judge_traffic(
    status: Mapping[str, Any] | None, device_id: str, model_bytes: int, day_max: int | None
) -> Finding:
    """Estimate the bytes of an hour: by the device's past, or else as two models an exchange, one each way."""
    device = _device(status, device_id)
    updates, period_s = device.get("updates_applied", 0), device.get("period_s") or 0.0
    if updates and period_s:
        exchange, how = (device["bytes_up"] + device["bytes_down"]) / updates, "as so far"
    else:
        cadence = (status or {}).get("cadence") or {}
        parameters = int((status or {}).get("parameters") or 0)
        exchange, how = 2.0 * (4 * parameters or model_bytes), "at most, without a codec"
        period_s = float(cadence.get("period_s") or 0.0) or PERIOD_S
        how += "" if cadence.get("period_s") else f", at an exchange every {PERIOD_S:g} s"
    if not exchange:
        return ok("traffic", "not known before the model is")
    hour = exchange * 3600.0 / period_s
    shown = f"{hour / 1e6:.3g} MB an hour {how}"
    if day_max is not None and 24 * hour > day_max:
        cure = "nothing: the device rests for it; or raise bytes_per_day_max"
        return warn("traffic", f"{shown}, more than the {day_max / 1e6:.3g} MB of a day", cure)
    return ok("traffic", shown)


def _device(status: Mapping[str, Any] | None, device_id: str) -> Mapping[str, Any]:
    devices = (status or {}).get("devices") or ()
    return next((device for device in devices if device.get("id") == device_id), {})
