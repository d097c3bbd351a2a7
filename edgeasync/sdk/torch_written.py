"""Rewrites torch calls during an export, so that the file contains what exporters would drop."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class Written(TorchFunctionMode):  # type: ignore[misc]
    """Rewrites calls that exporters do not support: stopped gradients, dropouts and embedding bags.

    Wherever gradients are stopped, for example by `torch.no_grad` or the padding row of an
    embedding, a `detach` is inserted. Exporters convert channel dropouts to masks that stay random
    in inference. This class therefore builds channel dropouts from plain dropouts. Embedding bags
    are rewritten as sums. `stopped` records the causes of stopped gradients. `kept` is true if the
    exporter supports `detach`.
    """

    def __init__(self, *, kept: bool) -> None:
        super().__init__()
        self.stopped: set[str] = set()
        """The causes of stopped gradients: `detach`, `detach_`, `data`, `no_grad` or `padding_idx`."""
        self.counted = False
        """Whether `len` was called on a tensor."""
        self.packed = False
        """Whether sequences were packed."""
        self._kept = kept

    @property
    def advice(self) -> str:
        """Advice for the case that gradients differ, to be shown before the general advice."""
        if self.lost:
            return "the legacy exporter does not write where torch stops gradients: "
        if "detach_" in self.stopped:
            return "exporters ignore detach_(): write h = h.detach() instead of h.detach_(), or "
        return ""

    @property
    def lost(self) -> set[str]:
        """The causes of stopped gradients that the file will not contain."""
        return set() if self._kept else self.stopped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.data.__get__:
            self.stopped.add("data")
            return args[0].detach()
        self.packed |= getattr(func, "__name__", "") == "_pack_padded_sequence"
        found = self._in_parts(func, args, kwargs)
        if func in (Tensor.detach, Tensor.detach_, torch.detach, torch.detach_):
            self.stopped.add(func.__name__)
        elif func is Tensor.__len__:
            self.counted = True
        elif not torch.is_grad_enabled():
            self.stopped.add("no_grad")
            return tree_map_only(Tensor, lambda one: one.detach() if one.is_floating_point() else one, found)
        return found

    def _in_parts(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if func is functional.embedding:
            return self._embedding(*args, **kwargs)
        if func is functional.embedding_bag:
            return _bag(*args, **kwargs)
        if func in (torch.bernoulli, Tensor.bernoulli) and len(args) == 1 and not kwargs:
            return (torch.rand_like(args[0]) < args[0]).to(args[0].dtype)
        if (dropout := _DROPOUTS.get(func)) is not None:
            return dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _embedding(
        self, ids: Tensor, table: Tensor, padding_idx: int | None = None, *rest: Any, **more: Any
    ) -> Tensor:
        found = functional.embedding(ids, table, padding_idx, *rest, **more)
        if padding_idx is None:
            return found
        self.stopped.add("padding_idx")
        return torch.where(_is(ids, table, padding_idx).unsqueeze(-1), found.detach(), found)


def _bag(ids: Tensor, table: Tensor, offsets: Tensor | None = None, **options: Any) -> Tensor:
    """Return the sum or mean of each row of embeddings, without padding."""
    mode, padding, weights = [options.get(name) for name in ("mode", "padding_idx", "per_sample_weights")]
    changed = options.get("max_norm") is not None or options.get("scale_grad_by_freq")
    if ids.ndim != 2 or offsets is not None or mode not in ("sum", "mean") or changed:
        return functional.embedding_bag(ids, table, offsets, **options)
    found = functional.embedding(ids, table)
    if weights is not None:
        found = found * weights.unsqueeze(-1)
    if padding is None:
        return found.sum(1) if mode == "sum" else found.mean(1)
    counted = (~_is(ids, table, padding)).to(found.dtype).unsqueeze(-1)
    total = (found * counted).sum(1)
    return total if mode == "sum" else total / counted.sum(1).clamp(min=1.0)


def _is(ids: Tensor, table: Tensor, row: int) -> Tensor:
    return ids == (row if row >= 0 else len(table) + row)


def _channels(unbatched: int) -> Callable[..., Tensor]:
    """Return a channel dropout; `unbatched` is the number of axes of an unbatched input."""

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG001, FBT001, FBT002
        return x * _mask(x, 1 if x.ndim == unbatched else 2, p, training=training)

    return dropout


def _mask(x: Tensor, axes: int, p: float, *, training: bool) -> Tensor:
    """Return a dropout mask that is constant along all but the first `axes` axes of `x`."""
    first = x[(slice(None),) * axes + (slice(1),) * (x.ndim - axes)]
    return functional.dropout(torch.ones_like(first), p, training)


def _alpha(axes: int | None) -> Callable[..., Tensor]:
    """Return a dropout that preserves mean and variance (Klambauer et al. 2017).

    If `axes` is set, it drops whole channels, otherwise single values.
    """

    def dropout(x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:  # noqa: ARG001, FBT001, FBT002
        if not training or p in (0.0, 1.0):
            return x * 0.0 if training and p else x
        mask = _mask(x, x.ndim if axes is None else axes, p, training=True)
        scale = ((1 - p) * (1 + p * _SATURATED**2)) ** -0.5
        shift = -scale * _SATURATED * p
        # In inference the mask is 1.
        kept = torch.where(mask > 1, scale * x + shift, x)
        return torch.where(mask == 0, torch.full_like(x, scale * _SATURATED + shift), kept)

    return dropout


_SATURATED = -1.7580993408473766
"""The limit of SELU for large negative inputs."""

_DROPOUTS = {
    functional.dropout1d: _channels(2),
    functional.dropout2d: _channels(0),
    functional.dropout3d: _channels(4),
    functional.alpha_dropout: _alpha(None),
    functional.feature_alpha_dropout: _alpha(2),
    torch.feature_dropout: _channels(0),
    torch.alpha_dropout: _alpha(None),
    torch.feature_alpha_dropout: _alpha(2),
}


class Branches(TorchFunctionMode):  # type: ignore[misc]
    """Records where `forward` converts a tensor to a bool, and can invert one of these bools."""

    def __init__(self, turned: int | None = None) -> None:
        super().__init__()
        self.places: list[str] = []
        self._turned = turned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, bool) and getattr(func, "__name__", "") in _ASKING:
            self.places.append(_place())
            return found ^ (self._turned == len(self.places) - 1)
        return found


_ASKING = frozenset({"__bool__", "__contains__", "allclose", "equal", "is_nonzero", "item"})


def _place() -> str:
    """Return the file and line of the module's code that is running."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_OUTSIDE)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"


def decided(run: Callable[[], list[Tensor]]) -> str | None:
    """Return the line where a bool computed from a tensor changes the results of `run`, or `None`.

    A bool is ignored if inverting it raises an error, because it is then only a check.
    """
    with Branches() as asked:
        results = run()
    for number, place in enumerate(asked.places[:BRANCHES_MAX]):
        try:
            with Branches(number):
                others = run()
        except Exception:  # noqa: BLE001, S112 - a guard may raise any error
            continue
        pairs = zip(results, others, strict=False)
        if len(results) != len(others) or not all(torch.equal(one, other) for one, other in pairs):
            return str(place)
    return None


BRANCHES_MAX = 32
"""Maximum number of bools that are inverted."""
