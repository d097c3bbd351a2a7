"""Measure a step that fine-tunes a language model, compared with torch and PEFT.

Run as `python -m benchmarks.language_model` on Linux, which reports the peak. The exit code is 1 if a
peak or a time exceeds its bound.
"""

import argparse
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.processes import Children, peak_resident_bytes, resident_bytes
from benchmarks.report import Form, Results, benchmark, show_progress
from edgeasync.autodiff.contract import read_spec
from edgeasync.autodiff.reading import read
from edgeasync.graphs.split_base import split_base
from edgeasync.parameters import ParameterSpec
from edgeasync.training.onnx_session import SMALLEST_GRAPH, open_session
from edgeasync.training.onnx_trainer import GraphGradient

MIB = 1 << 20
STEPS = 3
PATIENCE_S = 600.0
BASES = {"float32": None, "int8": 480e6, "int4": 400e6}
"""The types of the base, and the bound of each peak in bytes."""
TORCH, CHECKPOINTING = "torch with PEFT", "torch with PEFT, checkpointing"
BUILD_BYTES = 4e9
SHARE_OF_TORCH, SHARE_OF_CHECKPOINTING, TIMES_OF_TORCH = 1 / 3, 0.45, 2.0
RANK, ALPHA = 8, 16


TINY = {
    "layers": 2, "hidden": 64, "intermediate": 128, "heads": 4, "key_value_heads": 2, "vocabulary": 512,
    "tokens": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Effort:
    """The sizes of the model, and the number of processes for each figure."""

    sizes: Mapping[str, int]
    processes: int


MAKER = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "small_lm" / "make_model.py"))
WHOLE = MAKER["SMOLLM"]._asdict()
EFFORTS = {Form.FULL: Effort(WHOLE, 3), Form.SHORT: Effort(WHOLE, 1), Form.QUICK: Effort(TINY, 1)}


def measured(step: Callable[[], object], bare: int) -> tuple[int, float]:
    """Return the peak in bytes over `bare`, and the processor time of the last step in seconds."""
    for _ in range(STEPS):
        began = time.process_time()
        step()
        seconds = time.process_time() - began
    return peak_resident_bytes(os.getpid()) - bare, seconds


def step_of_ours(folder: Path, spec: ParameterSpec, pipe: "Connection[Any, Any]") -> None:
    """Compute gradients as a device does, from a mapped base. Send the peak and the seconds."""
    session = open_session(SMALLEST_GRAPH, 1, "cpu")
    session.run(None, {"x": np.ones(1, np.float32)})
    bare = resident_bytes(os.getpid())
    gradient = GraphGradient((folder / "training.onnx").read_bytes(), spec, provider="cpu", base_folder=folder)
    x, y = gradient.arbitrary_batch(1)
    values = np.full(spec.length, 0.01, np.float32)
    out = np.empty_like(values)
    pipe.send(measured(lambda: gradient(values, x, y, out), bare))


def step_of_torch(sizes: Mapping[str, int], checkpointing: bool, pipe: "Connection[Any, Any]") -> None:  # noqa: FBT001
    """Compute the same gradients with torch, transformers and PEFT. Send the same figures."""
    import peft  # noqa: PLC0415
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)).sum().backward()
    adapters = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "v_proj"])
    bare = resident_bytes(os.getpid())
    config = LlamaConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["key_value_heads"],
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = peft.get_peft_model(LlamaForCausalLM(config), adapters)
    model.train()
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    words = torch.zeros(1, sizes["tokens"] + 1, dtype=torch.int64)

    def step() -> None:
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(words[:, :-1]).logits[0], words[0, 1:]).backward()

    pipe.send(measured(step, bare))


def build(file: Path, base: str, folder: Path) -> tuple[ParameterSpec, int, float]:
    """Build the training graph in `folder`. Return its layout, and the peak and time of the build."""
    out, began = folder / "whole.onnx", time.monotonic()
    flags = ["--lora", f"{RANK}:*.q_proj,*.v_proj", "--recompute", "--out", str(out)]
    flags += [] if base == "float32" else ["--base", base]
    command = [sys.executable, "-m", "edgeasync", "model", "build", str(file), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # our own output may be JSON
    _, status, used = os.wait4(process.pid, 0)  # its own processes are counted, too
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"the build for {base} failed; its message is above")
    content = out.read_bytes()
    split = split_base(content, folder)
    (folder / "training.onnx").write_bytes(split.graph)
    return read_spec(read(content)), used.ru_maxrss * 1024, time.monotonic() - began


def median_of(children: Children, effort: Effort, what: str, target: Any, *arguments: object) -> Sequence[float]:
    """Return the medians of the peak in bytes and of the seconds a step, each of a new process."""
    found = list[tuple[float, float]]()
    for number in range(effort.processes):
        show_progress(f"{what}: process {number + 1} of {effort.processes}")
        found.append(children.start(target, *arguments).hear(PATIENCE_S))
    return [statistics.median(values) for values in zip(*found, strict=True)]


@benchmark("The memory and time of a step of a language model with LoRA, compared with torch and PEFT.")
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Build and measure each type of base, and torch in the same run."""
    effort: Effort = EFFORTS[arguments.form]
    with tempfile.TemporaryDirectory() as name, Children("edgeasync.training.onnx_trainer") as children:
        file, graphs = Path(name, "model.onnx"), dict[str, tuple[Path, ParameterSpec]]()
        onnx.save(MAKER["make_model"](MAKER["Shape"](**effort.sizes)), file)
        for base in BASES:
            show_progress(f"build: {base}")
            folder = Path(name, base)
            folder.mkdir()
            spec, peak, seconds = build(file, base, folder)
            graphs[base] = folder, spec
            size = (folder / "whole.onnx").stat().st_size
            results.add("build", base, {"file, MiB": size / MIB, "peak, MiB": peak / MIB, "s": seconds}, 0)
            results.bound(f"build, {base}: peak", peak, BUILD_BYTES)
        found = {base: median_of(children, effort, base, step_of_ours, *graphs[base]) for base in BASES}
        for row, flag in ((TORCH, False), (CHECKPOINTING, True)):
            found[row] = median_of(children, effort, row, step_of_torch, dict(effort.sizes), flag)
    for row, (nbytes, cpu_s) in found.items():
        results.add("a step", row, {"peak, MiB": nbytes / MIB, "CPU s": cpu_s}, 2)
    for base, bound in BASES.items():
        nbytes, cpu_s = found[base]
        if bound is not None:
            results.bound(f"{base}: peak", nbytes, bound)
            results.bound(f"{base}: share of torch", nbytes / found[TORCH][0], SHARE_OF_TORCH)
            share = nbytes / found[CHECKPOINTING][0]
            results.bound(f"{base}: share of torch with checkpointing", share, SHARE_OF_CHECKPOINTING)
        results.bound(f"{base}: times torch's step", cpu_s / found[TORCH][1], TIMES_OF_TORCH)


if __name__ == "__main__":
    main()
