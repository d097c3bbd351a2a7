"""Checks whether the hub is reachable and authorizes this device, and how fast the link is."""

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
"""Assumed seconds between two exchanges until the hub reports the fleet's period."""

ENROL = (
    "run 'edgeasync keys enrol NAME' at the hub, then 'edgeasync agent --enrol TOKEN' here; if this device "
    "knocks, run only 'edgeasync keys accept' at the hub"
)

AGAIN = "run 'edgeasync keys enrol NAME' at the hub, then 'edgeasync agent --enrol TOKEN' here"


class Reached(NamedTuple):
    """The findings about a hub, and its status if it answered."""

    findings: list[Finding]
    status: Mapping[str, Any] | None


def examine_hub(
    addresses: tuple[str, ...], keys: DeviceKeys | None, *, token: Token | None, insecure: bool, knocks: bool
) -> Reached:
    """Check the hub at each address until one answers.

    `keys` are the keys of an enrolled device. A device that is not enrolled uses `token` to enrol,
    or asks the hub for admission if `knocks` is true.
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
    cure = "normal for a satellite link; otherwise check the network"
    reached = warn("hub", f"{address}: {shown}", cure) if slow else ok("hub", f"{address}: {shown}")
    if token is not None and keys is None and is_denied(address, (KeyPair.of(token.secret), token.hub), STATUS_S):
        wrong = "the hub rejected the token: it was used before, has expired or was revoked"
        return Reached([reached, fail("key", wrong, AGAIN)], None)
    if enrols and keys is None:
        return Reached(
            [reached, warn("key", "not enrolled yet", "start the agent, which enrols this device")], None
        )
    try:
        status = ask(address, STATUS_S, _pair(keys), StatusRequest())
    except AccessError:
        wrong = "the hub does not authorize this device's key" if keys else "the hub accepts enrolled devices only"
        return Reached([reached, fail("key", wrong, ENROL)], None)
    except HubUnreachableError:
        cure = "check that the port is that of an edgeasync hub, then read the hub's log"
        return Reached(
            [reached, fail("protocol", "a program listens there, but does not answer as a hub", cure)], None
        )
    except (ProtocolError, EdgeAsyncError) as error:
        return Reached([reached, told("protocol", error)], None)
    key = ok("key", "authorized by the hub") if keys else ok("key", "not used, by this device or the hub")
    protocol = ok("protocol", f"the hub answers, with model version {status['version']}")
    return Reached([reached, key, protocol], status)


def _pair(keys: DeviceKeys | None) -> Pair | None:
    return None if keys is None else (keys.own(), read_key(keys.hub().key))


def time_connect(address: str) -> float | None:
    """Return the seconds that it takes to open a TCP connection, which is one round trip.

    Returns `None` for an `ipc://` address.
    Raises `HubUnreachableError` with the reason, or `AddressError`.
    """
    host = host_of(address)
    if host is None:
        return None
    name, port = host.strip("[]"), int(address.rpartition(":")[2])
    try:
        ways = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise HubUnreachableError(f"{address}: unknown host name ({reason}); check the address and DNS") from error
    wanted = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
    family, kind, protocol, _, place = next((way for way in ways if way[0] == wanted), ways[0])
    with socket.socket(family, kind, protocol) as connection:
        connection.settimeout(CONNECT_S)
        begun_s = time.perf_counter()
        try:
            connection.connect(place)
        except ConnectionRefusedError as error:
            raise HubUnreachableError(
                f"{address}: connection refused, nothing listens there; start the hub, or correct the address"
            ) from error
        except TimeoutError as error:
            raise HubUnreachableError(
                f"{address}: no answer; check the address, the firewall, and whether the hub's machine is on"
            ) from error
        except OSError as error:
            raise HubUnreachableError(
                f"{address}: not reachable ({error.strerror}); check this device's network"
            ) from error
        return time.perf_counter() - begun_s


def judge_bandwidth(status: Mapping[str, Any] | None, device_id: str) -> Finding:
    """Judge the link by the bandwidth that the hub measured."""
    rate = float(_device(status, device_id).get("bandwidth_bytes_per_s") or 0.0)
    if status is None or not rate:
        return ok("bandwidth", "not measured: the hub measures it when the device trains")
    shown = f"{rate / 1e6:.3g} MB/s, as measured by the hub"
    if rate < BANDWIDTH_SLOW:
        cure = 'set push = "top_k(0.1)+int8" in [codec] at the hub, or use a faster link'
        return warn("bandwidth", shown, cure)
    return ok("bandwidth", shown)


def judge_traffic(
    status: Mapping[str, Any] | None, device_id: str, model_bytes: int, day_max: int | None
) -> Finding:
    """Estimate the hourly traffic from the device's traffic so far.

    For a device without traffic, assume that each exchange transfers two uncompressed models.
    """
    device = _device(status, device_id)
    updates, period_s = device.get("updates_applied", 0), device.get("period_s") or 0.0
    if updates and period_s:
        exchange, how = (device["bytes_up"] + device["bytes_down"]) / updates, "on average so far"
    else:
        cadence = (status or {}).get("cadence") or {}
        parameters = int((status or {}).get("parameters") or 0)
        exchange, how = 2.0 * (4 * parameters or model_bytes), "at most, without a codec"
        period_s = float(cadence.get("period_s") or 0.0) or PERIOD_S
        how += "" if cadence.get("period_s") else f", with an exchange every {PERIOD_S:g} s"
    if not exchange:
        return ok("traffic", "unknown until the model is known")
    hour = exchange * 3600.0 / period_s
    shown = f"{hour / 1e6:.3g} MB per hour {how}"
    if day_max is not None and 24 * hour > day_max:
        cure = "nothing to do: the device pauses when it reaches the quota; to avoid this, raise bytes_per_day_max"
        return warn("traffic", f"{shown}, above the daily quota of {day_max / 1e6:.3g} MB", cure)
    return ok("traffic", shown)


def _device(status: Mapping[str, Any] | None, device_id: str) -> Mapping[str, Any]:
    devices = (status or {}).get("devices") or ()
    return next((device for device in devices if device.get("id") == device_id), {})
