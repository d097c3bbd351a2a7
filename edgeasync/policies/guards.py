"""Guard the hub against errors in policy plugins.

When a policy is created, each plugin is tested on a small artificial input, so that errors are
reported early. During a run, the results of plugins are validated like messages from the network.
If a plugin raises an exception or returns a result out of bounds, the guard raises a `PluginError`
that names the plugin. The hub then ends, and its model is the last valid version. Built-in policies
are not guarded.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from numbers import Integral, Real
from operator import or_
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np

from edgeasync.errors import PluginError
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.measurements.fleet import FleetMeasurements
from edgeasync.parameters import Vector
from edgeasync.plugins import name_of
from edgeasync.policies.aggregation import Aggregator, Answer, Contribution, Fleet, UpdateKind
from edgeasync.policies.combining import Combiner, Rows
from edgeasync.policies.frequency import STEPS_MAX, Bound, Cadence, FrequencyController, Interval
from edgeasync.policies.kinds import OWN
from edgeasync.policies.monitor import Detector, Evidence, Observation, Remedy, Scope
from edgeasync.policies.staleness import Staleness, StalenessPolicy
from edgeasync.policies.transforms import Conditions, Scalars, Transform

WORDS_MAX = 300
"""Maximum length of a text that a plugin returns. Longer texts are truncated."""

FIGURES_MAX, NAME_MAX = 8, 40
"""Maximum number of figures that a detector may return, and maximum length of their names.

Further figures and characters are dropped.
"""

STATE_VECTORS_MAX = 16
SCALARS_MAX = 64

_OWN_CLASSES = frozenset(get_args(reduce(or_, OWN.values())))
Returned = TypeVar("Returned")


class Guard:
    """Wraps a plugin that is part of a policy. `path` is the part's path in `[policy]`."""

    protocol: ClassVar[type]

    def __init__(self, part: Any, path: str) -> None:
        self.part = part
        self.path = path

    def __repr__(self) -> str:
        return repr(self.part)

    @property
    def who(self) -> str:
        """The plugin's path in `[policy]` and its name, for error messages."""
        return f"policy.{self.path} {plugin_name(self.part)}"

    def wrong(self, what: str) -> PluginError:
        """Return a `PluginError` with the plugin's name and the message `what`."""
        return PluginError(f"{self.who}: {what}")

    def ask(self, what: str, function: Callable[..., Returned], *arguments: Any) -> Returned:
        """Call a function of the plugin, and convert any exception to a `PluginError`."""
        try:
            return function(*arguments)
        except Exception as error:
            raise self.wrong(f"{what} raised {type(error).__name__}: {error}"[:WORDS_MAX]) from error

    def number(self, value: Any, what: str, least: float = -math.inf, most: float = math.inf) -> float:
        """Return `value` as a float; raises `PluginError` unless it is finite and within the bounds."""
        found = float(value) if isinstance(value, Real) else math.nan
        if not math.isfinite(found) or not least <= found <= most:
            bounds = "a finite number" if math.isinf(most) else f"a number from {least:g} to {most:g}"
            raise self.wrong(f"{what} is {value!r:.60}; return {bounds}")
        return found

    def word(self, name: str, known: object) -> str:
        """Return an attribute; raises `PluginError` unless it is one of several allowed words."""
        found = getattr(self.part, name)
        if found not in get_args(known):
            raise self.wrong(f"{name} is {found!r:.60}; set it to one of {', '.join(get_args(known))}")
        return str(found)

    def flag(self, name: str) -> bool:
        """Return an attribute; raises `PluginError` unless it is a bool."""
        found = getattr(self.part, name)
        if not isinstance(found, bool):
            raise self.wrong(f"{name} is {found!r:.60}; set it to True or False")
        return found

    def trial(self) -> object:
        """Test the plugin on a small artificial input. Return the results, to compare two trials."""
        raise NotImplementedError


class StalenessGuard(Guard):
    """Checks that a staleness policy returns weights from 0 to 1."""

    protocol = StalenessPolicy

    def __call__(self, staleness: Staleness) -> float | None:
        """Return the plugin's weight, or `None`."""
        weight = self.ask("it", self.part, staleness)
        return None if weight is None else self.number(weight, "the weight", 0.0, 1.0)

    def trial(self) -> object:
        """Compute the weights of updates with different staleness."""
        return [self(Staleness(versions, devices_live=4)) for versions in (0, 1, 2, 7, 1000)]


