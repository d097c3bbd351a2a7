"""The plan of a run: a prepared model, checked settings, and the hub built from both."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from edgeasync.config import FilePath, convert, expanded
from edgeasync.core.hub.settings import StopCondition
from edgeasync.data.dataset import Dataset
from edgeasync.errors import ConfigError
from edgeasync.net.network import ZmqNetwork
from edgeasync.plugins import refuse_modules_in
from edgeasync.policies.policy import Policy
from edgeasync.runtime.hosted_model import HostedModel
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_record import record_of
from edgeasync.runtime.hub_settings import HubSettings, RunSettings
from edgeasync.sdk.keywords import TrainingKeywords, of_graph, of_steps
from edgeasync.sdk.models import (
    Prepared,
    graph_settings,
    local_training,
    prepare,
)
from edgeasync.sdk.observer import Observer
from edgeasync.sdk.stop import Stop
from edgeasync.training.evaluation import Evaluator
from edgeasync.training.local_parameters import Patterns, choose_local
from edgeasync.training.numpy_models import Model
from edgeasync.training.plan import CodeModel, ShippedModel

SEEDS = 1 << 62
"""Number of valid seeds in a settings file."""


class HubPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is needed to create a hub."""

    prepared: Prepared
    sections: RunSettings
    evaluator: Evaluator | None
    local: tuple[str, ...] = ()
    recordable: bool = True

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.sections.hub.run)


def plan_run(
    model: object,
    example: Dataset | None,
    *,
    hub: Mapping[str, Any],
    until: Stop | None,
    policy: Policy | None,
    evaluate: object,
    training: TrainingKeywords,
    seed: int,
    settings: Mapping[str, Any] | None,
    local: Sequence[str] = (),
) -> HubPlan:
    """Plan a run; `hub` contains keys of `[hub]` that the caller has derived from its arguments.

    `local` contains patterns of local parameters. Raises `ConfigError`, `DataError` or `GraphError`
    for invalid arguments.
    """
    check_seed(seed)
    for name, value, wanted in (
        ("until", until, Stop),
        ("settings", settings, Mapping),
    ):
        if value is not None and not isinstance(value, wanted):
            raise ConfigError(f"{name} is {type(value).__name__}; pass {_WANTED[name]}")
    if policy is not None and not hasattr(policy, "aggregate"):  # the hub checks the rest of a policy
        raise ConfigError(f"policy is {type(policy).__name__}; pass {_WANTED['policy']}")
    refuse_modules_in(expanded(hub["run"]))
    sections = replace(_sections(settings, hub, until, policy), local=local_training(**of_steps(training)))
    prepared = prepare(
        model,
        example,
        sections.local,
        graph=graph_settings(**of_graph(training)),
        run=Path(sections.hub.run),
        seed=seed,
    )
    sections.local.check_model(prepared.spec, prepared.loss, in_chunks=prepared.in_chunks)
    patterns = convert(local, Patterns, where="local") if local else getattr(prepared.described, "local", ()) or ()
    if patterns:
        choose_local(prepared.spec, patterns)
        if evaluate is not None and not callable(evaluate):
            raise ConfigError(
                "evaluate= is a dataset, but local parameters differ between devices, so the hub has no complete "
                "model to test; evaluate on the agents, or pass a function that takes the named arrays"
            )
    evaluator = make_evaluator(evaluate, until, prepared)
    return HubPlan(prepared=prepared, sections=sections, evaluator=evaluator, local=patterns)


_WANTED = {
    "until": "a Stop such as Stop(updates=100)",
    "policy": "a Policy, or use settings={'policy': {...}}",
    "settings": "a dict of tables: {'codec': {'push': 'int8'}}",
}


def as_path(path: object, what: str) -> Path:
    """Convert `path` to a `Path`; raises `ConfigError` if this is not possible."""
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(f"{what} is {path!r}; pass the path of a folder")
    return expanded(path)


