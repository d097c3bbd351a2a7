"""A device's handshake: its `Hello`, timeouts, and the refusal of a `Welcome`."""

import msgspec

from edgeasync.core.device.data_quota import DataQuota
from edgeasync.core.device.effects import EndAgent
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.errors import GraphError, ModelMismatchError
from edgeasync.parameters import PARAMETERS_MAX
from edgeasync.protocol.messages import Hello, Welcome
from edgeasync.protocol.transfers import PIECE_BYTES_MIN

CONNECT_S = 3.0
"""Timeout in seconds for a connection to the hub's machine."""

WELCOME_S = 3.0
"""Minimum timeout in seconds for the `Welcome` after the connection is established."""

WELCOME_ROUND_TRIPS = 8
"""The timeout on a slow link, in round trips. A handshake takes four round trips, and six if keys
are used.
"""


class Greeting:
    """The device's `Hello`, which is completed for every connection."""

    def __init__(self, hello: Hello, limits: DeviceLimits) -> None:
        own = {"local_steps_max": limits.local_steps_max or 0, "delay_steps": limits.delay_steps or 0}
        self.own = msgspec.structs.replace(hello, profile=msgspec.structs.replace(hello.profile, **own))

    def hello(self, welcome: Welcome | None, seq_answered: int, data_quota: DataQuota, now_s: float) -> Hello:
        """Return the hello to send now, after the last `welcome` that was received."""
        session = None if welcome is None else welcome.session
        hello = msgspec.structs.replace(self.own, session=session, seq_answered=seq_answered)
        if (left_bytes := data_quota.left_bytes(now_s)) is None:
            return hello
        profile = msgspec.structs.replace(
            hello.profile,
            bytes_per_day_max=data_quota.bytes_per_day_max,
            day_left_bytes=left_bytes,
            day_remaining_s=data_quota.ends_s(now_s) - now_s,
        )
        # The quota reserves one piece for a model that the hub sends unrequested.
        return msgspec.structs.replace(hello, profile=profile, piece_bytes_max=PIECE_BYTES_MIN)


class DeviceHandshake:
    """The state of the handshake on the current or the last connection."""

    def __init__(self, now_s: float) -> None:
        self.answered = False
        """Whether the hub has sent anything on this connection."""
        self.unreadable = ""
        """The reason why the answer to the `Hello` could not be decoded."""
        self.ends_s = now_s + CONNECT_S
        """The time at which the handshake times out."""
        self._begun_s = now_s

    def connected(self, now_s: float) -> None:
        """Set the timeout for the answer, based on the round trip of the connection."""
        self.ends_s = now_s + max(WELCOME_S, WELCOME_ROUND_TRIPS * (now_s - self._begun_s))


def refuse_welcome(welcome: Welcome, before: Welcome | None, limits: DeviceLimits) -> EndAgent | None:
    """Return the effect that ends a device if it cannot train the hub's model, or `None`.

    `before` is the welcome of an earlier hub. If the model has changed or the graph is too large,
    waiting would not help, so the device ends.
    """
    if before is not None and _model_of(before) != _model_of(welcome):
        return _refuse_model("the hub now trains another model than before; restart the agent")
    parameters_max = limits.parameters_max or PARAMETERS_MAX
    if welcome.spec.length > parameters_max:
        return _refuse_model(
            f"the hub's model has {welcome.spec.length} values, but this device accepts {parameters_max}; raise "
            "[limits] parameters_max if its memory is large enough for four such arrays"
        )
    if welcome.graph is not None and not 0 < welcome.graph_bytes <= limits.graph_bytes_max:
        return refuse_graph(
            f"the hub's graph has {welcome.graph_bytes} bytes, but this device accepts {limits.graph_bytes_max}; "
            "raise [limits] graph_bytes_max if you trust the hub"
        )
    if welcome.base is not None and not 0 < welcome.base_bytes <= limits.base_cache_bytes_max:
        return refuse_graph(
            f"the hub's base has {welcome.base_bytes} bytes, but this device's cache accepts "
            f"{limits.base_cache_bytes_max}; raise [limits] base_cache_bytes_max if the disk is large enough"
        )
    return None


def _model_of(welcome: Welcome) -> tuple[object, ...]:
    return welcome.spec, welcome.graph, welcome.base, welcome.base_bytes


def refuse_graph(sentence: str) -> EndAgent:
    """Return the effect that ends a device whose hub sent a graph that cannot be trusted."""
    return EndAgent("graph refused", GraphError(sentence))


def _refuse_model(sentence: str) -> EndAgent:
    return EndAgent("model mismatch", ModelMismatchError(sentence))
