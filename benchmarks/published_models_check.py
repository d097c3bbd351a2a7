"""Exports one published model, builds its training graph, and compares the gradients with torch's.

`python -m benchmarks.published_models_check draw LIBRARY SEED COUNT` prints the drawn models, and
`... check LIBRARY SEED MODEL` prints what happened to one. Each prints one JSON object as its last
line.
"""

import contextlib
import copy
import io
import json
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils import _pytree

from benchmarks import published_models_onnx as in_torch
from benchmarks.published_models_limits import ERROR_RATIO_MAX, EXACT, WRONG, WRONG_RATIO_MAX
from benchmarks.published_models_make import Example, draw, example_of, make
from benchmarks.published_models_sides import Follower, Recorder, deciding
from edgeasync.autodiff.build import TrainingGraph, build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError, arguments

BATCH, FLAGS_MAX = 4, 3

INPUTS = 4
"""How many inputs are compared. The medians of their errors count."""

SIDES = ("ours", "torch")
PROVIDERS = ["CPUExecutionProvider"]
MEMORY = 12 << 30
"""Bytes of address space that a process may use."""

PROCESSOR_S = 900
"""Seconds of processor time that a process may use."""

Array = np.ndarray[Any, np.dtype[Any]]
Gradients = dict[str, Array]
Outcome = dict[str, Any]


# -- export ----------------------------------------------------------------------------------------


def export(library: str, module: Any, example: Example) -> tuple[bytes, str]:
    """Export as the library's users would; return the file and how it was made."""
    if library == "openwakeword":
        return module, "as shipped"
    if library == "Keras":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            module.export(str(path), format="onnx", verbose=False)
            return onnx.load(path).SerializeToString(), "Model.export"
    free = {name: {0: torch.export.Dim("batch")} for name in example}
    one = {name: value[:1] for name, value in example.items()}
    for given, shapes, how in ((example, free, "dynamo"), (one, None, "dynamo, batch of 1")):
        target = io.BytesIO()
        try:
            torch.onnx.export(
                module, (), target, kwargs=given, dynamo=True, optimize=False, external_data=False,
                verbose=False, dynamic_shapes=shapes, input_names=list(example),
            )  # fmt: skip
            onnxruntime.InferenceSession(target.getvalue(), _options(), PROVIDERS).run(
                None, {name: value.numpy() for name, value in given.items()}
            )
        except Exception:  # noqa: BLE001 - of torch, or of onnxruntime for the exporter's file
            continue
        return target.getvalue(), how
    return _by_older_exporter(module, example), "older exporter"


def _by_older_exporter(module: nn.Module, example: Example) -> bytes:
    """Export with batch norms in training mode, so that they are not folded."""
    target, norms = io.BytesIO(), list(norms_of(module))
    for norm in norms:
        norm.train()
    torch.onnx.export(
        module, (), target, kwargs=example, dynamo=False, training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False, opset_version=18, input_names=list(example),
        dynamic_axes={name: {0: "batch"} for name in example},
    )  # fmt: skip
    for norm in norms:
        norm.eval()
    return target.getvalue()