def check_seed(seed: object) -> None:
    """Raise `ConfigError` unless the seed is valid for numpy."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise ConfigError(f"seed is {seed!r}; pass an integer from 0 to 2**62 - 1")


def make_hub(
    plan: HubPlan,
    bind: str,
    observer: Observer,
    network: ZmqNetwork | None = None,
    keys: Path | None = None,
    *,
    trust_code: bool = False,
) -> HubRuntime:
    """Create the hub of a plan with the address `bind`, without starting it.

    `keys` apply to this start only. With `trust_code`, the hub also imports plugins that are named
    only in the run's folder.
    """
    prepared, hub = plan.prepared, plan.sections.hub
    shipped: Model | ShippedModel | CodeModel = prepared.shipped or CodeModel()
    if plan.local:
        shipped = replace(shipped, local=plan.local)
    graph = prepared.graph
    model = HostedModel(
        spec=prepared.spec,
        initial=lambda: np.array(prepared.initial),
        shipped=shipped,
        graph=None if graph is None else graph.graph,
        forward=None if graph is None else graph.forward,
        frozen=prepared.frozen,
    )
    own = replace(hub, bind=bind, keys=hub.keys or (keys and FilePath(keys)))
    return HubRuntime(
        replace(plan.sections, hub=own),
        model,
        evaluator=plan.evaluator,
        record=_record(plan),
        recordable=plan.recordable,
        trust_code=trust_code,
        on_report=observer.on_report,
        on_best=partial(observer.on_best, prepared.restore),
        observe=observer,
        network=network,
    )


def _record(plan: HubPlan) -> bytes | None:
    """Return the settings with which the commands can resume the run.

    Return `None` if the model is defined only by Python code, or if the plan is not `recordable`.
    """
    if plan.prepared.described is None or not plan.recordable:
        return None
    sections = plan.sections
    fields = {name: getattr(sections, name) for name in sections.__struct_fields__}
    # The command line has no held-out data to resume with, so `stop.accuracy` would never be
    # reached.
    fields["hub"] = replace(sections.hub, stop=replace(sections.hub.stop, accuracy=None))
    model = plan.prepared.described
    return record_of(HubSettings(model=replace(model, local=plan.local) if plan.local else model, **fields))


def _sections(
    settings: Mapping[str, Any] | None, hub: Mapping[str, Any], until: Stop | None, policy: Policy | None
) -> RunSettings:
    """Build a hub's settings; raises `ConfigError` if a key is also set by an argument."""
    table = dict(settings or {})
    for name in ("model", "local"):
        if name in table:
            raise ConfigError(
                f"settings must not contain {name!r}: use the arguments model, loss, output, train, freeze, "
                "recompute, lora, base, optimizer and batch_size"
            )
    evaluation = table.get("evaluation")
    if isinstance(evaluation, Mapping) and "data" in evaluation:
        raise ConfigError("settings must not contain evaluation.data: use the argument evaluate")
    own = table.pop("hub", {})
    if not isinstance(own, Mapping):
        raise ConfigError("settings: 'hub' is not a dict; pass {'hub': {'durability': 'checkpoint'}}")
    if said := sorted({"run", "bind", "stop", "seed", "keys", "insecure", "frozen"} & own.keys()):
        raise ConfigError(f"settings must not contain hub.{said[0]}: use an argument instead, or remove it")
    sections = convert({**table, "hub": {**hub, **dict(own)}}, RunSettings, where="settings")
    stop = StopCondition() if until is None else until.condition()
    sections = replace(sections, hub=replace(sections.hub, stop=stop), policy=policy or sections.policy)
    return replace(sections, policy=sections.fleet_policy)


def make_evaluator(evaluate: object, until: Stop | None, prepared: Prepared) -> Evaluator | None:
    """Create the evaluator of a run; raises `ConfigError` or `DataError`."""
    if evaluate is None:
        if until is not None and until.accuracy is not None:
            raise ConfigError("until.accuracy needs held-out data: pass evaluate")
        return None
    evaluator = prepared.evaluator(evaluate, "evaluate")
    if callable(evaluate):
        evaluator(np.array(prepared.initial))  # report mistakes before training
    return evaluator
