"""Keyword arguments that `train`, `Hub`, `Agent`, `Peer` and `join` have in common."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args, get_type_hints

from msgspec import UNSET

from edgeasync.autodiff.settings import Base
from edgeasync.config import suggest
from edgeasync.lora import LoraSetting
from edgeasync.losses import LossSetting

Called = TypeVar("Called", bound=Callable[..., object])


class LocalKeywords(TypedDict, total=False):
    """Settings of a device's local steps."""

    optimizer: object
    """An optimizer such as `SGD(learning_rate=0.1)`, or a list of stages."""
    batch_size: int | None
    """Examples per local step or, with `accumulation_steps`, per batch of a local step."""
    metrics: object
    """Metrics of `edgeasync.metrics`, as objects or names; the callback `on_update` receives them."""
    keep_optimizer_state: bool | None
    """Whether the optimizer's momentum and moving averages are kept across exchanges."""


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
    recompute: bool
    """Compute layers twice, to save memory."""
    lora: LoraSetting | None
    """Train LoRA adapters only: a rank, `"8:*.q_proj"`, or an object of `edgeasync.lora`."""
    base: Base | None
    """Quantize frozen weights to "int8" or "int4"."""


class DeviceKeywords(TypedDict, total=False):
    """Keys of `[agent]` and `[limits]` in a settings file (docs/reference/settings/agent.md)."""

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
    base_cache: str | Path
    base_cache_bytes_max: int | str
    graph_bytes_max: int | str
    parameters_max: int | None
    bandwidth_bytes_per_s_max: int | str | None
    link_share: float | None
    bytes_per_day_max: int | str | None
    alone_steps_max: int


class AgentKeywords(LocalKeywords, DeviceKeywords, total=False):
    """Keyword arguments of an `Agent`: keys of its settings file, and local training settings.

    The local training settings override the hub's.
    """

    loss: LossSetting | None
    """The loss that the hub's training graph must have; a graph with another loss is rejected."""


class TrainingKeywords(LocalKeywords, GraphKeywords, total=False):
    """Training settings of a `Hub` or of `train`."""

    accumulation_steps: int | None
    """Number of batches per local step."""
    micro_batch_size: int | str | None
    """Maximum number of examples that the model processes at once.

    With `"auto"`, it is chosen by speed and memory use.
    """


def show_keywords(function: Called) -> Called:
    """Add the keys of `**keys: Unpack[...]` to the function's signature, for `help` and editors."""
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

    `elsewhere` maps such keywords to a text about where to set them instead.
    """
    known = inspect.signature(called).parameters
    for keyword in given:
        if keyword not in known:
            advice = suggest(keyword, known) or elsewhere.get(keyword, "")
            raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}{advice and '; '}{advice}")


def of_graph(given: Mapping[str, Any]) -> GraphKeywords:
    """Return those keyword arguments that configure the training graph."""
    return cast(
        "GraphKeywords", {name: value for name, value in given.items() if name in GraphKeywords.__annotations__}
    )


def of_steps(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those keyword arguments that configure local steps."""
    return {name: value for name, value in given.items() if name not in GraphKeywords.__annotations__}
