"""Averages models without a hub, among the processes that a file of peers lists."""

from pathlib import Path
from typing import Any, Self

from edgeasync import join
from edgeasync.async_train.adapters import settled
from edgeasync.async_train.communication import Averaging, Communication, through_hub
from edgeasync.async_train.ignored import ignore
from edgeasync.async_train.learners import Learner
from edgeasync.async_train.watching import WATCHED
from edgeasync.errors import ConfigError


class PeerCommunication:
    """Averages a loop's model with the models of the other processes, from `start` to `stop`."""

    def __init__(
        self,
        model: Any,
        learner: Learner,
        rank: int,
        *,
        topology: str,
        peers: str | Path | None = None,
        checkpoint_dir: str | Path | None = None,
        agent: dict[str, Any] | None = None,
        **averaging: Any,
    ) -> None:
        self._model, self._learner = model, learner
        usual = {"name": f"rank-{rank}", "state": checkpoint_dir, "keep_optimizer_state": True}
        arguments = {"topology": topology, "peers": peers} | make_rounds(**averaging) | usual | (agent or {})
        self._arguments = settled(arguments)
        self.session: Any = None

    def start(self) -> Self:
        """Join the other processes, if not yet started."""
        if self.session is None:
            why = "without a hub no remedy is applied; use the monitor's alerts"
            ignore("AsyncTrainingMonitor", why, remediation_strategy=WATCHED.of(self._model) or None)
            self.session = join(model=self._learner.participant, **self._arguments)
        return self

    def stop(self) -> None:
        """Take part in one more round with the last steps, and load that round's mean."""
        if self.session is not None:
            self.session.__exit__(None, None, None)
            self.session = None


def communication_of(
    model: Any, learner: Learner, rank: int, world_size: int, *, topology: str = "star", **averaging: Any
) -> Communication | PeerCommunication:
    """Create a loop's communication: through a hub if `topology` is "star", else with peers."""
    if topology == "star":
        if averaging.pop("peers", None) is not None:
            raise ConfigError("peers requires topology='ring' or 'all_to_all'")
        return through_hub(model, learner, rank, world_size, **averaging)
    return PeerCommunication(model, learner, rank, topology=topology, **averaging)


def make_rounds(
    *,
    averaging_frequency: int = 100,
    averaging_policy: str = "iterations",
    averaging_interval_s: float = 1.0,
    **others: Any,
) -> dict[str, Any]:
    """Return the arguments of `join` for rounds; raises `ConfigError` if a value requires a hub."""
    for name, value in others.items():
        if name not in Averaging.__annotations__:
            raise TypeError(f"an averager has no argument {name!r}")
        if value and (name, value) != ("exchange", "all"):
            raise ConfigError(f"{name} requires a hub; remove it, or remove topology")
    rounds: dict[str, dict[str, Any]] = {
        "iterations": {"round_steps": averaging_frequency},
        "time": {"round_every_s": averaging_interval_s},
    }
    if averaging_policy not in rounds:
        raise ConfigError(f"averaging_policy is {averaging_policy!r}; without a hub choose 'iterations' or 'time'")
    return rounds[averaging_policy]