def norms_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the batch norms of a module."""
    return (part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm))  # noqa: SLF001


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return options


# -- build -----------------------------------------------------------------------------------------


def build(model: bytes) -> tuple[TrainingGraph, GraphSettings, list[str]]:
    """Build a training graph; set at most `FLAGS_MAX` flags, each of which a message has named.

    Returns the flags as well. Raises `GraphError` if a message names no flag, or only `freeze`,
    because then most of the model would not be trained.
    """
    settings, flags = GraphSettings(), list[str]()
    while True:
        try:
            return build_training_graph(model, settings), settings, flags
        except GraphError as error:
            advice = arguments(str(error).partition("; after that: ")[0])
            name = next((name for name in ("output", "loss", "train") if name in advice), None)
            if name is None or len(flags) == FLAGS_MAX:
                error.add_note(", ".join(flags))
                raise
            value = advice[name]
            if name == "train":
                value = tuple(dict.fromkeys([*(settings.train or ()), *value]))
            settings = msgspec.structs.replace(settings, **{name: value})
            first, *more = [value] if isinstance(value, str) else value
            flags.append(f"--{name} {first}" + f" and {len(more)} more" * bool(more))


# -- gradients -------------------------------------------------------------------------------------


def loss_of(scores: Tensor, target: Array, settings: GraphSettings) -> Tensor:
    """Return the loss of a training graph, computed by torch."""
    kind = settings.loss if isinstance(settings.loss, str) else ""
    values = torch.from_numpy(target)
    if kind == "cross_entropy":
        return F.cross_entropy(scores, values)
    values = values.to(scores.dtype)
    return F.mse_loss(scores, values) if kind == "mse" else F.binary_cross_entropy_with_logits(scores, values)


class Oracle:
    """Computes a model's gradients in torch: by its own module, or by running the file."""

    def __init__(
        self, module: Any, model: bytes, made: TrainingGraph, settings: GraphSettings, example: Example
    ) -> None:
        self._settings, self.module = settings, module
        self.proto = in_torch.parse(model)
        self._names = {entry.name: entry.role for entry in made.spec.parameters}
        self._initial = made.spec.views(made.initial)
        names = [entry.name for entry in self.proto.graph.output]
        self.output = prediction_of(made.model)
        plain = isinstance(module, nn.Module) and not _is_keras(module)
        self.own = plain and self.output in names and _accepts_float64(module, example)
        """Whether the module itself computes the output that is trained."""
        self._place = names.index(self.output) if self.own else 0

    def __call__(
        self, feeds: Mapping[str, Array], target: Array, kind: torch.dtype, apply: in_torch.Apply | None = None
    ) -> Gradients:
        """Return the gradients of the parameters, computed in float32 or float64.

        If `apply` is set, torch runs the file, and this function computes the operators.
        """
        torch.set_default_dtype(kind)
        inputs = {
            name: torch.from_numpy(value).to(kind if value.dtype.kind == "f" else None)
            for name, value in feeds.items()
        }
        try:
            if self.own and apply is None:
                return self._by_module(inputs, target, kind)
            return self._by_file(inputs, target, kind, apply or in_torch.compute)
        finally:
            torch.set_default_dtype(torch.float32)

    def _by_module(self, inputs: Mapping[str, Tensor], target: Array, kind: torch.dtype) -> Gradients:
        module = copy.deepcopy(self.module).to(kind).requires_grad_(True)  # files do not say what is frozen
        for norm in norms_of(module):
            norm.train()
        named = dict(module.named_parameters())
        found = [leaf for leaf in _pytree.tree_leaves(module(**inputs)) if isinstance(leaf, Tensor)]
        loss = loss_of(found[self._place], target, self._settings)
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return {
            name: gradient.numpy() for name, gradient in zip(named, gradients, strict=True) if gradient is not None
        }

    def _by_file(
        self, inputs: Mapping[str, Tensor], target: Array, kind: torch.dtype, apply: in_torch.Apply
    ) -> Gradients:
        trained = [name for name, role in self._names.items() if role == "trained"]
        values = {name: torch.from_numpy(self._initial[name].copy()).to(kind) for name in trained}
        for value in values.values():
            value.requires_grad_()
        live = {name for name, role in self._names.items() if role == "statistic"}
        scores = in_torch.run(self.proto, {**inputs, **values}, live, self.output, apply)
        gradients = torch.autograd.grad(loss_of(scores, target, self._settings), list(values.values()))
        return {name: gradient.numpy() for name, gradient in zip(trained, gradients, strict=True)}


def _accepts_float64(module: nn.Module, example: Example) -> bool:
    """Return whether a module runs in float64. Those that cast to float32 do not."""
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in example.items()}
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            copy.deepcopy(module).double()(**inputs)
    except RuntimeError:
        return False
    finally:
        torch.set_default_dtype(torch.float32)
    return True


def _is_keras(module: Any) -> bool:
    return type(module).__module__.startswith("keras.")


def prediction_of(training: bytes) -> str:
    """Return the name of the output that the loss reads."""
    notes = {entry.key: entry.value for entry in onnx.load_model_from_string(training).metadata_props}
    return str(notes["edgeasync.output"])


def feeds_of(
    session: onnxruntime.InferenceSession, made: TrainingGraph, example: Example, seed: int
) -> tuple[Gradients, Array]:
    """Draw the inputs and the target of a training graph."""
    generator = np.random.Generator(np.random.PCG64(seed))
    notes = session.get_modelmeta().custom_metadata_map
    own, feeds = {entry.name for entry in made.spec.parameters}, Gradients()
    entries = {entry.name: entry for entry in session.get_inputs() if entry.name not in own}
    rows = BATCH
    for name, entry in entries.items():
        if name != "target":
            rows = entry.shape[0] if isinstance(entry.shape[0], int) else BATCH
            shape = [rows, *entry.shape[1:]]
            given = example.get(name)
            if entry.type == "tensor(int64)":
                low, high = (1, 2) if given is None else (int(given.min()), int(given.max()) + 1)
                feeds[name] = generator.integers(low, high, shape)
            else:
                feeds[name] = generator.standard_normal(shape).astype(np.float32)
    sizes = [rows if not isinstance(size, int) else size for size in entries["target"].shape]
    if entries["target"].type == "tensor(int64)":
        return feeds, generator.integers(0, int(notes["edgeasync.classes"]), sizes)
    if "bce" in notes["edgeasync.loss"]:
        return feeds, generator.integers(0, 2, sizes).astype(np.float32)
    return feeds, generator.standard_normal(sizes).astype(np.float32)


