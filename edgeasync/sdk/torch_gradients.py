"""The gradients of an exported module, held against torch's."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from edgeasync.autodiff.build import TrainingGraph, build_training_graph
from edgeasync.autodiff.check import without_dropout
from edgeasync.autodiff.contract import GRADIENT, parameter_of
from edgeasync.autodiff.forward import first_line, open_session
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.sdk.torch_calls import Call, Grads, flat, quiet

Gradients = dict[str, dict[str, npt.NDArray[np.float32]]]
"""By output and parameter."""

APART_MAX = 1e-3
"""How far a parameter's gradient may be off torch's, as a share of its largest value: sums in another order."""

NOISE = 1e-5
"""How far it may be off as a share of the largest gradient of all."""

SPREADS = 4.0
"""How far it may be off as a multiple of what torch's own moves by if parameters move by `NUDGE`."""

NUDGE = 1e-6
"""A few units in float32's last place."""

MOVED = 0.05
"""How far from their first values parameters are moved, as a share: one that is 0 hides what is behind it."""

ROWS_MIN = 8
"""Examples: with two of them a batch norm has next to no gradient."""

ITSELF = "train the module itself, by edgeasync.torch.model"

POINTS, POINTS_MAX = 2, 6
"""At how many points gradients are compared, and how many are drawn for that: some have a kink nearby."""


def check_export(module: nn.Module, call: Call, outputs: list[str], content: bytes, grads: Grads) -> None:
    """Raise `GraphError` unless training graphs have the module's names, and its gradients for each output."""
    graphs, refused = _build(content, outputs)
    sessions = {output: open_session(without_dropout(graph.model)) for output, graph in graphs.items()}
    compared = False
    for point in _points(module, call, outputs):
        if point.random and grads.stopped:
            raise GraphError(
                f"{type(module).__name__} draws random numbers and stops gradients, so nothing tells whether the "
                f"exported model stops them, too; {ITSELF}"
            )
        for output, session in sessions.items():
            results = _run(session, point, output)
            if not point.random:
                _compare(point, output, results, grads)
        compared = True
    if not compared:
        raise GraphError(
            f"{type(module).__name__} has no finite gradients, neither at random examples nor near those of "
            "example; give an example that it can be trained on"
        )
    _check_names(module, graphs, refused)


def _build(content: bytes, outputs: list[str]) -> tuple[dict[str, TrainingGraph], list[GraphError]]:
    """Return a training graph for each output that can be trained, and why others cannot be.

    Raises `GraphError` if there is none.
    """
    graphs, refused = {}, []
    for output in outputs:
        try:
            graphs[output] = build_training_graph(content, GraphSettings(loss="mse", output=output))
        except GraphError as error:
            refused.append(error)
    if not graphs:
        raise refused[0]
    return graphs, refused


def _check_names(module: nn.Module, graphs: dict[str, TrainingGraph], refused: list[GraphError]) -> None:
    trained = {name for name, tensor in module.named_parameters() if tensor.requires_grad}
    found = {each.name for graph in graphs.values() for each in graph.spec.parameters if each.role == "trained"}
    if trained - found and refused:
        raise refused[0]
    if found != trained:
        name = min(found ^ trained)
        where = "the exported model" if name in found else type(module).__name__
        raise GraphError(
            f"only {where} has a trained array {name!r}; use each parameter in forward where a gradient reaches "
            "it, and no others, or freeze it by requires_grad_(False)"
        )


class _Point(NamedTuple):
    """Arrays by name, targets by output, torch's gradients there, and how far these move by themselves.

    `random` is whether torch gives other gradients each time.
    """

    feeds: dict[str, npt.NDArray[Any]]
    targets: dict[str, Tensor]
    gradients: Gradients
    spreads: Gradients
    random: bool

    @property
    def unrest(self) -> float:
        """How far any gradient moves by itself, as a share of how far it may be off."""
        return max(
            float((self.spreads[output][name] / _allowed(name, own)).max())
            for output, own in self.gradients.items()
            for name in own
        )


def _allowed(name: str, gradients: dict[str, npt.NDArray[np.float32]]) -> float:
    largest = max(float(np.abs(gradient).max()) for gradient in gradients.values())
    return max(APART_MAX * float(np.abs(gradients[name]).max()), NOISE * largest, 1e-12)


def _points(module: nn.Module, call: Call, outputs: list[str]) -> Iterator[_Point]:
    """Yield points at which gradients are finite: calm ones, or else the calmest."""
    restless = []
    calm = 0
    for number in range(POINTS_MAX):
        point = next((found for kind in _KINDS if (found := _point(module, call, outputs, number, kind))), None)
        if point is None:
            continue
        if point.random or point.unrest < 1 / SPREADS:
            yield point
            calm += 1
            if point.random or calm == POINTS:
                return
        else:
            restless.append(point)
    if not calm and restless:
        yield min(restless, key=lambda point: point.unrest)


_KINDS = ("random", "near", "positive")
"""Examples are random; or near those of the user; or random and positive, as a logarithm wants them."""


