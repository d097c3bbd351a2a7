"""The hub's shell, with a ROUTER socket on an event loop, the run's folder, and worker threads."""

import contextlib
import secrets
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from edgeasync.config import expanded
from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.engine.clock import OffsetClock
from edgeasync.core.engine.hub_engine import HubEngine, Observe
from edgeasync.core.engine.sender import ANYBODY, Sender
from edgeasync.core.hub.effects import HubReport
from edgeasync.core.hub.events import Evaluated, Peer
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.recovery.state import HubState, capture
from edgeasync.durable.allow_list import Key
from edgeasync.durable.commit import GroupCommit
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.files import FolderLock
from edgeasync.durable.history_writer import observing
from edgeasync.durable.keys import HubKeys
from edgeasync.durable.recovery import Rules
from edgeasync.durable.run import HubRun
from edgeasync.errors import EdgeAsyncError, PluginError, StorageError
from edgeasync.host.completion import Completion
from edgeasync.net.hub_listener import HubListener, ListenerSettings
from edgeasync.net.network import ZmqNetwork
from edgeasync.parameters import Vector
from edgeasync.plugins import refuse_modules_in
from edgeasync.protocol import wire
from edgeasync.runtime.deadline_timer import DeadlineTimer
from edgeasync.runtime.hosted_model import HostedModel
from edgeasync.runtime.hub_description import HubDescription
from edgeasync.runtime.hub_evaluation import HubEvaluation
from edgeasync.runtime.hub_feed import FeedSource, HubFeed
from edgeasync.runtime.hub_files import HubFiles
from edgeasync.runtime.hub_opening import HubOpening
from edgeasync.runtime.hub_settings import MANY_NAMES, RunSettings
from edgeasync.runtime.hub_threads import CLOSE_S, HubThreads
from edgeasync.runtime.local_orders import LocalOrders
from edgeasync.runtime.memory import Part, most_memory
from edgeasync.training.evaluation import Evaluator
from edgeasync.training.float16_casts import Float16Casts

OnReport = Callable[[HubReport], None]
Result = TypeVar("Result")


