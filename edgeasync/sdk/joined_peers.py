"""`join` without a hub: a loop of the user's own averages its model with those of other devices."""

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
"""Keys of `[peer]` that say how a device trains, when it ends, and what it does then."""


class JoinedPeers(UserLoop):
    """Averages the model of a loop of your own with those of other devices; `join` makes one.

    It begins once all others of the file are there, or after a lease. At the end of `with` it waits for one more
    round, as a `Peer` does, and the model has that round's mean.
    """

    def __init__(
        self, section: PeerSection, participant: Participant, *, keep_optimizer_state: bool | None
    ) -> None:
        super().__init__(participant, keep_optimizer_state=keep_optimizer_state)
        if section.state is None:
            raise ConfigError("without a hub a loop needs state: a folder for its key and its model")
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
        """Say what the next step's mean loss and its number of examples are, where the optimizer is watched."""
        if score is not None:
            raise ConfigError("score is for a hub's policies: without a hub all models count the same")
        super().note(loss, examples)

    def evaluate(self, function: Callable[[], Found]) -> Found:
        """Call a function: without a hub there is no other model than the loop's own."""
        return function()

    def abort(self) -> None:
        """Raise `ConfigError`: without a hub a loop leaves at the end of its session."""
        raise ConfigError("without a hub there is no abort: end the session, and call join again to return")

    def resume(self) -> None:
        """Do nothing: there is no `abort`."""

    def _await_ready(self) -> None:
        """Wait for the others, too, for a lease at most."""
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
        self._trainer.interrupt()  # others may wait for what this device does between two steps
        if self._peer is not None:
            self._peer.request_stop()


def joined_section(
    said: Mapping[str, object], unfit: Mapping[str, object], settings: Mapping[str, Any]
) -> PeerSection:
    """Return how a loop averages without a hub: keys of `[peer]` that its arguments say, and other keys of it.

    Raises `ConfigError`, also if an `unfit` argument is given.
    """
    for name, value in unfit.items():
        if value:
            raise ConfigError(f"{name} is for a loop with a hub; leave it out, or leave out topology")
    if unkept := sorted({*_OF_A_DEVICE} & settings.keys()):
        raise ConfigError(f"{unkept[0]} is for edgeasync.Peer: a loop of your own trains and ends as you write it")
    if said["peers"] is None:
        raise ConfigError("which peers? give peers='peers.toml', a file that names them")
    return convert({**settings, **said}, PeerSection, where="join")
