"""`join` without a hub: a user's training loop averages its model with other devices."""

import concurrent.futures
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from edgeasync.config import convert, expanded
from edgeasync.core.peer.effects import PeerReport
from edgeasync.durable.identity import DeviceFolder, default_device_id
from edgeasync.errors import ConfigError
from edgeasync.parameters import ParameterSpec
from edgeasync.runtime.device_settings import DeviceSection
from edgeasync.runtime.peer import PeerModel, PeerRuntime
from edgeasync.runtime.peer_device import make_peer
from edgeasync.runtime.peer_settings import PeerSection, PeerSettings
from edgeasync.sdk.lockstep import Lockstep
from edgeasync.sdk.participants import Participant
from edgeasync.sdk.user_loop import ENDING_S, UserLoop

LOG = logging.getLogger("edgeasync.join")

Found = TypeVar("Found")

_OF_A_DEVICE = (*DeviceSection.__struct_fields__, "steps_max", "epochs", "rounds_max", "out")
"""Keys of `[peer]` that are arguments of `join`, or do not apply because the user's loop trains."""


class JoinedPeers(UserLoop):
    """A session that averages your loop's model with other devices; created by `join`.

    The session begins once all devices in the file `peers` are connected, but at the latest after
    the duration of a lease. At the end of the `with` block, it waits for one more round, as a
    `Peer` does, and loads that round's mean into the model.
    """

    def __init__(
        self, section: PeerSection, participant: Participant, *, keep_optimizer_state: bool | None
    ) -> None:
        super().__init__(participant, keep_optimizer_state=keep_optimizer_state)
        if section.state is None:
            raise ConfigError("join without a hub needs state: the folder of this device's key and model")
        self._section = section
        self._folder = DeviceFolder(expanded(section.state))
        self._trainer = Lockstep(ParameterSpec(tuple(participant.parameters)), participant, each_step=True)
        self._initial = np.zeros(self._trainer.spec.length, np.float32)
        participant.read(self._trainer.spec.views(self._initial))
        self._peer: PeerRuntime | None = None

    @property
    def _is_connected(self) -> bool:
        return self._peer is not None and self._peer.connected

    @property
    def _lockstep(self) -> Lockstep:
        return self._trainer

    def note(self, loss: float | None = None, examples: int = 0, *, score: float | None = None) -> None:
        """Set the mean loss and number of examples of the next step, if the optimizer is watched."""
        if score is not None:
            raise ConfigError("score requires a hub: without a hub, all models have the same weight; remove score")
        super().note(loss, examples)

    def evaluate(self, function: Callable[[], Found]) -> Found:
        """Call `function` with the loop's own model, since there is no hub's model."""
        return function()

    def abort(self) -> None:
        """Raise `ConfigError`, because a session without a hub cannot be interrupted."""
        raise ConfigError("abort requires a hub: without one, end the session, and call join again later")

    def resume(self) -> None:
        """Do nothing, since `abort` is not available."""

    def _await_ready(self) -> None:
        """Wait until the other devices are connected, at most for the duration of a lease."""
        super()._await_ready()
        lockstep = self._trainer
        lockstep.await_turn()
        if self.finished:
            self._done.result(ENDING_S)
        lockstep.take_model()
        assert self._peer is not None
        self._loop_state.steps = self._peer.steps_total
        self._detach = self._participant.attach(self.step)
        self._is_begun = True

    def _send_last_steps(self) -> None:
        self._trainer.end()
        concurrent.futures.wait([self._done])
        self._take_model(self._trainer)

    def _take_model(self, lockstep: Lockstep) -> bool:
        taken = super()._take_model(lockstep)
        self.version = self.exchanges or None
        return taken

    async def _serve(self) -> str:
        identity = self._folder.open(self._section.device_id or default_device_id())
        try:
            self._peer = make_peer(
                PeerSettings(peer=self._section),
                identity,
                PeerModel(self._trainer, self._initial, frozen=self._participant.frozen),
                meets=True,
                on_report=self._report,
            )
            if self._stopping:
                self._peer.request_stop()
            self._note_ready()
            async with self._warning_when_alone():
                return await self._peer.run()
        finally:
            self._trainer.interrupt()
            self._folder.close()

    def _report(self, report: PeerReport) -> None:
        level = logging.WARNING if report.event in ("warning", "refused") else logging.INFO
        detail = ": ".join(filter(None, (report.peer, report.detail)))
        if level == logging.WARNING:
            self._trouble = detail
        LOG.log(level, "%s: %s", report.event, detail)

    def _request_stop(self) -> None:
        self._trainer.interrupt()  # otherwise peers wait for this device's next step
        if self._peer is not None:
            self._peer.request_stop()


def joined_section(
    said: Mapping[str, object], unfit: Mapping[str, object], settings: Mapping[str, Any]
) -> PeerSection:
    """Build the `[peer]` section of a session from its arguments and other keys.

    Raises `ConfigError` for invalid values, and if any of the arguments in `unfit` is set.
    """
    for name, value in unfit.items():
        if value:
            raise ConfigError(f"{name} requires a hub; remove it, or remove topology")
    if unkept := sorted({*_OF_A_DEVICE} & settings.keys()):
        raise ConfigError(
            f"{unkept[0]} is an argument of edgeasync.Peer only; remove it, and let your loop decide how it "
            "trains and when it ends"
        )
    if said["peers"] is None:
        raise ConfigError("join without a hub needs the file that lists the peers: pass peers='peers.toml'")
    return convert({**settings, **said}, PeerSection, where="join")
