"""Compares the gradients of an exported module with torch's."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from edgeasync.autodiff.build import TrainingGraph, build_training_graph
from edgeasync.autodiff.chance import without_chance
from edgeasync.autodiff.contract import GRADIENT, NEXT, parameter_of
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.probing import open_session
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError, argument, native_reason
from edgeasync.sdk.torch_calls import Call, flat, quiet
from edgeasync.sdk.torch_modules import first_line
from edgeasync.sdk.torch_written import Written
from edgeasync.training.graph_check import check_graph

Gradients = dict[str, npt.NDArray[np.float32]]
"""Arrays by parameter name."""

APART_MAX = 1e-3
"""Tolerance relative to a gradient's largest value; torch and the graph sum in different orders."""

NOISE = 1e-5
"""Tolerance relative to the largest gradient value of all parameters."""

SPREADS = 4.0
"""Tolerance as a multiple of the change in torch's gradient when parameters move by `NUDGE`."""

NUDGE = 1e-6
"""Relative change of parameters, equal to a few units in the last place of float32."""

MOVED = 0.05
"""Relative change applied to parameters before the comparison, because zeros would hide errors."""

ROWS_MIN = 8
"""Minimum number of examples; with only two, a batch norm has almost no gradient."""

LARGE = 2.0**20
"""A factor for the loss; if gradients do not scale with the loss, the module clips them."""

UNCLIPPED = (
    "which an exported model cannot express; to clip gradients, remove it and use the stage clip_by_global_norm "
    "before the optimizer, or train the module itself with edgeasync.torch.model"
)

ITSELF = "train the module itself with edgeasync.torch.model"

POINTS, POINTS_MAX = 2, 6
"""Number of points to compare, and maximum to try, because some are near a discontinuity."""


def check_export(module: nn.Module, call: Call, outputs: list[str], content: bytes, written: Written) -> None:
    """Raise `GraphError` unless the training graphs have the module's names and gradients."""
    graphs, refused = _build(content, outputs)
    for output, graph in graphs.items():
        session = open_session(without_chance(graph.model))
        # Parameters that a graph does not train are constants in it.
        trained = {parameter.name for parameter in graph.spec.parameters}
        for point in _points(_Scene(module, call, outputs.index(output), trained)):
            if point.random:
                raise GraphError(
                    f"{type(module).__name__} returns different gradients at each call, because of its own random "
                    "numbers or of state between calls, so the exported model cannot be compared with it; "
                    f"{ITSELF}"
                )
            if point.clipped:
                raise GraphError(
                    f"{type(module).__name__} clips gradients in the backward pass, with a hook or a custom "
                    f"function, {UNCLIPPED}"
                )
            results = _run(session, point)
            _compare(point, results, written)
            for name, value in point.moved.items():
                _compare_statistic(name, value, results.get(name + NEXT, value))
    _check_names(module, graphs, refused)


def evaluates_alike(module: nn.Module, call: Call, content: bytes) -> bool:
    """Return whether the inference model's outputs match the module's in evaluation mode."""
    feeds = {name: tensor.numpy() for name, tensor in zip(call.names, call.tensors, strict=True)}
    session = open_session(without_chance(export_model(content, {})))
    read = {entry.name for entry in session.get_inputs()}
    found = session.run(None, {name: value for name, value in feeds.items() if name in read})
    with torch.no_grad():
        expected = quiet(module, lambda copied: list(flat(call.of(copied.eval(), call.tensors)).values()))
    if [one.shape for one in found] != [tuple(other.shape) for other in expected]:
        return False
    for one, other in zip(found, expected, strict=True):
        exact = other.detach().double().numpy()
        if not np.allclose(
            one, exact, rtol=0.0, atol=APART_MAX * max(float(np.abs(exact).max(initial=0.0)), NOISE)
        ):
            return False
    return True


def _build(content: bytes, outputs: list[str]) -> tuple[dict[str, TrainingGraph], list[GraphError]]:
    """Return a training graph for each output that can be trained, and the errors of the others.

    Raises `GraphError` if no output can be trained.
    """
    graphs, refused = {}, []
    for output in outputs:
        try:
            graph = build_training_graph(content, GraphSettings(loss="mse", output=output))
            check_graph(graph.model, bytes_max=len(graph.model))
            graphs[output] = graph
        except GraphError as error:
            refused.append(error)
    if not graphs:
        raise refused[0]
    return graphs, refused


