"""Selects codecs for each device by the handshake and the link. Part of `HubCore`."""

from collections.abc import Collection

from edgeasync.core.hub.member import Member
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.policies.codec_choice import FAST, LADDER, MODEL_LADDER, TINY_BYTES, Rung, choose_codec
from edgeasync.policies.policy import PolicySet
from edgeasync.protocol.codecs import stages_of

COARSE = "int8"
"""The codec for sending a whole model at lower precision.

Later deltas in the same codec correct the error.
"""

ASKED_MIN = 2
ASKED_AGAIN_MIN = 32
"""How many times in a row another codec must be better before the hub changes to it: `ASKED_MIN`
times for the first change, `ASKED_AGAIN_MIN` times for later changes.
"""


class CodecAgreement:
    """Selects the codecs of each device.

    A codec that the device does not support is replaced by `identity`. `metered` is true if the hub
    has daily quotas, so that bytes matter even on a fast link.
    """

    def __init__(self, settings: CodecSettings, policy: PolicySet, values: int, *, metered: bool = False) -> None:
        self._settings = settings
        self._values = values
        self._tiny = 4 * values <= TINY_BYTES
        self._metered = metered
        self._ladder: tuple[Rung, ...] = ()
        if settings.push == "auto":
            self._ladder = MODEL_LADDER if policy.aggregate.update == "model" else LADDER
        # A delta update is relative to the device's own model, so the coarse model's error cancels
        # out. An update that is a whole model would contain that error.
        # With another delta codec, the first model must be exact: the deltas drop too much to
        # correct a coarse one, or are so short that following the chain saves more.
        leads_on = settings.delta != "off" and stages_of(settings.delta) <= {COARSE, "zstd"}
        self._coarse = leads_on and policy.aggregate.update == "delta"
        self._wanted = [rung.codec for rung in self._ladder] or [settings.push]

    def greet(self, member: Member, stages: Collection[str]) -> None:
        """Set the codecs of a device in both directions, based on the stages that it supports."""
        known, settings = set(stages), self._settings
        member.codecs_push = tuple([name for name in self._wanted if stages_of(name) <= known])
        member.codec_model = settings.model if stages_of(settings.model) <= known else "identity"
        member.follows = settings.delta != "off" and stages_of(settings.delta) | stages_of(settings.model) <= known
        member.coarse = self._coarse and member.follows
        self.begin(member)

    def begin(self, member: Member) -> None:
        """Set the codec of a device's updates.

        If the setting is `auto`, keep the previous codec, or start with the most precise codec that
        the device supports.
        """
        if self.sends_plain(member):
            member.codec_push = FAST
        elif member.codec_push == "identity" or member.codec_push not in member.codecs_push:
            known = () if self._tiny and self._ladder else member.codecs_push
            member.codec_push = known[0] if known else "identity"
            member.codec_asked, member.codec_changed = 0, False

    def sends_plain(self, member: Member) -> bool:
        """Return whether the hub and the device exchange plain values, without compression.

        The hub then sends the whole newest model, and the device encodes its updates as `FAST`.
        This is the case if the codec is selected by the link, the link is fast, and bytes are not
        metered. It depends only on durable state.
        """
        return bool(self._ladder) and member.fast_link.is_fast and not self._metered and member.own_day is None

    def choose(self, member: Member) -> str | None:
        """Select the codec of a device's next updates by its link.

        Return `None` if the codec is fixed.
        """
        if not self._ladder:
            return None
        if self.sends_plain(member):
            member.codec_push = FAST
            return FAST
        if member.codec_push not in member.codecs_push:
            self.begin(member)
        if self._tiny:
            return member.codec_push
        link = member.link
        wanted = choose_codec(
            self._ladder,
            member.codec_push,
            values=self._values,
            known=member.codecs_push,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s if link.is_sure else 0.0,
            step_s=member.measurements.step_s,
            round_trip_s=link.round_trip_s,
        )
        member.codec_asked = 0 if wanted == member.codec_push else member.codec_asked + 1
        if member.codec_asked >= (ASKED_AGAIN_MIN if member.codec_changed else ASKED_MIN):
            member.codec_push, member.codec_asked, member.codec_changed = wanted, 0, True
        return member.codec_push
