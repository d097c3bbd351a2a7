"""`join`: connects the user's own training loop to a run."""

import concurrent.futures
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.core.device.effects import DeviceReport
from edgeasync.durable.identity import DeviceFolder, DeviceIdentity, default_device_id
from edgeasync.errors import ConfigError, EdgeAsyncError
from edgeasync.protocol.messages import Welcome
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.agent_settings import AgentSettings
from edgeasync.runtime.device import find_device
from edgeasync.runtime.workload import Workload
from edgeasync.sdk.joined_peers import JoinedPeers, joined_section
from edgeasync.sdk.lockstep import Lockstep
from edgeasync.sdk.loop_state import part_of
from edgeasync.sdk.models import maker_of
from edgeasync.sdk.participants import Participant, check_same, participant_of
from edgeasync.sdk.peers import check_topology
from edgeasync.sdk.user_loop import ENDING_S, UserLoop
from edgeasync.training.plan import read_plan

LOG = logging.getLogger("edgeasync.join")

Found = TypeVar("Found")

ANSWER_S = 5.0
"""Default time limit in seconds for the hub's first model, and for its last answer at the end."""

TROUBLES = {"disconnected", "quarantined", "resting", "unreachable", "waiting", "warning"}
"""Reports that explain why a session is not connected."""


class JoinedTraining(NamedTuple):
    """Settings of a user's training loop, as described in `join`."""

    examples: int
    keep_optimizer_state: bool | None
    own_start: bool