def _check_names(module: nn.Module, graphs: dict[str, TrainingGraph], refused: list[GraphError]) -> None:
    trained = {name for name, tensor in module.named_parameters() if tensor.requires_grad}
    buffers = {name for name, _ in module.named_buffers()}
    spec = {each for graph in graphs.values() for each in graph.spec.parameters}
    found = {each.name for each in spec if each.role == "trained" or each.name not in buffers}
    if trained - found and refused:
        raise refused[0]
    if missing := [name for name, _ in module.named_parameters() if name in trained - found]:
        raise GraphError(
            f"no gradient reaches {', '.join(missing)} of {type(module).__name__}; use these parameters in "
            f"forward, or pass {argument('freeze', *missing)}"
        )
    if more := found - trained:
        raise GraphError(
            f"the exported model trains {min(more)!r}, which is not a trained parameter of "
            f"{type(module).__name__}; {ITSELF}"
        )


class _Scene(NamedTuple):
    """A module, its call, the index of the trained output, and the parameters that may change."""

    module: nn.Module
    call: Call
    place: int
    moved: set[str]


class _Point(NamedTuple):
    """A point at which gradients are compared.

    - `feeds`: the inputs and parameters, by name.
    - `gradients`: torch's gradients.
    - `spreads`: the change of torch's gradients when parameters change by `NUDGE`.
    - `moved`: the tensors that a forward pass changes.
    - `random`: whether torch's gradients differ at each call.
    - `clipped`: whether torch's gradients do not scale with the loss.
    """

    feeds: dict[str, npt.NDArray[Any]]
    gradients: Gradients
    spreads: Gradients
    moved: Gradients
    random: bool
    clipped: bool

    def allowed(self, name: str) -> float:
        """Return the tolerance for a gradient, without regard to its spread."""
        largest = max(float(np.abs(gradient).max(initial=0.0)) for gradient in self.gradients.values())
        own = float(np.abs(self.gradients[name]).max(initial=0.0))
        return max(APART_MAX * own, NOISE * largest, 1e-12)

    @property
    def unrest(self) -> float:
        """The largest ratio of a gradient's spread to its tolerance."""
        return max(float(spread.max(initial=0.0)) / self.allowed(name) for name, spread in self.spreads.items())


def _points(scene: _Scene) -> Iterator[_Point]:
    """Yield points with finite and stable gradients.

    If no point is stable, yield the most stable one. Raises `GraphError` if no point has finite
    gradients.
    """
    restless: list[_Point] = []
    calm = 0
    trouble = "they are not finite"
    for number in range(POINTS_MAX):
        for kind in _KINDS:
            try:
                point = _point(scene, number, kind)
            except Exception as error:  # noqa: BLE001 - a module may raise any error
                trouble = first_line(error)
                continue
            if not all(np.isfinite(value).all() for value in (*point.gradients.values(), *point.spreads.values())):
                continue
            if point.random or point.unrest < 1 / SPREADS:
                yield point
                calm += 1
            else:
                restless.append(point)
            if point.random or calm == POINTS:
                return
            break
    if not calm and not restless:
        raise GraphError(
            f"the gradients of {type(scene.module).__name__} are not finite, neither at random examples nor near "
            f"the values of example ({trouble}); pass an example that the module can be trained on"
        )
    if not calm:
        yield min(restless, key=lambda point: point.unrest)


_KINDS = ("random", "near", "positive")
"""Kinds of examples: random, near the user's example, or random and positive (for logarithms)."""


def _point(scene: _Scene, number: int, kind: str) -> _Point:
    """Create a point; errors of the module are raised unchanged."""
    generator = np.random.Generator(np.random.PCG64([number, _KINDS.index(kind)]))
    before, batch = [tuple([_drawn(tensor, kind, generator) for tensor in scene.call.tensors]) for _ in range(2)]

    def use(module: nn.Module) -> _Point:
        _move(module, scene.moved, MOVED, generator)
        # The first forward pass may differ: a batch norm may average over the batches so far.
        shape = tuple(_returned(scene, module, before).shape)
        state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        feeds = dict(zip(scene.call.names, [tensor.numpy() for tensor in batch], strict=True))
        feeds |= {name: tensor.numpy() for name, tensor in state.items()}
        feeds["target"] = generator.standard_normal(shape).astype(np.float32)
        target = torch.from_numpy(feeds["target"])
        gradients = _gradients(scene, module, batch, target)
        moved = _moved(module, state)
        module.load_state_dict(state)
        again = _gradients(scene, module, batch, target)
        random = any(not np.array_equal(gradient, again[name]) for name, gradient in gradients.items())
        module.load_state_dict(state)
        large = _gradients(scene, module, batch, target, LARGE)
        clipped = any(_falls_short(large[name] / LARGE, gradient) for name, gradient in gradients.items())
        module.load_state_dict(state)
        _move(module, scene.moved, NUDGE, generator)
        nudged = _gradients(scene, module, batch, target)
        spreads = {name: np.abs(nudged[name] - gradient) for name, gradient in gradients.items()}
        return _Point(feeds, gradients, spreads, moved, random, clipped)

    found: _Point = quiet(scene.module, use)
    return found


