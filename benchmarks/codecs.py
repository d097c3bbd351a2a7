"""What codecs cost and keep: encoding a delta, decoding and adding it, in multiples of copying the same memory.

Run as `python -m benchmarks.codecs`. All cases run on one thread, in turns. The delta is what a multilayer
perceptron with that number of parameters learns in sixteen local steps of SGD on the handwritten digits; features
and hidden units that are never active leave some zeros in it.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.report import Form, Results, make_parser, show_progress, show_results
from edgeasync.data import load_digits
from edgeasync.parameters import CHUNK, Vector
from edgeasync.protocol.codecs import STAGES, VectorCodec, VectorSource, make_codec
from edgeasync.training.numpy_models import MlpModel

TINY = {"20K": MlpModel(inputs=64, hidden=(128, 80), classes=10)}
MILLION = {"1M": MlpModel(inputs=64, hidden=(1024, 900), classes=10)}
MODELS = {
    Form.FULL: MILLION | {"25M": MlpModel(inputs=64, hidden=(4900, 5000), classes=10)},
    Form.SHORT: MILLION,
    Form.QUICK: TINY,
}
ROUNDS = {Form.FULL: 40, Form.SHORT: 10, Form.QUICK: 1}
"""Of a model of a million parameters or fewer; a larger one has fewer."""

CODECS = (
    *("identity", "float16", "bfloat16", "int8", "int8(stochastic)", "int4", "int4(stochastic)", "sign"),
    *("top_k(0.01)", "top_k(0.01)+int8", "top_k(0.1)+int8"),
)
LOCAL_STEPS = 16
BATCH = 32
LEARNING_RATE = 0.05
TARGETS = {
    "memcpy / int8, decode and add": 0.2,
    "memcpy / top_k(0.01), encode": 0.1,
    "numpy / float16, encode": 3.0,
    "numpy / float16, decode and add": 3.0,
}


def local_delta(model: MlpModel) -> Vector:
    """Return what some steps of SGD change."""
    digits = load_digits()
    x, y = digits.x, digits.y.astype(np.int64)
    order = np.random.Generator(np.random.PCG64(1)).permutation(len(y))
    initial = model.initial(seed=1)
    parameters, gradient = initial.copy(), np.empty_like(initial)
    for step in range(LOCAL_STEPS):
        chosen = order[step * BATCH : (step + 1) * BATCH]
        model.gradient(parameters, x[chosen], y[chosen], gradient)
        parameters -= np.float32(LEARNING_RATE) * gradient
    return parameters - initial


def add_decoded(codec: VectorCodec, payload: bytes, target: Vector, scratch: Vector) -> None:
    """Decode a payload, and add it to a vector slice by slice, as a fold does."""
    source = codec.open(payload)
    for start in range(0, target.size, CHUNK):
        stop = min(start + CHUNK, target.size)
        np.add(target[start:stop], source.read(start, stop, scratch), out=target[start:stop])


def time_in_turns(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return every case's median in microseconds; each turn runs a case twice and times the second run."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, work in cases.items():
            work()
            started = time.perf_counter()
            work()
            times[name].append((time.perf_counter() - started) * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def measure(label: str, model: MlpModel, rounds: int, results: Results) -> None:
    """Add the figures of one length."""
    delta, spec = local_delta(model), model.spec
    target, scratch = np.zeros_like(delta), np.empty(CHUNK, np.float32)
    copied, halves = np.empty_like(delta), delta.astype(np.float16)
    source, random = VectorSource(delta), np.random.Generator(np.random.PCG64(1))
    cases: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(copied, delta),
        "numpy float16, encode": lambda: delta.astype(np.float16),
        "numpy float16, decode and add": lambda: np.add(target, halves, out=target),
    }
    norm = float(np.linalg.norm(delta))
    for name in CODECS:
        codec = make_codec(name, spec)
        payload = bytes(codec.encode(source, random))
        cases[f"{name}, encode"] = partial(codec.encode, source, random)
        cases[f"{name}, decode and add"] = partial(add_decoded, codec, payload, target, scratch)
        decoded = np.zeros_like(delta)
        add_decoded(codec, payload, decoded, scratch)
        kept = {
            "bytes per 1000": 1000 * len(payload) / delta.size,
            "error, %": 100 * float(np.linalg.norm(delta - decoded)) / norm,
        }
        if "zstd" in STAGES:
            compressed = make_codec(f"{name}+zstd", spec).encode(source, random)
            kept["with zstd"] = 1000 * len(compressed) / delta.size
        results.add(f"size, {label}", name, kept)
    medians = time_in_turns(cases, rounds)
    memcpy = medians["memcpy"]
    for case, median in medians.items():
        name, _, what = case.partition(", ")
        per_million = median * 1e6 / delta.size
        columns = {f"{what or 'both'}, us": per_million, f"{what or 'both'}, memcpys": median / memcpy}
        results.add(f"us per million, {label}", name, columns)
    found = {
        "memcpy / int8, decode and add": memcpy / medians["int8, decode and add"],
        "memcpy / top_k(0.01), encode": memcpy / medians["top_k(0.01), encode"],
        "numpy / float16, encode": medians["numpy float16, encode"] / medians["float16, encode"],
        "numpy / float16, decode and add": medians["numpy float16, decode and add"]
        / medians["float16, decode and add"],
    }
    results.ratios.update({f"{label}: {name}": ratio for name, ratio in found.items()})
    results.targets.update({f"{label}: {name}": TARGETS[name] for name in found})


def main() -> None:
    """Measure and show."""
    arguments: argparse.Namespace = make_parser(__doc__ or "").parse_args()
    results = Results()
    for label, model in MODELS[arguments.form].items():
        show_progress(f"{label} parameters")
        rounds = math.ceil(ROUNDS[arguments.form] / math.sqrt(max(1.0, model.spec.length / 1e6)))
        measure(label, model, rounds, results)
    show_results(results, arguments)


if __name__ == "__main__":
    main()
