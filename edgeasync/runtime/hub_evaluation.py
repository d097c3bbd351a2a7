"""Evaluate versions of the hub's model in a thread."""

from collections.abc import Callable

from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.hub.events import Evaluated
from edgeasync.errors import ConfigError
from edgeasync.runtime.hub_threads import HubThreads
from edgeasync.training.evaluation import Evaluator, plain


class HubEvaluation:
    """Evaluates one version at a time, and skips versions that arrive meanwhile."""

    def __init__(self, evaluator: Evaluator, threads: HubThreads, *, needs_accuracy: bool) -> None:
        self._evaluator = evaluator
        self._threads = threads
        self._needs_accuracy = needs_accuracy
        self._busy = False

    def evaluate(self, snapshot: Snapshot, then: Callable[[Evaluated], None]) -> None:
        """Evaluate a version, then call `then` on the event loop.

        If another version is being evaluated, skip this one.
        """
        if self._busy:
            return
        self._busy = True

        def done(result: Evaluated) -> None:
            self._busy = False
            then(result)

        def work() -> Evaluated:
            found = plain(self._evaluator(snapshot.vector))
            if found.accuracy is None and self._needs_accuracy:
                raise ConfigError(
                    "stop.accuracy can never be reached: the evaluator returns no accuracy; remove stop.accuracy"
                )
            return Evaluated(snapshot.number, found.loss, found.accuracy)

        self._threads.run("evaluate", work, done)