def _point(module: nn.Module, call: Call, outputs: list[str], number: int, kind: str) -> _Point | None:
    """Return a point, or nothing where torch cannot compute finite gradients."""
    generator = np.random.Generator(np.random.PCG64([number, _KINDS.index(kind)]))
    batch = call._replace(tensors=tuple([_drawn(tensor, kind, generator) for tensor in call.tensors]))

    def use(moved: nn.Module) -> _Point:
        _move(moved, MOVED, generator)
        feeds = dict(zip(batch.names, [tensor.numpy() for tensor in batch.tensors], strict=True))
        feeds |= {name: tensor.detach().numpy().copy() for name, tensor in moved.state_dict().items()}
        targets = {
            output: torch.from_numpy(generator.standard_normal(tuple(value.shape)).astype(np.float32))
            for output, value in zip(outputs, _returned(moved, batch), strict=True)
            if value.is_floating_point()
        }
        gradients, again = [_gradients(moved, batch, outputs, targets) for _ in range(2)]
        random = any(not np.array_equal(a, b) for a, b in _pairs(gradients, again))
        _move(moved, NUDGE, generator)
        nudged = _gradients(moved, batch, outputs, targets)
        spreads = {
            output: {name: np.abs(nudged[output][name] - gradient) for name, gradient in own.items()}
            for output, own in gradients.items()
        }
        return _Point(feeds, targets, gradients, spreads, random)

    try:
        point = quiet(module, use)
    except Exception:  # noqa: BLE001 - a module may refuse examples by any error
        return None
    finite = all(np.isfinite(a).all() and np.isfinite(b).all() for a, b in _pairs(point.gradients, point.spreads))
    return point if finite else None


def _drawn(example: Tensor, kind: str, generator: np.random.Generator) -> Tensor:
    """Return a batch like the example's."""
    rows = max(len(example), ROWS_MIN)
    near = example.repeat(-(-rows // len(example)), *[1] * (example.ndim - 1))[:rows].clone()
    if example.is_floating_point():
        values = torch.from_numpy(generator.standard_normal(tuple(near.shape))).to(example.dtype)
        if kind == "near":
            return near + MOVED * near.abs().mean().clamp(min=0.1) * values
        return values if kind == "random" else values.abs() + MOVED
    if kind == "near":
        return near
    low, high = (0, 1) if example.dtype == torch.bool else (int(example.min()), int(example.max()))
    drawn = generator.integers(low, max(high, low + 1), tuple(near.shape), endpoint=True)
    return torch.from_numpy(drawn).to(example.dtype)


def _move(module: nn.Module, share: float, generator: np.random.Generator) -> None:
    """Move what is trained by a share of its size."""
    with torch.no_grad():
        for tensor in module.parameters():
            if tensor.requires_grad:
                size = share * max(float(tensor.square().mean().sqrt()), 0.1)
                tensor.add_(torch.from_numpy(generator.standard_normal(tuple(tensor.shape))), alpha=size)


def _returned(module: nn.Module, batch: Call) -> list[Tensor]:
    return list(flat(batch.of(module, batch.tensors)).values())


def _gradients(module: nn.Module, batch: Call, outputs: list[str], targets: dict[str, Tensor]) -> Gradients:
    """Return torch's gradients of a mean squared error of each output."""
    trained = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    found: Gradients = {}
    for output, value in zip(outputs, _returned(module, batch), strict=True):
        if output not in targets:
            continue
        loss = nn.functional.mse_loss(value, targets[output])
        own: Sequence[Tensor | None] = [None] * len(trained)
        if loss.requires_grad:
            own = torch.autograd.grad(loss, list(trained.values()), retain_graph=True, allow_unused=True)
        found[output] = {
            name: np.zeros(tuple(tensor.shape), np.float32) if gradient is None else gradient.numpy()
            for (name, tensor), gradient in zip(trained.items(), own, strict=True)
        }
    return found


def _pairs(one: Gradients, other: Gradients) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    for output, own in one.items():
        for name, gradient in own.items():
            yield gradient, other[output][name]


def _run(session: Any, point: _Point, output: str) -> dict[str, npt.NDArray[np.float32]]:
    """Return the gradients of a training graph by parameter."""
    feeds = point.feeds | {"target": point.targets[output].numpy()}
    read = {
        entry.name: feeds[entry.name].astype(np.int64 if entry.type == "tensor(int64)" else np.float32)
        for entry in session.get_inputs()
    }
    names = [entry.name for entry in session.get_outputs() if entry.name.endswith(GRADIENT)]
    try:
        return dict(zip(map(parameter_of, names), session.run(names, read), strict=True))
    except Exception as error:
        rows = len(point.targets[output])
        raise GraphError(
            f"the exported model does not run on {rows} examples ({first_line(error)}); {ITSELF}"
        ) from error


def _compare(point: _Point, output: str, results: dict[str, npt.NDArray[np.float32]], grads: Grads) -> None:
    own = point.gradients[output]
    for name, gradient in own.items():
        # A parameter that the output does not depend on is none of its training graph's.
        apart = np.abs(results.get(name, np.float32(0.0)) - gradient)
        allowed = _allowed(name, own) + SPREADS * float(point.spreads[output][name].max(initial=0.0))
        if not apart.max(initial=0.0) <= allowed:
            raise GraphError(
                f"the gradient of {name!r} in the exported model is {apart.max():.2g} off torch's, where its "
                f"largest is {np.abs(gradient).max():.2g}; {grads.advice}{ITSELF}"
            )
