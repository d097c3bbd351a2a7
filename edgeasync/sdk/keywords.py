"""Keywords that several of `train`, `Hub`, `Agent`, `Peer` and `join` take, each declared once."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args, get_type_hints

from msgspec import UNSET

from edgeasync.config import suggest
from edgeasync.losses import LossSetting

Called = TypeVar("Called", bound=Callable[..., object])


class LocalKeywords(TypedDict, total=False):
    """How devices take local steps."""

    optimizer: object
    """Such as `SGD(learning_rate=0.1)`, or a list of stages."""
    batch_size: int | None
    """Examples of a local step; with `accumulation_steps`, of each of its batches."""
    metrics: object
    """Of `edgeasync.metrics`, objects or names; they come with `on_update`."""
    keep_optimizer_state: bool | None
    """Whether a device's momentum and averages outlive its exchanges."""


class GraphKeywords(TypedDict, total=False):
    """What an ONNX model, or layers of `edgeasync.nn`, are trained for."""

    loss: LossSetting
    """An object of `edgeasync.losses` or a name; by default "cross_entropy"."""
    output: str | None
    """The tensor that the loss reads, where there are several."""
    train: str | Sequence[str]
    """Patterns of the parameters to train, such as `["head.*"]`."""
    freeze: str | Sequence[str]
    """Patterns of parameters that stay as they are, although `train` matches them."""


class DeviceKeywords(TypedDict, total=False):
    """Keys of `[agent]` and `[limits]` in a settings file, by their names (docs/reference/settings/agent.md)."""

    state: str | Path | None
    enrol: str | None
    hub_key: str | None
    insecure: bool
    seed: int
    step_s_min: float
    threads: int | None
    provider: Literal["auto", "cpu", "cuda", "tensorrt"]
    progress_s: float
    micro_batch_size: int | Literal["auto"] | None
    spool: Literal["identity", "full"]
    local: Sequence[str]
    when_finished: Literal["exit", "wait"]
    local_steps_max: int | None
    delay_steps: int | None
    graph_bytes_max: int | str
    parameters_max: int | None
    bandwidth_bytes_per_s_max: int | str | None
    link_share: float | None
    bytes_per_day_max: int | str | None
    alone_steps_max: int


class AgentKeywords(LocalKeywords, DeviceKeywords, total=False):
    """Keywords of an `Agent`: its own settings of local steps instead of the hub's, and keys of its file."""

    loss: LossSetting | None
    """The loss that this device expects the hub's training graph to have; another one is refused."""


class TrainingKeywords(LocalKeywords, GraphKeywords, total=False):
    """How devices train, as a hub tells them or as `train` does."""

    accumulation_steps: int | None
    """Batches that make one local step together."""
    micro_batch_size: int | str | None
    """The most examples that go through the model at once; `"auto"` chooses by speed and memory."""


def show_keywords(function: Called) -> Called:
    """Let `help`, editors and `inspect.signature` see the keys of a function's `**keys: Unpack[...]`."""
    signature = inspect.signature(function)
    *own, rest = signature.parameters.values()
    (kind,) = get_args(get_type_hints(function)[rest.name])
    keys = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=UNSET, annotation=hint)
        for name, hint in get_type_hints(kind).items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *keys])  # type: ignore[attr-defined]
    return function


def check_keywords(
    given: Mapping[str, object], called: Callable[..., object], name: str, elsewhere: Mapping[str, str] = {}
) -> None:
    """Raise `TypeError`, as a call does, for a keyword that `show_keywords` has not seen.

    `elsewhere` says where a keyword is instead.
    """
    known = inspect.signature(called).parameters
    for keyword in given:
        if keyword not in known:
            advice = suggest(keyword, known) or elsewhere.get(keyword, "")
            raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}{advice and '; '}{advice}")


def of_graph(given: Mapping[str, Any]) -> GraphKeywords:
    """Return those keywords that say what a graph is built for."""
    return cast(
        "GraphKeywords", {name: value for name, value in given.items() if name in GraphKeywords.__annotations__}
    )


def of_steps(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other keywords of training: those of local steps."""
    return {name: value for name, value in given.items() if name not in GraphKeywords.__annotations__}