class JoinedLoop(UserLoop):
    """A session that takes part in a hub's run from your own loop; created by `join`.

    The session counts every optimizer step. After the assigned number of steps, it pushes an update
    and receives the next model.
    """

    def __init__(
        self,
        settings: AgentSettings,
        participant: Participant,
        how: JoinedTraining,
        timeout_s: float,
    ) -> None:
        super().__init__(participant, keep_optimizer_state=how.keep_optimizer_state)
        self._settings, self._section = settings, settings.agent
        self._examples = how.examples
        self._initial = maker_of(_values_of(participant)) if how.own_start else None
        self._agent: AgentRuntime | None = None
        self._welcomed: concurrent.futures.Future[Lockstep] = concurrent.futures.Future()
        self._welcome_before: Welcome | None = None
        self._timeout_s = timeout_s

    @property
    def _is_connected(self) -> bool:
        return self._agent is not None and self._agent.joined

    @property
    def _lockstep(self) -> Lockstep | None:
        return self._welcomed.result() if self._welcomed.done() else None

    # -- the loop --------------------------------------------------------------------------------------------

    def evaluate(self, function: Callable[[], Found]) -> Found:
        """Call `function` with the hub's newest model loaded, then restore the loop's own values.

        Other changes that `function` makes are not undone. Raises `EdgeAsyncError` if the session
        has not received a model yet.
        """
        lockstep, agent = self._lockstep, self._agent
        found = None if agent is None else agent.copy_model()
        if lockstep is None or found is None:
            raise EdgeAsyncError("no model received from the hub yet; wait until session.version is a number")
        own = np.empty_like(found[1])
        self._participant.read(lockstep.spec.views(own))
        self._participant.write(lockstep.spec.views(found[1]))
        try:
            return function()
        finally:
            self._participant.write(lockstep.spec.views(own))

    def abort(self) -> None:
        """Disconnect from the hub until `resume`: nothing is sent, and no model is loaded.

        Steps that the loop takes in the meantime are not counted, but their changes become part of
        the next update.
        """
        self._aborted = True
        if self._agent is not None and not self.finished:
            agent = self._agent
            self._call(lambda: agent.request_pause(training=False))

    def resume(self) -> None:
        """Reconnect to the hub if `abort` was called before; otherwise do nothing."""
        if self._aborted and self._agent is not None and not self.finished:
            agent = self._agent
            self._welcome_before = agent.core.welcome
            self._call(agent.request_resume)
        self._aborted = False

    # -- how it runs -----------------------------------------------------------------------------------------

    def _await_ready(self) -> None:
        """Wait until the session runs; load the hub's model if it arrives within `timeout_s`."""
        super()._await_ready()
        until_s = time.monotonic() + self._timeout_s
        either: list[concurrent.futures.Future[Any]] = [self._welcomed, self._done]
        concurrent.futures.wait(either, self._timeout_s, concurrent.futures.FIRST_COMPLETED)
        lockstep = self._lockstep
        if lockstep is not None:
            lockstep.await_turn(max(0.0, until_s - time.monotonic()))
        if self.finished:
            self._done.result(ENDING_S)
        elif lockstep is None or not self._take_model(lockstep):
            LOG.warning(
                "no model from the hub after %g s; the loop trains alone until one arrives", self._timeout_s
            )
        self._detach = self._participant.attach(self.step)
        self._is_begun = True

    def _has_returned(self) -> bool:
        """Wait until the hub has readmitted the session; return whether the session is connected.

        Without this wait, the hub would count the device as live until its lease expires.
        """
        agent, until_s = self._agent, time.monotonic() + self._timeout_s
        if agent is None or self._aborted or self._welcome_before is None:
            return True
        while agent.core.welcome is self._welcome_before and time.monotonic() < until_s and not self._done.done():
            time.sleep(0.005)
        return agent.core.welcome is not self._welcome_before

    def _send_last_steps(self) -> None:
        """Push the steps since the last exchange, and wait up to `timeout_s` for the hub's answer."""
        if not self._has_returned():
            return
        lockstep, agent = self._lockstep, self._agent
        if lockstep is None or agent is None or self.finished or self._aborted:
            return
        unanswered = lockstep.updates_to_come()
        wanted, until_s = agent.core.work.updates_answered + unanswered, time.monotonic() + self._timeout_s
        if unanswered:
            lockstep.end()
        while agent.core.work.updates_answered < wanted and time.monotonic() < until_s and not self._done.done():
            lockstep.serve()
            time.sleep(0.005)

    def _take_model(self, lockstep: Lockstep) -> bool:
        if not super()._take_model(lockstep):
            return False
        assert self._agent is not None
        self.version = self._agent.version
        if lockstep.restored is not None:
            self._restore(lockstep.restored)
            lockstep.restored = None
        return True

    def _state(self) -> TrainerState:
        state = {f"loop.{name}": array for name, array in self._loop_state.dump().items()}
        return state | {f"model.{name}": array for name, array in self._participant.state().items()}

    def _restore(self, state: TrainerState) -> None:
        def restore() -> None:
            try:
                self._participant.restore(part_of(state, "model."))
            except ValueError as error:
                LOG.warning("the optimizer's state is not resumed: %s", error)

        try:
            self._loop_state.load(part_of(state, "loop."), restore)
        except ValueError as error:
            LOG.warning("the loop's state is not resumed: %s", error)

    async def _serve(self) -> str:
        with contextlib.ExitStack() as stack:
            device = find_device(self._section)
            identity = DeviceIdentity(device.device_id, secrets.token_hex(16), 1)
            if device.state is not None:
                folder = DeviceFolder(device.state)
                identity = folder.open(device.device_id)
                stack.callback(folder.close)
            workload = Workload(
                self._make_trainer,
                initial=self._initial,
                examples=self._examples,
                parameters=self._participant.parameters,
                frozen=self._participant.frozen,
                trains_at_rest=True,
            )
            opened = device.open(identity, self._section)
            self._agent = AgentRuntime(self._settings, opened, workload, on_report=self._report)
            if self._stopping:
                self._agent.request_stop()
            self._note_ready()
            async with self._warning_when_alone():
                return await self._agent.run()

    def _request_stop(self) -> None:
        if self._agent is not None:
            self._agent.request_stop()

    def _make_trainer(self, welcome: Welcome) -> Lockstep:
        check_same(self._participant.parameters, welcome.spec)
        if self._keeps_optimizer_state is None:
            self._keeps_optimizer_state = (
                bool(welcome.settings) and read_plan(welcome.settings).local.keep_optimizer_state
            )
        if not self._welcomed.done():  # otherwise the hub has changed its settings
            self._welcomed.set_result(Lockstep(welcome.spec, self._participant, self._state))
        lockstep = self._welcomed.result()
        # A resumed session needs the loop's state exactly after the last step of an update.
        lockstep.model.ahead_max = 0 if self._section.state else welcome.overlap_steps_max
        if self._agent is not None:
            self._agent.training.validate = lambda _: lockstep.take_score()
        return lockstep

    def _report(self, report: DeviceReport) -> None:
        if report.event in TROUBLES:
            self._trouble = report.detail
        level = logging.WARNING if report.event in ("waiting", "warning", "unreachable") else logging.INFO
        LOG.log(level, "%s: %s", report.event, report.detail)