class Errors:
    """The errors of both sides for several inputs, of all gradients together and of each."""

    def __init__(self, names: Sequence[str]) -> None:
        self._totals: dict[str, list[float]] = {side: [] for side in SIDES}
        self._parts: dict[str, dict[str, list[float]]] = {side: {name: [] for name in names} for side in SIDES}

    def add(self, side: str, found: Mapping[str, Array | None], exact: Mapping[str, Array | None]) -> None:
        """Add the errors for one input."""
        total, each = errors_of(found, {name: exact.get(name) for name in self._parts[side]})
        self._totals[side].append(total)
        for name, error in each.items():
            self._parts[side][name].append(error)

    def medians(self) -> Outcome:
        """Return the medians, their ratio, and the parameter with the largest ratio."""
        floor = WRONG / WRONG_RATIO_MAX
        by_name = {name: {side: self._parts[side][name] for side in SIDES} for name in self._parts["ours"]}
        ratios = {name: _ratio(errors, floor) for name, errors in by_name.items()}
        worst = max(ratios, key=lambda name: ratios[name])
        return {
            "error ratio": _ratio(self._totals),
            "error": statistics.median(self._totals["ours"]),
            "torch error": statistics.median(self._totals["torch"]),
            "worst": worst,
            "worst ratio": ratios[worst],
            "worst error": statistics.median(by_name[worst]["ours"]),
            "worst torch error": statistics.median(by_name[worst]["torch"]),
        }


def compare(oracle: Oracle, made: TrainingGraph, example: Example, seed: int) -> Outcome:
    """Compare all gradients with torch's in float64, for several inputs.

    If our error exceeds a limit, both sides are compared once more, on the same sides of all kinks.
    """
    session, session_s = _timed(partial(onnxruntime.InferenceSession, made.model, _options(), PROVIDERS))
    trained = [entry.name for entry in made.spec.parameters if entry.role == "trained"]
    same = _matched(made, oracle.module) if oracle.own else {name: name for name in trained}
    own = [name for name in trained if name in same]
    steps: dict[str, list[float]] = {side: [] for side in SIDES}
    errors, missing = Errors(own), set[str]()
    drawn = [feeds_of(session, made, example, seed + number) for number in range(INPUTS)]
    names = [f"{name}.grad" for name in own]
    values = made.spec.views(made.initial)
    ours = [_timed(partial(session.run, names, {**feeds, "target": target, **values})) for feeds, target in drawn]
    del session  # torch needs the memory
    for (feeds, target), (results, ours_s) in zip(drawn, ours, strict=True):
        exact = oracle(feeds, target, torch.float64)
        missing.update(name for name, value in exact.items() if value.any() and name not in same.values())
        rounded, torch_s = _timed(partial(oracle, feeds, target, torch.float32))
        expected = {name: exact.get(same[name]) for name in own}
        found = {"ours": dict(zip(own, results, strict=True)), "torch": {n: rounded.get(same[n]) for n in own}}
        for side, took_s in (("ours", ours_s), ("torch", torch_s)):
            steps[side].append(took_s)
            errors.add(side, found[side], expected)
    told = errors.medians()
    plain, told["distance"] = told["error ratio"], 0.0
    if plain > ERROR_RATIO_MAX or told["worst ratio"] > WRONG_RATIO_MAX:
        # The errors on any side count if torch cannot run the file.
        with contextlib.suppress(KeyError):
            told |= compare_on_same_sides(oracle, made, drawn, {name: same[name] for name in own})
    return told | {
        "plain ratio": plain,
        "oracle": "module" if oracle.own else "file",
        "unknown": [name for name in trained if name not in same],
        "missing": sorted(missing),
        "session s": session_s,
        "step s": statistics.median(steps["ours"]),
        "torch step s": statistics.median(steps["torch"]),
    }


