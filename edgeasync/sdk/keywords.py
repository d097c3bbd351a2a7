"""Keyword arguments shared by `train`, `Hub`, `Agent`, `Peer` and `join`, each declared once."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args, get_type_hints

from msgspec import UNSET

from edgeasync.config import suggest
from edgeasync.losses import LossSetting

Called = TypeVar("Called", bound=Callable[..., object])


class LocalKeywords(TypedDict, total=False):
    """Settings of a device's local steps."""

    optimizer: object
    """An optimizer such as `SGD(learning_rate=0.1)`, or a list of stages."""
    batch_size: int | None
    """Examples per local step; with `accumulation_steps`, per batch of a step."""
    metrics: object
    """Metrics of `edgeasync.metrics`, as objects or names; `on_update` reports them."""
    keep_optimizer_state: bool | None
    """Whether momentum and averages are kept across exchanges."""


class GraphKeywords(TypedDict, total=False):
    """Settings of the training graph for an ONNX model or layers of `edgeasync.nn`."""

    loss: LossSetting
    """An object of `edgeasync.losses` or a name; by default "cross_entropy"."""
    output: str | None
    """The tensor that the loss reads, if the model has several outputs."""
    train: str | Sequence[str]
    """Patterns of the parameters to train, such as `["head.*"]`."""
    freeze: str | Sequence[str]
    """Patterns of parameters to freeze, even if `train` matches them."""


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
    """Keywords of an `Agent`: local training that overrides the hub's, and keys of its file."""

    loss: LossSetting | None
    """The expected loss of the hub's training graph; a graph with another loss is refused."""


class TrainingKeywords(LocalKeywords, GraphKeywords, total=False):
    """Training settings of a `Hub` or of `train`."""

    accumulation_steps: int | None
    """Batches per local step."""
    micro_batch_size: int | str | None
    """The most examples that the model processes at once; `"auto"` chooses by speed and memory."""


def show_keywords(function: Called) -> Called:
    """Add the keys of `**keys: Unpack[...]` to the signature that `help` and editors show."""
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
    """Raise `TypeError`, as Python does, for a keyword that is not in the signature of `called`.

    `elsewhere` maps a keyword to advice on where to set it instead.
    """
    known = inspect.signature(called).parameters
    for keyword in given:
        if keyword not in known:
            advice = suggest(keyword, known) or elsewhere.get(keyword, "")
            raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}{advice and '; '}{advice}")


def of_graph(given: Mapping[str, Any]) -> GraphKeywords:
    """Return the keywords of the training graph."""
    return cast(
        "GraphKeywords", {name: value for name, value in given.items() if name in GraphKeywords.__annotations__}
    )


def of_steps(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of local steps."""
    return {name: value for name, value in given.items() if name not in GraphKeywords.__annotations__}