def join(
    hub: str | Sequence[str] = (),
    model: object = None,
    optimizer: object = None,
    *,
    name: str | None = None,
    state: str | Path | None = None,
    enrol: str | None = None,
    insecure: bool = False,
    also: Sequence[object] = (),
    examples: int = 0,
    own_start: bool = False,
    keep_optimizer_state: bool | None = None,
    timeout_s: float = ANSWER_S,
    topology: str = "star",
    peers: str | Path | None = None,
    **settings: Any,
) -> UserLoop:
    """Take part in a hub's run from your own training loop; use the session in a `with` statement.

    - `model`: a `torch.nn.Module`, a dict of numpy arrays, an `edgeasync.networks.Network`, or a
      participant (docs/train/join.md). The hub's values are loaded into the model at once, unless
      `own_start` is set.
    - `optimizer`: the torch optimizer whose steps are counted; by default, every optimizer of the
      module's parameters. For other models, call `session.step()` after each step.
    - `name`, `state`, `enrol`, `insecure`: as for `Agent`. With `state`, a killed script resumes
      its optimizer state and random state and, with `session.batches`, its position in the data.
    - `also`: other torch objects with a `state_dict` to save and resume, such as a scheduler.
    - `examples`: number of examples that the loop trains on.
    - `keep_optimizer_state`: whether exchanges keep the optimizer's state; by default, the hub decides.
    - `timeout_s`: timeout for the hub's first model, and for its answer to the last update.
    - `topology`: with `"ring"` or `"all_to_all"`, the devices listed in the file `peers` average
      their models without a hub (docs/train/peers.md). The session ends with one more round.
    - Other keyword arguments: keys of `[agent]` and `[limits]` or, without a hub, of `[peer]`.

    Raises `ModelMismatchError` for another model, `ConfigError`, `AddressError` or `AccessError`.

    >>> import tempfile
    >>> import numpy as np
    >>> from edgeasync import Hub, join
    >>> model = {"w": np.zeros(3, np.float32)}
    >>> with Hub(model, run=tempfile.mkdtemp(), bind="tcp://127.0.0.1:*") as hub:
    ...     with join(hub.address, model) as session:
    ...         for _ in range(40):
    ...             model["w"] += 0.1 * (np.arange(3) - model["w"])
    ...             session.step()
    >>> session.steps, session.exchanges > 1
    (40, True)
    """
    participant = participant_of(model, optimizer, also)
    check_topology(topology, peers)
    who = {"device_id": name, "state": state}
    if topology != "star":
        unfit = {"hub": hub, "enrol": enrol, "insecure": insecure, "also": also, "examples": examples}
        unfit |= {"own_start": own_start, "timeout_s": timeout_s != ANSWER_S}
        section = joined_section({"topology": topology, "peers": peers, **who}, unfit, settings)
        return JoinedPeers(section, participant, keep_optimizer_state=keep_optimizer_state).start()
    said = {"hub": hub or None, "enrol": enrol, "insecure": insecure, **who}
    how = JoinedTraining(examples, keep_optimizer_state, own_start)
    return JoinedLoop(_settings_of(settings, said), participant, how, timeout_s).start()


def _settings_of(settings: Mapping[str, Any], said: Mapping[str, Any]) -> AgentSettings:
    """Build a session's settings from keys and arguments; raises `ConfigError` for invalid ones."""
    if twice := sorted({*said, "data"} & settings.keys()):
        raise ConfigError(
            f"{twice[0]} is not a setting of join: pass the device's name as name; load data in your loop"
        )
    given = {key: value for key, value in said.items() if value is not None}
    usual: dict[str, Any] = {"alone_steps_max": 2**31}
    if "state" in given:
        usual["spool"], given["state"] = "full", str(given["state"])
    elif "device_id" not in given:  # without a state folder, nothing resumes under this name
        given["device_id"] = f"{default_device_id()[:57]}-{secrets.token_hex(3)}"
    return AgentSettings.of_keys({**usual, **settings, **given}, where="join")


def _values_of(participant: Participant) -> dict[str, npt.NDArray[np.float32]]:
    """Return a copy of the participant's arrays."""
    values = {parameter.name: np.empty(parameter.shape, np.float32) for parameter in participant.parameters}
    participant.read(values)
    return values