class AggregatorGuard(Guard):
    """Checks that an aggregator returns a weight from 0 to 1 for each update."""

    protocol = Aggregator

    def __init__(self, part: Any, path: str) -> None:
        super().__init__(part, path)
        self.update: UpdateKind = self.word("update", UpdateKind)  # type: ignore[assignment]
        self.answer: Answer = self.word("answer", Answer)  # type: ignore[assignment]

    def flush_at_s(self, buffered: Sequence[Contribution], fleet: Fleet) -> float | None:
        """Return the time at which the plugin wants to fold, or `None`."""
        due_s = self.ask("flush_at_s", self.part.flush_at_s, tuple(buffered), fleet)
        return None if due_s is None else self.number(due_s, "flush_at_s")

    def weights(self, buffered: Sequence[Contribution], fleet: Fleet) -> tuple[float, ...]:
        """Return a weight for each update."""
        found = self.ask("weights", lambda: tuple(self.part.weights(tuple(buffered), fleet)))
        if len(found) != len(buffered):
            raise self.wrong(f"weights returned {len(found)} weights for {len(buffered)} updates")
        return tuple([self.number(weight, "a weight", 0.0, 1.0) for weight in found])

    def trial(self) -> object:
        """Aggregate one, two and three updates."""
        decided: list[object] = []
        made = [
            Contribution(place, f"device-{place}", 0.5**place, 1.0 + place, 100, 8, place, 0.5, 10.0 + place, name)
            for place, name in enumerate("abc")
        ]
        for count in (1, 2, 3):
            for fleet in (Fleet(3.0), Fleet(3.0, 2.0, {"c": 2})):
                decided += [self.flush_at_s(made[:count], fleet), self.weights(made[:count], fleet)]
        return decided


class CombinerGuard(Guard):
    """Checks that a combiner returns finite values for finite updates."""

    protocol = Combiner
    robust: ClassVar[bool] = True
    centred: ClassVar[bool] = False

    def __init__(self, part: Any, path: str) -> None:
        super().__init__(part, path)
        self.whole = self.flag("whole")
        if not self.flag("robust") or self.flag("centred"):
            raise self.wrong("unsupported attributes; set robust = True and centred = False")

    def combine(self, rows: Rows, out: Vector) -> None:
        """Combine `rows` into `out`, and check that the plugin has written every element of `out`."""
        finite = bool(np.isfinite(rows).all())
        out.fill(np.nan)
        self.ask("combine", self.part.combine, rows, out)
        if finite and not np.isfinite(out).all():
            raise self.wrong("combine left non-finite values; write finite values to all of out, in place")

    def trial(self) -> object:
        """Combine two, three and seven artificial updates, and several equal updates."""
        decided = []
        random = np.random.default_rng(0)
        for count in (2, 3, 7):
            for rows in (random.normal(size=(count, 6)), np.ones((count, 6)), np.zeros((count, 6))):
                out = np.empty(6, np.float32)
                self.combine(rows.astype(np.float32), out)
                decided.append(out.tolist())
        return decided


class TransformGuard(Guard):
    """Checks that an optimizer stage returns finite scalars and values."""

    protocol = Transform

    def __init__(self, part: Any, path: str) -> None:
        super().__init__(part, path)
        self.state_vectors = int(self.number(part.state_vectors, "state_vectors", 0, STATE_VECTORS_MAX))

    def plan(self, conditions: Conditions) -> Scalars:
        """Return the plugin's scalars."""
        found = self.ask("plan", lambda: tuple(self.part.plan(conditions)))
        if len(found) > SCALARS_MAX:
            raise self.wrong(f"plan returned {len(found)} scalars; return at most {SCALARS_MAX}")
        return tuple([self.number(scalar, "a scalar of plan") for scalar in found])

    def factor(self, scalars: Scalars) -> float | None:
        """Return the plugin's factor, or `None`."""
        factor = self.ask("factor", self.part.factor, scalars)
        return None if factor is None else self.number(factor, "the factor")

    def apply(self, gradient: Vector, parameters: Vector, state: Sequence[Vector], scalars: Scalars) -> None:
        """Convert a slice of the gradient to a step. The plugin cannot write to the parameters."""
        finite = bool(np.isfinite(gradient).all())
        shown = parameters.view()
        shown.flags.writeable = False
        self.ask("apply", self.part.apply, gradient, shown, state, scalars)
        if finite and not all(np.isfinite(vector).all() for vector in (gradient, *state)):
            raise self.wrong("apply left non-finite values in the gradient or the state; write finite values")

    def trial(self) -> object:
        """Take three steps, the last one with a gradient of zeros."""
        decided: list[object] = []
        parameters = np.linspace(-1.0, 1.0, 6, dtype=np.float32)
        state = [np.zeros(6, np.float32) for _ in range(self.state_vectors)]
        for count, size in enumerate((1.0, 100.0, 0.0)):
            gradient = np.linspace(-size, size, 6, dtype=np.float32)
            scalars = self.plan(Conditions(2.0 * size, count, 0.5))
            decided += [scalars, self.factor(scalars)]
            self.apply(gradient, parameters, state, scalars)
            decided.append(gradient.tolist())
        return decided


