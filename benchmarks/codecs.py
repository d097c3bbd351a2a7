"""Measure codecs and folds relative to memcpy, and which codec `auto` chooses.

Run as `python -m benchmarks.codecs`. Codecs and folds alternate on one thread. The delta is that of
a multilayer perceptron after sixteen local steps of SGD on the handwritten digits. It has some
zeros, from features and hidden units that are never active. Then eight real agents learn digits on
loopback for ten minutes, with one busy process per core. All must end with the same codec, after at
most two changes each.
"""

import argparse
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.agent_process import Member
from benchmarks.processes import busy_loops
from benchmarks.real_fleet import run_fleet
from benchmarks.report import Form, Results, benchmark, show_progress
from benchmarks.virtual_fleet import split_digits
from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.hub.effects import Fold
from edgeasync.data import load_digits
from edgeasync.data.partition import iid
from edgeasync.parameters import CHUNK, Parameter, ParameterSpec, Vector
from edgeasync.policies.policy import Policy
from edgeasync.policies.transforms import Conditions, plan_chain
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
"""Rounds for models of at most a million parameters; larger models get fewer."""

CODECS = (
    *("identity", "float16", "bfloat16", "int8", "int8(stochastic)", "int4", "int4(stochastic)", "sign"),
    *("top_k(0.01)", "top_k(0.01)+int8", "top_k(0.1)+int8"),
)
PARTS = ("codecs", "folds", "auto")
FOLDED = {
    Form.FULL: {"1M": 1_000_000, "10M": 10_000_000},
    Form.SHORT: {"1M": 1_000_000, "10M": 10_000_000},
    Form.QUICK: {"0.1M": 100_000},
}
GATHERED = 12
"""Updates in a version under the default policy: a quorum of twenty devices."""

FOLD_MIN = 0.33
DEVICES = 8
CHOICE_MODEL = MlpModel(inputs=64, hidden=(1024,), classes=10)
CHOICE_S = {Form.FULL: 600.0, Form.SHORT: 90.0, Form.QUICK: 2.0}
STEP_S = 0.05
CHANGES_MAX = 2
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
    """Return the change of the parameters after some steps of SGD."""
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
    """Decode a payload and add it to a vector slice by slice, as a fold does."""
    source = codec.open(payload)
    for start in range(0, target.size, CHUNK):
        stop = min(start + CHUNK, target.size)
        np.add(target[start:stop], source.read(start, stop, scratch), out=target[start:stop])


def time_in_turns(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return each case's median in microseconds.

    Each turn runs a case twice and times the second run.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, work in cases.items():
            work()
            started = time.perf_counter()
            work()
            times[name].append((time.perf_counter() - started) * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def measure(label: str, model: MlpModel, rounds: int, results: Results) -> None:
    """Add the figures for one vector length."""
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
    for name, ratio in {
        "memcpy / int8, decode and add": memcpy / medians["int8, decode and add"],
        "memcpy / top_k(0.01), encode": memcpy / medians["top_k(0.01), encode"],
        "numpy / float16, encode": medians["numpy float16, encode"] / medians["float16, encode"],
        "numpy / float16, decode and add": medians["numpy float16, decode and add"]
        / medians["float16, decode and add"],
    }.items():
        results.ratio(f"{label}: {name}", ratio, TARGETS[name])


def measure_folds(label: str, length: int, rounds: int, results: Results) -> None:
    """Time folds of one update and of a quorum under the default policy, and `w += s g`.

    The plain sum uses numpy in place, in slices that stay in the cache, so no rule can be faster.
    """
    random, policy = np.random.Generator(np.random.PCG64(1)), Policy()
    model = HubModel(ParameterSpec((Parameter("w", (length,)),)), np.zeros(length, np.float32), 0, policy)
    deltas = [random.normal(0.0, 1e-4, length).astype(np.float32) for _ in range(GATHERED)]
    updates = [VectorSource(delta) for delta in deltas]
    plain, scratch = np.zeros(length, np.float32), np.empty(CHUNK, np.float32)

    def plain_sum() -> None:
        for start in range(0, length, CHUNK):
            part = slice(start, min(start + CHUNK, length))
            out = scratch[: part.stop - part.start]
            np.multiply(deltas[0][part], np.float32(0.5), out=out)
            np.add(plain[part], out, out=plain[part])

    def fold(count: int) -> None:
        number = model.current.number + 1
        plan = plan_chain(policy.optimizer, Conditions(1.0, number))
        taken = Fold(number, tuple(range(count)), (1.0 / count,) * count, plan, measure=count > 1)
        model.advance(model.fold(taken, updates[:count])[0])

    medians = time_in_turns(
        {
            "w += s g": plain_sum,
            "fold of 1": lambda: fold(1),
            f"fold of {GATHERED}": lambda: fold(GATHERED),
            "norm": lambda: model.norm(updates[0]),
        },
        rounds,
    )
    medians[f"fold of {GATHERED}, per update"] = medians.pop(f"fold of {GATHERED}") / GATHERED
    results.add("folds, ms", label, {name: us / 1e3 for name, us in medians.items()})
    for name, us in medians.items():
        if "fold" in name:
            results.ratio(f"{label}: w += s g over {name}", medians["w += s g"] / us, FOLD_MIN)


def measure_choice(seconds: float, results: Results) -> None:
    """Record which codecs `push = "auto"` assigns to equal devices on a busy machine."""
    codecs: dict[str, str] = {}
    changes: Counter[str] = Counter()
    members = [Member(part, STEP_S) for part in iid(split_digits()[0], DEVICES, 0)]
    with busy_loops(os.cpu_count() or 1), run_fleet(CHOICE_MODEL, 0.1, members) as fleet:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            time.sleep(0.5)
            for device in fleet.devices:
                name, codec = device["id"], device["push_codec"]
                if device["updates_applied"] and codecs.setdefault(name, codec) != codec:
                    codecs[name] = codec
                    changes[name] += 1
                    show_progress(f"{name} has {codec} now")
    most, chosen = max(changes.values(), default=0), Counter(codecs.values())
    title = f"auto, {DEVICES} devices, {seconds:.0f} s"
    results.add(title, "all", {"codecs": len(chosen), "changes at most": most})
    for codec, devices in chosen.items():
        results.add(title, codec, {"devices": devices})
    results.bound("codecs of equal devices", max(1, len(chosen)), 1)
    results.bound("changes of a device's codec", max(0.01, most), CHANGES_MAX)


@benchmark("What codecs and folds cost, and which codec `auto` chooses.", PARTS)
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure the requested parts."""
    form = arguments.form
    if "codecs" in arguments.part:
        for label, model in MODELS[form].items():
            show_progress(f"{label} parameters")
            rounds = math.ceil(ROUNDS[form] / math.sqrt(max(1.0, model.spec.length / 1e6)))
            measure(label, model, rounds, results)
    if "folds" in arguments.part:
        for label, length in FOLDED[form].items():
            show_progress(f"folds of {label} parameters")
            measure_folds(label, length, ROUNDS[form], results)
    if "auto" in arguments.part:
        measure_choice(CHOICE_S[form], results)


if __name__ == "__main__":
    main()
