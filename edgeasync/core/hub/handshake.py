"""The hub's handshake: check a `Hello`, build a `Welcome`. Part of `HubCore`."""

from typing import Any

from edgeasync.core.hub.frozen_arrays import FrozenArrays
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.refusal import RefusalError
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.parameters import ParameterSpec
from edgeasync.policies.policy import PolicySet
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import Hello, Welcome


class Handshake:
    """Checks a device's `Hello`, and builds its `Welcome`."""

    def __init__(
        self,
        spec: ParameterSpec,
        training: dict[str, Any],
        settings: HubCoreSettings,
        frozen_arrays: FrozenArrays,
        *,
        graph: ShippedGraph | None,
        policy: PolicySet,
    ) -> None:
        self._spec = spec
        self._training = training
        self._settings = settings
        self.frozen_arrays = frozen_arrays
        self._graph = graph
        self._policy = policy

    def check(self, hello: Hello) -> None:
        """Raise `RefusalError` for a device with another model or other frozen arrays."""
        if hello.fingerprint is not None and hello.fingerprint != self._spec.fingerprint:
            raise RefusalError(
                "model_mismatch",
                f"the device's model {hello.fingerprint[:8]} differs from the hub's {self._spec.fingerprint[:8]}: "
                "use the same parameter names and shapes on both, or start the agent without a model or with "
                "the hub's [model] settings",
            )
        if self.frozen_arrays.refuses and (difference := self.frozen_arrays.difference(hello)):
            raise RefusalError(
                "model_mismatch",
                f"{difference}: load the same base model on all devices, keep target networks and averages of "
                "weights outside the module that joins, or admit the device with frozen = 'warn' in the hub's "
                "[hub] settings or Hub(frozen='warn') in Python",
            )

    def welcome(self, member: Member) -> Welcome:
        """Return the `Welcome` for a member: what to train, and how to communicate."""
        settings, graph = self._settings, self._graph
        base = None if graph is None or graph.base is None else graph.base.file
        return Welcome(
            session=member.session,
            spec=self._spec,
            settings=self._training,
            seq_last=member.seq_last,
            push_codec=member.codec_push,
            heartbeat_s=settings.liveness.heartbeat_s,
            lease_s=settings.liveness.lease_s,
            piece_bytes=int(settings.limits.piece_bytes),
            graph=None if graph is None else graph.fingerprint,
            graph_bytes=0 if graph is None else len(graph.payload),
            update=self._policy.aggregate.update,
            error_feedback=settings.codec.error_feedback,
            residual_decay=settings.codec.residual_decay,
            overlap_steps_max=max(self._policy.overlap_steps_max, self._policy.delay_steps),
            checksum_last=member.checksum_last or 0,
            delay_steps=self._policy.delay_steps,
            base=None if base is None else base.fingerprint,
            base_bytes=0 if base is None else base.nbytes,
        )