class FrequencyGuard(Guard):
    """Checks that a controller returns steps within the protocol's and the device's limits."""

    protocol = FrequencyController

    def retune(self, cadence: Cadence, fleet: FleetMeasurements, devices: Sequence[DeviceMeasurements]) -> Cadence:
        """Return the plugin's next cadence."""
        found = self.ask("retune", self.part.retune, cadence, fleet, devices)
        if not isinstance(found, Cadence):
            raise self.wrong(f"retune returned {found!r:.60}; return a Cadence")
        return Cadence(
            period_s=self.number(found.period_s, "period_s", 0.0, 1e9),
            gain=self.number(found.gain, "gain", 0.0, 1.0),
            steps_factor=self.number(found.steps_factor, "steps_factor", 0.0, 1.0),
            cause=str(found.cause)[:WORDS_MAX],
            quick_s=self.number(found.quick_s, "quick_s", 0.0, 1e9),
        )

    def interval(self, device: DeviceMeasurements, cadence: Cadence) -> Interval:
        """Return the plugin's number of local steps, limited to the device's own maximum."""
        found = self.ask("interval", self.part.interval, device, cadence)
        if not isinstance(found, Interval) or found.bound not in get_args(Bound):
            raise self.wrong(f"interval returned {found!r:.60}; return an Interval")
        told: Any = found.local_steps
        steps = int(told) if isinstance(told, Integral) else 0
        if not 1 <= steps <= STEPS_MAX:
            raise self.wrong(f"interval returned {told!r:.60} local steps; return an integer of at least 1")
        most = device.local_steps_max
        if most and steps > most:
            return Interval(most, f"the device allows {most} steps", "device")
        return Interval(steps, str(found.why)[:WORDS_MAX], found.bound)

    def trial(self) -> object:
        """Compute the local steps of a measured device and of a new device with its own limit."""
        measured = DeviceMeasurements(
            examples=100,
            local_steps=8,
            assigned_steps=8,
            batch_examples=10.0,
            step_s=0.01,
            communication_s=0.1,
            updates=5,
        )
        devices = [measured, DeviceMeasurements(examples=10, local_steps_max=4)]
        fleet = FleetMeasurements()
        before = _written(devices, fleet)
        cadences = [Cadence(), self.retune(Cadence(), fleet, []), self.retune(Cadence(2.0), fleet, devices[:1])]
        decided = [cadences, *[self.interval(device, cadence) for device in devices for cadence in cadences]]
        if _written(devices, fleet) != before:
            raise self.wrong("it modifies its arguments; treat them as read-only")
        return decided


class DetectorGuard(Guard):
    """Checks that a detector returns `None`, or evidence that consists of a sentence and figures."""

    protocol = Detector

    def __init__(self, part: Any, path: str) -> None:
        super().__init__(part, path)
        self.scope: Scope = self.word("scope", Scope)  # type: ignore[assignment]
        self.remedy: Remedy = self.word("remedy", Remedy)  # type: ignore[assignment]
        if self.scope == "device" and self.remedy != "alert":
            raise self.wrong(
                f"remedy is {self.remedy!r}, but a detector with scope 'device' only warns; set it to 'alert'"
            )
        self.count_max = int(self.number(part.count_max, "count_max", 1, 100_000))
        self.patient = self.flag("patient")

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:
        """Return the detector's evidence, or `None`."""
        found = self.ask("cause", self.part.cause, update, fleet)
        if found is None:
            return None
        if not isinstance(found, Evidence) or not isinstance(found.words, str):
            raise self.wrong(f"cause returned {found!r:.60}; return an Evidence, or None")
        figures = dict(list(found.figures.items())[:FIGURES_MAX])
        return Evidence(
            found.words[:WORDS_MAX],
            {str(name)[:NAME_MAX]: self.number(value, f"figure {name}") for name, value in figures.items()},
        )

    def trial(self) -> object:
        """Pass the detector a normal update, a non-finite one, and one without a loss."""
        fleet = FleetMeasurements()
        before = _written(fleet)
        updates = [
            Observation("device-1", 1.0, 8, 0.5, "device-1", base_loss=0.6),
            Observation("device-1", math.nan, 8, math.nan, "device-1", finite=False),
            Observation("device-2", 1e6, 1, None, "device-2", known=False),
        ]
        decided = [self.cause(update, fleet) for update in updates]
        if _written(fleet) != before:
            raise self.wrong("it modifies its arguments; treat them as read-only")
        return decided


