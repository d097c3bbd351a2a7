"""Recovers a hub's state from its log, because the core is deterministic.

Folds use the scalars from the log, so the resulting model is bit-identical on any machine.
"""

from collections.abc import Callable

import msgspec

from edgeasync.core.arrays.hub_model import HubModel, WaitingUpdate
from edgeasync.core.arrays.model_executor import ModelExecutor
from edgeasync.core.arrays.published_model import Publisher
from edgeasync.core.hub.digests import digest
from edgeasync.core.hub.effects import Discard, Fold, HubEffect, Keep, Publish, Restore
from edgeasync.core.hub.events import HubReceived, HubStopRequested, PushArrived
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.recovery.decisions import check_decisions
from edgeasync.core.recovery.log import REMEDY, Entry, FoldScalars, event_of
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.policies.guards import plugins_of
from edgeasync.protocol.wire import Buffer


class Sessions:
    """Draws session tokens and returns their digests.

    In a replay, returns a digest from the log.
    """

    def __init__(self, draw: Callable[[], bytes]) -> None:
        self.repeated: bytes | None = None
        self._draw = draw
        self._token = b""

    def __call__(self) -> bytes:
        """Return the digest of the next session token."""
        if self.repeated is not None:
            return self.repeated
        self._token = self._draw()
        return digest(self._token)

    def token(self, session: bytes) -> bytes:
        """Return the token that was drawn last; `session` is its digest."""
        assert digest(self._token) == session
        return self._token


class Replay:
    """Passes the entries of a log to a hub's core, and applies the effects to the model.

    It sends no messages. `apply` raises `StorageError` if an entry does not result in the recorded
    version. In that case, another version of edgeasync wrote it, or the settings have changed.
    `apply` raises `PluginError` if a plugin decides differently.
    """

    def __init__(self, core: HubCore, model: HubModel, publisher: Publisher, sessions: Sessions) -> None:
        self.core = core
        self.model = model
        self.publisher = publisher
        self.now_s = 0.0
        self._executor = ModelExecutor(model, publisher)
        self._sessions = sessions
        self._plugins = plugins_of(core.policy_engine.policy)

    def apply(self, number: int, entry: Entry, payload: Buffer) -> list[HubEffect]:
        """Replay an entry with its payload; return the core's effects."""
        event = event_of(entry)
        if isinstance(event, PushArrived):
            self._hold(number, event, payload)
        self.now_s = entry.now_s
        self._sessions.repeated = entry.session if isinstance(event, HubReceived) else None
        effects = self.core.handle(event, entry.now_s)
        self._sessions.repeated = None
        folds = [effect for effect in effects if isinstance(effect, Fold)]
        check_decisions(self._plugins, number, self.core.version, folds, entry)
        if self.core.version != entry.version or len(folds) != len(entry.folds):
            raise StorageError(
                f"replaying entry {number} of the journal produced version {self.core.version}, but the run had "
                f"version {entry.version}; "
                f"{REMEDY}"
            )
        self._follow(effects, list(entry.folds))
        return effects

    def fold_all(self, now_s: float) -> None:
        """Fold the buffered updates into a last version, as if the hub had been asked to stop."""
        effects = self.core.handle(HubStopRequested(), now_s)
        self._follow(effects, [FoldScalars(e.weights, e.plan, e.scale) for e in effects if isinstance(e, Fold)])

    def _hold(self, number: int, event: PushArrived, payload: Buffer) -> None:
        """Buffer an update under its recorded handle. Updates that were refused have no payload."""
        if not len(payload):
            return
        codec = self.model.codecs.make(event.push.codec)
        try:
            self.model.hold(event.handle, WaitingUpdate(codec.open(payload), codec.name, payload))
        except ProtocolError as error:
            raise StorageError(f"entry {number} of the journal contains an invalid update: {error}") from error

    def _follow(self, effects: list[HubEffect], folds: list[FoldScalars]) -> None:
        """Apply effects to the model; for folds, use the scalars from the log."""
        for effect in effects:
            match effect:
                case Fold():
                    scalars = folds.pop(0)
                    fold = msgspec.structs.replace(
                        effect, weights=scalars.weights, plan=scalars.plan, scale=scalars.scale, measure=False
                    )
                    self._executor.apply(fold)
                case Publish() | Keep() | Restore():
                    self._executor.apply(effect)
                case Discard() if self.model.holds(effect.handle):
                    self.model.release(effect.handle)