def compare_on_same_sides(
    oracle: Oracle, made: TrainingGraph, drawn: Sequence[tuple[Gradients, Array]], same: Mapping[str, str]
) -> Outcome:
    """Compare gradients with those in float64 on the same sides of all kinks, for us and for torch.

    `distance` is the largest distance of the values that decide on the sides from those in float64.
    If torch's module is the oracle, it includes the distance of the module's gradients from the file's.
    """
    own, proto = list(same), onnx.load_model_from_string(made.model)
    decides = deciding(oracle.proto, {name for node in proto.graph.node for name in node.output})
    asked, outputs = [*dict.fromkeys(decides.values())], {entry.name for entry in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in asked if name not in outputs)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), _options(), PROVIDERS)
    errors, distance = Errors(own), 0.0
    if oracle.own:
        by_module = oracle(*drawn[0], torch.float64)
        by_file = oracle(*drawn[0], torch.float64, in_torch.compute)
        distance = errors_of(by_file, {name: by_module.get(same[name]) for name in own})[0]
    for feeds, target in drawn:
        given = {**feeds, "target": target, **made.spec.views(made.initial)}
        results = session.run([*(f"{name}.grad" for name in own), *asked], given)
        values = dict(zip(asked, map(torch.from_numpy, results[len(own) :]), strict=True))
        seen = {name: values[real] for name, real in decides.items()}
        recorder = Recorder()
        rounded = oracle(feeds, target, torch.float32, recorder)
        found = {"ours": (dict(zip(own, results, strict=False)), seen), "torch": (rounded, recorder.seen)}
        for side, (gradients, chosen) in found.items():
            follower = Follower(chosen)
            errors.add(side, gradients, oracle(feeds, target, torch.float64, follower))
            distance = max(distance, follower.distance)
    return errors.medians() | {"distance": distance}


def _ratio(errors: Mapping[str, Sequence[float]], floor: float = EXACT / ERROR_RATIO_MAX) -> float:
    """Return the median of our errors over that of torch's, or over `floor` if that is larger."""
    ours, torch_ = [float(np.median(errors[side])) for side in SIDES]
    return ours / max(torch_, floor)


def errors_of(
    found: Mapping[str, Array | None], exact: Mapping[str, Array | None]
) -> tuple[float, dict[str, float]]:
    """Return the relative error of all gradients together, and of each.

    `None` is a gradient of zeros. The error of a gradient that should be almost zero is relative to
    a ten-thousandth of the norm of all gradients.
    """
    sizes = {name: 0.0 if value is None else float(np.linalg.norm(value)) for name, value in exact.items()}
    whole = float(np.linalg.norm([*sizes.values()]))
    off = {}
    for name, expected in exact.items():
        value = found[name]
        pair = [np.float64(0) if each is None else each.ravel() for each in (value, expected)]
        off[name] = float(np.linalg.norm(pair[0] - pair[1]))
    total = float(np.linalg.norm([*off.values()]))
    return total / whole if whole else np.nan, {name: off[name] / max(sizes[name], 1e-4 * whole) for name in off}


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    started_s = time.perf_counter()
    return function(), time.perf_counter() - started_s


def _matched(made: TrainingGraph, module: nn.Module) -> dict[str, str]:
    """Return the module's name of each trained parameter: the same name, or else equal values."""
    own, found = dict(module.named_parameters()), dict[str, str]()
    every = dict(module.named_parameters(remove_duplicate=False))
    by_values = {value.detach().numpy().tobytes(): name for name, value in own.items()}
    first = {id(value): name for name, value in own.items()}
    for name, value in made.spec.views(made.initial).items():
        if name in own:
            found[name] = name
        elif name in every:
            found[name] = first[id(every[name])]
        elif value.tobytes() in by_values:
            found[name] = by_values[value.tobytes()]
    return found


# -- one model -------------------------------------------------------------------------------------


def check(library: str, name: str, seed: int) -> Outcome:
    """Return what happened to a model: whether it was exported, built and exact, and how fast."""
    told: Outcome = {"library": library, "model": name}
    try:
        called = make(library, name, seed)
        example = example_of(library, called)
        # Some modules keep tensors of their first run, which must not be constants of the file.
        made_anew: Callable[[], Any] = (
            (lambda: called) if _is_keras(called) else partial(make, library, name, seed)
        )
        model, told["export"] = export(library, made_anew(), example)
        module = made_anew()
    except Exception as error:  # noqa: BLE001 - of a library
        while isinstance(error.__cause__, Exception):
            error = error.__cause__
        return told | {"outcome": "not exported", "reason": f"{type(error).__name__}: {error}"[:2000]}
    told["forward nodes"] = len(onnx.load_model_from_string(model).graph.node)
    started_s = time.perf_counter()
    try:
        made, settings, told["flags"] = build(model)
    except GraphError as error:
        return told | {"outcome": "refused", "reason": str(error), "flags": [*getattr(error, "__notes__", [])]}
    told["build s"] = time.perf_counter() - started_s
    told["nodes"] = len(onnx.load_model_from_string(made.model).graph.node)
    told["parameters"] = sum(entry.size for entry in made.spec.parameters if entry.role == "trained")
    told["warnings"] = list(made.warnings)
    told |= compare(Oracle(module, model, made, settings, example), made, example, seed)
    return told | {"outcome": "built"}


def main() -> None:
    """Run the command in the arguments."""
    command, library, seed, what = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = draw(library, int(seed), int(what)) if command == "draw" else check(library, what, int(seed))
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