class PolicyPart(NamedTuple):
    """A part of a policy, its path in `[policy]`, and the guard class for plugins at this path."""

    path: str
    guard: type[Guard]
    part: Any


def policy_parts(policy: Any) -> Iterator[PolicyPart]:
    """Yield every part of a policy that may be a plugin."""
    yield PolicyPart("staleness", StalenessGuard, policy.staleness)
    yield PolicyPart("aggregate", AggregatorGuard, policy.aggregate)
    yield PolicyPart("combine", CombinerGuard, policy.combine)
    yield PolicyPart("frequency", FrequencyGuard, policy.frequency)
    for number, stage in enumerate(policy.optimizer):
        yield PolicyPart(f"optimizer[{number}]", TransformGuard, stage)
    for number, detector in enumerate(policy.monitor.detectors):
        yield PolicyPart(f"monitor.detectors[{number}]", DetectorGuard, detector)
    if policy.warm_up is not None:
        yield PolicyPart("warm_up.aggregate", AggregatorGuard, policy.warm_up.aggregate)
        yield PolicyPart("warm_up.frequency", FrequencyGuard, policy.warm_up.frequency)


def plugins_of(policy: Any) -> dict[str, Any]:
    """Return the plugins of a policy, keyed by their path in `[policy]`."""
    return {
        place.path: place.part.part if isinstance(place.part, Guard) else place.part
        for place in policy_parts(policy)
        if type(place.part) not in _OWN_CLASSES
    }


def plugin_name(part: object) -> str:
    """Return the name of a part for error messages."""
    named = part if isinstance(part, type) or hasattr(part, "__qualname__") else type(part)
    return name_of(named)  # type: ignore[arg-type]


def try_plugins(policy: Any) -> None:
    """Test every plugin of a policy; raises `PluginError` if a test fails."""
    for path, guard, part in policy_parts(policy):
        if type(part) in _OWN_CLASSES or isinstance(part, Guard):
            continue
        if missing := [name for name in _members(guard.protocol) if not hasattr(part, name)]:
            who = f"policy.{path} {plugin_name(part)}"
            raise PluginError(
                f"{who}: missing {', '.join(missing)}; see {guard.protocol.__name__} in docs/train/plugins.md"
            )
        first, again = [repr(guard(part, path).trial()) for _ in range(2)]
        if first != again:
            raise guard(part, path).wrong(
                "returns different results for equal arguments; a policy must depend on its arguments alone"
            )


def guarded(policy: Any) -> Any:
    """Return a copy of the policy in which every plugin is wrapped in a guard."""
    if not plugins_of(policy):
        return policy

    def guard(path: str) -> Any:
        _, make, part = by_path[path]
        return part if type(part) in _OWN_CLASSES or isinstance(part, Guard) else make(part, path)

    by_path = {one.path: one for one in policy_parts(policy)}
    warm_up, monitor = policy.warm_up, policy.monitor
    if warm_up is not None:
        warm_up = msgspec.structs.replace(
            warm_up, aggregate=guard("warm_up.aggregate"), frequency=guard("warm_up.frequency")
        )
    detectors = tuple([guard(f"monitor.detectors[{number}]") for number in range(len(monitor.detectors))])
    return msgspec.structs.replace(
        policy,
        **{name: guard(name) for name in ("staleness", "aggregate", "combine", "frequency")},
        optimizer=tuple([guard(f"optimizer[{number}]") for number in range(len(policy.optimizer))]),
        monitor=msgspec.structs.replace(monitor, detectors=detectors),
        warm_up=warm_up,
    )


def parts_of(plugin: type) -> list[str]:
    """Return the parts of a policy that a class can be used as, judged by its attributes."""
    has = {name for base in plugin.__mro__[:-1] for name in vars(base)}
    guards = {
        "staleness": StalenessGuard,
        "aggregate": AggregatorGuard,
        "combine": CombinerGuard,
        "optimizer": TransformGuard,
        "frequency": FrequencyGuard,
        "monitor.detectors": DetectorGuard,
    }
    return [part for part, guard in guards.items() if has.issuperset(_members(guard.protocol))]


def _members(protocol: type) -> list[str]:
    names = [*protocol.__annotations__, *vars(protocol)]
    return [name for name in names if name == "__call__" or not name.startswith("_")]


def _written(*values: object) -> str:
    return repr(msgspec.to_builtins(values))
