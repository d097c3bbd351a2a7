"""Open the run of a hub: recover it from its folder, or begin a new one."""

import secrets
import time
from collections.abc import Callable
from functools import cached_property

import msgspec

from edgeasync.core.hub.effects import HubReport
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.recovery.replay import Sessions
from edgeasync.durable.recovery import Rules
from edgeasync.durable.run import HubRun
from edgeasync.errors import EdgeAsyncError
from edgeasync.graphs.graph_model import check_forward, keep_files
from edgeasync.graphs.model_file import load_model
from edgeasync.graphs.shipped_graph import ship_graph
from edgeasync.host.completion import Completion
from edgeasync.host.worker import Worker
from edgeasync.parameters import Vector
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import ModelVersion
from edgeasync.runtime.hosted_model import HostedModel
from edgeasync.runtime.hub_files import HubFiles
from edgeasync.runtime.hub_settings import RunSettings
from edgeasync.runtime.hub_threads import HubThreads

PROGRESS_S = 5.0
"""Seconds between two progress reports of a hub that replays a long journal."""


class HubOpening:
    """Opens a run in a thread, because recovery may take minutes. `HubRuntime` creates it.

    `is_stopping` returns whether the hub was asked to stop meanwhile.
    """

    def __init__(
        self,
        settings: RunSettings,
        model: HostedModel,
        run: HubRun,
        files: HubFiles,
        threads: HubThreads,
        *,
        record: bytes | None,
        report: Callable[[HubReport], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._settings, self._model = settings, model
        self._run, self._files, self._threads = run, files, threads
        self._record, self._report, self._is_stopping = record, report, is_stopping

    async def open(self, request_stop: Callable[[], None]) -> None:
        """Open the run. The folder must stay locked until this returns.

        If the task is cancelled, call `request_stop` and wait until the thread has ended.
        """
        opened = Completion("opening")
        opened.begin()
        worker = Worker("open", lambda error: self._threads.hand_over(error, opened.fail))

        def work() -> None:
            self._open()
            self._threads.hand_over("", opened.reach)

        worker.start()
        worker.submit(work)
        try:
            await opened.wait(request_stop)
        finally:
            worker.abandon()

    def _open(self) -> None:
        told_s = time.monotonic()

        def on_entry(number: int, *_: object) -> bool:
            nonlocal told_s
            if time.monotonic() > told_s + PROGRESS_S:
                told_s = time.monotonic()
                self._threads.hand_over(HubReport("replaying", detail=f"entry {number}"), self._report)
            if self._is_stopping():
                raise EdgeAsyncError("stopped before the journal was fully replayed; nothing was changed")
            return True

        folder, names = self._files.model.parent, self._model.spec.names
        check_forward(folder, self._model.forward, names)  # before the folder changes
        self._run.open(
            self._make_core,
            self._begin,
            lineage=secrets.token_hex(8),
            draw_session=lambda: secrets.token_bytes(16),
            created_s=time.time(),
            on_entry=on_entry,
        )
        if self._graph is not None:
            keep_files(folder, bytes(self._graph.payload), self._model.forward, names)
            self._model = msgspec.structs.replace(self._model, graph=None, forward=None)  # frees their memory
        self._files.begin(self._record)

    def _begin(self) -> tuple[Vector, int]:
        """Return the initial model of a run without checkpoints."""
        file = self._files.model
        return load_model(file, self._model.spec) if file.exists() else (self._model.initial(), 0)

    def _make_core(self, rules: Rules, version: ModelVersion, now_s: float, sessions: Sessions) -> HubCore:
        training = self._model.training(self._settings.local)
        return rules.make_core(version, now_s, sessions, training=training, graph=self._graph)

    @cached_property
    def _graph(self) -> ShippedGraph | None:
        """The training graph that devices fetch. Its base is in the run's folder, which must be locked."""
        return None if self._model.graph is None else ship_graph(self._model.graph, self._files.model.parent)