class HubRuntime:
    """Serves the model, and trains it with the devices that join.

    Call `run` once. It serves until the stop condition is met or `request_stop` is called.

    - If the folder `[hub] run` already contains a run, the hub resumes it. The hub stores in this
      folder the training graph, its forward model and `record`, which contains the settings.
    - `evaluator` maps a parameter vector to an `EvaluationResult`. `[evaluation] every` sets how
      often it is called.
    - If `trust_code` is true, the hub also imports plugins that are named only in the run's folder.
    - `recordable` is `False` for a run that is never resumed. Its policy may then contain plugins
      without a name.
    - `on_best` is called with each new best version and its evaluation, before the version is
      written.
    - `observe` is called with every event that the core has handled, and the event's effects.

    `on_report`, `on_best` and `observe` are called on the event loop. The constructor raises
    `ConfigError` if the stop condition requires an evaluator and `evaluator` is missing. `run`
    raises `AddressError` if it cannot bind the address, and `StorageError` or `ModelMismatchError`
    if it cannot use the run's folder. It also raises the exceptions that `initial`, `evaluator` and
    `on_report` raise. A `StopIteration`, or an exception that is not an `Exception`, is replaced
    with an `EdgeAsyncError`.
    """

    def __init__(
        self,
        settings: RunSettings,
        model: HostedModel,
        *,
        evaluator: Evaluator | None = None,
        record: bytes | None = None,
        recordable: bool = True,
        trust_code: bool = False,
        on_report: OnReport | None = None,
        on_best: Callable[[Snapshot, Evaluated], None] | None = None,
        observe: Observe | None = None,
        network: ZmqNetwork | None = None,
    ) -> None:
        run = expanded(settings.hub.run)
        refuse_modules_in(run)
        model.check(settings, evaluator)
        self.spec = model.spec
        """The arrays of the model."""
        self._settings, self._observe = settings, observe
        self._on_report, self._on_best = on_report or (lambda _: None), on_best or (lambda *_: None)
        self._ending = Completion("Hub")
        self._opened = False
        self._asked: Literal["", "stopping", "finished"] = ""
        keys = None if settings.hub.keys is None else HubKeys(expanded(settings.hub.keys))
        limits, lease_s = settings.limits, settings.liveness.lease_s
        listening = ListenerSettings(limits=limits, lease_s=lease_s, knocking=settings.hub.knocking)
        self._network = HubListener(settings.hub.bind, listening, keys, network)
        folder = FolderLock(run, "run (--run)")
        core = settings.core_settings(held_out=evaluator is not None, frozen_arrays=model.frozen)
        self._run = HubRun(
            FolderDisk(run, folder.check),
            Rules(model.spec, settings.policy, core, model.graph is not None, recordable),
            history_rows_max=settings.hub.history_rows_max,
            trust_code=trust_code,
            float16=Float16Casts().stage,
        )
        self._threads = HubThreads(self._ending)
        self._files = HubFiles(folder, self._run, self.spec, self._threads, report=self.report)
        self._opening = HubOpening(
            settings, model, self._run, self._files, self._threads,
            record=record, report=self.report, is_stopping=lambda: bool(self._asked),
        )  # fmt: skip
        make_evaluation = partial(HubEvaluation, needs_accuracy=settings.hub.stop.accuracy is not None)
        self._evaluation = None if evaluator is None else make_evaluation(evaluator, self._threads)
        self._log: GroupCommit | None = None
        self._description = HubDescription(self._network, self._files, settings.hub.durability, self.spec.length)
        self._timer = DeadlineTimer(self._tick)

    @property
    def model_file(self) -> Path:
        """The file of the latest saved model, which `load_model` can read."""
        return self._files.model

    @property
    def best_file(self) -> Path:
        """The file of the best version, judged by the evaluator or, without one, by the devices' losses."""
        return self._files.best

    @property
    def recovered(self) -> bool:
        """Whether the hub has read the run's folder. `core` is available only afterwards."""
        return self._opened

    @property
    def core(self) -> HubCore:
        """The hub's core; raises `EdgeAsyncError` until `recovered` is true."""
        if not self._opened:
            raise EdgeAsyncError("the hub has no core until it has read its run's folder; check `recovered` first")
        return self._engine.core

    @cached_property
    def feed(self) -> HubFeed:
        """What viewers of the fleet see; raises `EdgeAsyncError` until `recovered` is true."""
        assert self.core is not None
        return HubFeed(self._engine, FeedSource(self._now_s, self.after, self.describe, self._network.keys))

    @cached_property
    def orders(self) -> LocalOrders:
        """Orders from this process. Use it on the event loop."""
        return LocalOrders(self.receive)

    @property
    def address(self) -> str:
        """The address on which the hub listens, with its actual port while it runs."""
        return self._network.address

    @property
    def current(self) -> Vector:
        """The latest version of the model, as an immutable vector. Read it on the event loop."""
        return self._engine.model.current.vector

    def ask_status(self, tell: Callable[[dict[str, Any]], None]) -> None:
        """Call `tell` on the event loop with the status, once the status is durable."""
        self._engine.status_answers.ask(lambda text: tell(msgspec.json.decode(text)), ANYBODY, self._now_s())

    @property
    def status_shown(self) -> dict[str, Any]:
        """The latest status that is durable. Read it on the event loop."""
        status: dict[str, Any] = msgspec.json.decode(self._engine.status_answers.shown)
        return status

    def show(self, action: Callable[[], None]) -> None:
        """Call `action` on the event loop once all decisions so far are durable."""
        self._engine.outbox.show(action)

    def most_memory(self) -> list[Part]:
        """Return the parts that this hub's maximum memory consists of. Call it before `run`."""
        return most_memory(self.spec, self._settings, evaluated=self._evaluation is not None)

    def last_events(self) -> list[str]:
        """Return one line for each recent event and effect of the core, without secrets."""
        return self._engine.recorder.lines() if self._opened else []

    async def run(self) -> str:
        """Serve until training has finished or a stop is requested; return the reason.

        If its task is cancelled, the hub stops as after `request_stop`. A second cancellation ends
        it at once. Raises `EdgeAsyncError` if `run` was called before.
        """
        self._ending.begin()
        if self._asked:
            return "stopping"
        self._threads.begin()
        self._files.folder.take("another hub is using this folder; choose another folder for run (--run)")
        try:
            await self._opening.open(self.request_stop)
            self._engine = self._make_engine()
            self._files.version_saved = self._run.core.version
            self._opened = True
            return await self._serve()
        except PluginError:
            if self._opened:
                with contextlib.suppress(OSError, StorageError):
                    self._files.save_model(self._engine.model.current, self.core.lineage)  # the last good version
            raise
        finally:
            self._files.folder.close()

    def _make_engine(self) -> HubEngine:
        run = self._run
        # The core's clock does not advance while the hub is down.
        self._now_s = OffsetClock(time.monotonic, run.now_s)
        if self._settings.hub.durability == "journal":
            self._log = GroupCommit(run.journal, self, on_durable=self._on_durable, on_failing=self._on_failing)
        return HubEngine(
            run.core,
            run.model,
            self,
            sessions=run.sessions,
            publisher=run.publisher,
            log=self._log,
            observe=observing(run.history, run.core, self._log, self, self._observe),
        )

    async def _serve(self) -> str:
        self._network.listen(self)
        self._threads.start()
        try:
            self.report(HubReport("listening", detail=self.address))
            if self._settings.policy.trust == "open" and self._settings.hub.keys is None:
                self.report(HubReport("warning", detail=MANY_NAMES))
            self._resume()
            if self._settings.hub.keys is not None:
                keyed = [member for member in self.core.members.members.values() if member.key]
                self.on_revoked({one.key for one in keyed if not self._network.gives(one.key, one.device_id)})
                self._network.admit()
            if self._asked:
                self.request_stop(finished=self._asked == "finished")
            self._schedule_tick()
            return await self._ending.wait(self.request_stop, CLOSE_S)
        finally:
            await self._close()

    def request_stop(self, *, finished: bool = False) -> None:
        """Send the devices a goodbye, save the model, and let `run` return; call it on the event loop.

        If `finished` is true, training has finished, and the agents on the devices end, too.
        Otherwise, they wait until this hub restarts. If `run` is called later, it returns at once.
        After `run` has returned, this method does nothing.
        """
        self._asked = "finished" if finished or self._asked == "finished" else "stopping"
        if self._opened and not self._ending.reached:
            self._engine.request_stop(self._now_s(), finished=finished)

    def _resume(self) -> None:
        """Report what was recovered, and resume the run in a new lineage."""
        run = self._run
        for remark in (*self._files.folder.remarks, *run.remarks):
            self.report(HubReport("warning", detail=remark))
        if run.checkpoint:
            detail = f"version {run.core.version}, from {run.checkpoint} and {run.entries} journal entries"
            self.report(HubReport("resumed", detail=detail))
            self._engine.status_answers.learning_curve.load(run.past, run.now_s)
            self._engine.resume(secrets.token_hex(8), self._now_s())
        elif run.core.version:
            self.report(HubReport("resumed", detail=f"version {run.core.version}, from {self.model_file} only"))

    async def _close(self) -> None:
        """Finish pending work; raises `StorageError` if the last model could not be written."""
        self._timer.cancel()
        self.feed.close()
        try:
            await self._threads.close("fold")
            if self._log is not None:
                self._log.close()
            await self._files.close()
        finally:
            self._threads.abandon()
            self._network.close()
        if self._files.unsaved is not None:
            raise self._files.unsaved

    def abandon(self) -> None:
        """Write a last checkpoint if the event loop was closed during the run and there is no journal."""
        if not self._opened or self._log is not None or self._ending.reached:
            return
        core, model = self.core, self._engine.model
        if model.current.number != core.version:
            return  # a fold was in progress
        state = capture(core, model, self._run.publisher, None, self._now_s())
        try:
            self._files.save_now(state)
        except (OSError, StorageError) as error:
            self.warn(f"cannot write the last checkpoint: {error}")

    def _schedule_tick(self) -> None:
        self._timer.set(self._engine.next_deadline_s(), self._now_s)

    def _tick(self) -> None:
        self._threads.guard(lambda: self._engine.tick(self._now_s()))
        if not self._ending.reached:
            self._schedule_tick()

    # -- interface for the network ----------------------------------------------------------------------------

    def allows(self, who: Key | Peer, header_bytes: int) -> bool:
        """Return whether a key, or a connection without a key, may send another message now."""
        return self._engine.bounds.allows(who, self._now_s(), header_bytes)

    def receive(self, peer: Peer, header: bytes, payload: wire.Buffer | None, sender: Sender) -> None:
        """Handle a message that was received from a connection."""
        self._engine.on_message(peer, header, payload, self._now_s(), sender)

    def on_idle(self) -> None:
        """Set the timer to the next deadline."""
        self._schedule_tick()

    def on_sweep(self) -> None:
        """Report, at most once a minute, which messages and connections the limits refused."""
        if news := self._description.news(self._engine.bounds.denied, time.monotonic()):
            self.warn(news)

    def on_revoked(self, keys: set[Key]) -> None:
        """End the sessions of devices whose keys were revoked."""
        for key in sorted(keys):
            self._threads.guard(partial(self._engine.revoke, key, self._now_s()))
        self._schedule_tick()

    def warn(self, detail: str) -> None:
        """Report a problem that does not end the hub."""
        self.report(HubReport("warning", detail=detail))

    def fail(self, error: BaseException) -> None:
        """End `run` with this error."""
        self._ending.fail(error)

    # -- interface for the engine -----------------------------------------------------------------------------

    def send(self, peer: Peer, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message without waiting. If it cannot be sent, drop it."""
        if not self.orders.accepts(peer, header):
            self._network.send(peer, header, payload)

    def run_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Run `work` in the fold thread, then call `then` on the event loop."""
        self._threads.run("fold", work, then)

    def write_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Run `work` in the journal thread, then call `then` on the event loop."""
        self._threads.run("journal", work, then)

    def save_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Run `work` in the save thread, then call `then` on the event loop."""
        self._threads.run("save", work, then)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` after `delay_s` seconds."""
        self._threads.after(delay_s, action)

    def _on_durable(self) -> None:
        self._engine.on_durable(self._now_s())
        self._schedule_tick()

    def _on_failing(self, reason: str) -> None:
        self._engine.on_failing(reason)

    def save(self, state: HubState) -> None:
        """Write a checkpoint and the model in the save thread."""
        self._files.save(state, self._saved, last=self.core.stopped)

    def _saved(self, covered: int) -> None:
        self._engine.saved()
        if self._log is not None and covered:
            self._log.drop_through(covered)

    def save_best(self, snapshot: Snapshot, loss: float, accuracy: float | None) -> None:
        """Write the best version in the save thread."""
        evaluation = Evaluated(snapshot.number, loss, accuracy)
        self._on_best(snapshot, evaluation)
        self._files.save_best(snapshot, self.core.lineage, evaluation)

    def evaluate(self, snapshot: Snapshot, then: Callable[[Evaluated], None]) -> None:
        """Evaluate a version in a thread, or skip it if another version is being evaluated."""
        if self._evaluation is not None:
            self._evaluation.evaluate(snapshot, lambda result: None if self._ending.reached else then(result))

    def address_of(self, peer: Peer) -> str:
        """Return the IP address of a connection, or "" if it is unknown."""
        return self._network.address_of(peer)

    def wall_s(self) -> float:
        """Return the seconds since 1970."""
        return time.time()

    def report(self, report: HubReport) -> None:
        """Pass a report to the callback. If the callback raises, end the hub after the current effects."""
        if self._opened:
            self._engine.status_answers.events.note(report, time.time())
        try:
            self._on_report(report)
        except Exception as error:  # noqa: BLE001
            self._ending.fail(error)

    def describe(self) -> dict[str, Any]:
        """Return the status fields that the shell adds: address, process, uptime, files and journal."""
        return self._description.describe(self._log, self._engine.bounds.denied, self.core.members)

    def stop(self, reason: str) -> None:
        """Make `run` return this reason."""
        self._ending.reach(reason)