def _falls_short(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> bool:
    return bool((np.abs(found) < np.abs(expected) / 2).any())


def _moved(module: nn.Module, before: dict[str, Tensor]) -> Gradients:
    """Return the floating-point parameters and buffers that a forward pass has changed.

    Buffers outside the module's state dict are skipped, because the module computes them.
    """
    return {
        name: tensor.detach().numpy().copy()
        for name, tensor in module.state_dict().items()
        if tensor.is_floating_point() and not torch.allclose(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    }


def moving(module: nn.Module, call: Call) -> set[str]:
    """Return the names of parameters and buffers that `forward` changes.

    Calls `forward` with inputs close to the user's example.
    """

    def use(module: nn.Module) -> set[str]:
        generator = np.random.Generator(np.random.PCG64(0))
        found = set[str]()
        for _ in range(2):
            state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
            call.of(module, tuple([_drawn(tensor, "near", generator) for tensor in call.tensors]))
            found.update(_moved(module, state))
        return found

    names: set[str] = quiet(module, use)
    return names


def _drawn(example: Tensor, kind: str, generator: np.random.Generator) -> Tensor:
    """Draw a batch with the shape and dtype of the example."""
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


def _move(module: nn.Module, names: set[str], share: float, generator: np.random.Generator) -> None:
    """Add noise to the parameters in `names`, in proportion to their values."""
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            if name in names:
                size = share * max(float(tensor.square().mean().sqrt()), 0.1)
                tensor.add_(torch.from_numpy(generator.standard_normal(tuple(tensor.shape))), alpha=size)


def _returned(scene: _Scene, module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    # Clones, because forward may change its input.
    return list(flat(scene.call.of(module, tuple([tensor.clone() for tensor in batch]))).values())[scene.place]


def _gradients(
    scene: _Scene, module: nn.Module, batch: tuple[Tensor, ...], target: Tensor, factor: float = 1.0
) -> Gradients:
    """Return torch's gradients of `factor` times the mean squared error."""
    trained = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    loss = factor * nn.functional.mse_loss(_returned(scene, module, batch), target)
    own: Sequence[Tensor | None] = [None] * len(trained)
    if loss.requires_grad:
        own = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {
        name: np.zeros(tuple(tensor.shape), np.float32) if gradient is None else gradient.to_dense().numpy()
        for (name, tensor), gradient in zip(trained.items(), own, strict=True)
    }


def _run(session: Any, point: _Point) -> Gradients:
    """Run a training graph; return the gradients of the parameters, and the running statistics."""
    feeds = {
        entry.name: point.feeds[entry.name].astype(np.int64 if entry.type == "tensor(int64)" else np.float32)
        for entry in session.get_inputs()
    }
    names = [entry.name for entry in session.get_outputs() if entry.name.endswith((GRADIENT, NEXT))]
    try:
        found = session.run(names, feeds)
    except Exception as error:
        rows = len(point.feeds["target"])
        raise GraphError(
            f"the exported model fails on {rows} examples ({native_reason(error)}); {ITSELF}"
        ) from error
    return {
        parameter_of(name) if name.endswith(GRADIENT) else name: value
        for name, value in zip(names, found, strict=True)
    }


def _compare(point: _Point, results: Gradients, written: Written) -> None:
    for name, gradient in point.gradients.items():
        # The output's training graph lacks parameters that the output does not depend on.
        apart = float(np.abs(results.get(name, np.float32(0.0)) - gradient).max(initial=0.0))
        if not apart <= point.allowed(name) + SPREADS * float(point.spreads[name].max(initial=0.0)):
            raise GraphError(
                f"the gradient of {name!r} in the exported model differs from torch's by up to {apart:.2g}, and "
                f"its largest value is {np.abs(gradient).max():.2g}; {written.advice}{ITSELF}"
            )


def _compare_statistic(name: str, expected: npt.NDArray[np.float32], found: npt.NDArray[np.float32]) -> None:
    apart = float(np.abs(found - expected).max(initial=0.0))
    if not apart <= APART_MAX * max(float(np.abs(expected).max(initial=0.0)), NOISE):
        raise GraphError(
            f"the running statistic {name!r} in the exported model differs from torch's by up to {apart:.2g}, and "
            f"its largest value is {np.abs(expected).max():.2g}; {ITSELF}"
        )
