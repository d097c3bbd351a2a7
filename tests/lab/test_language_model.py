"""A language model of 135 million parameters is built, and trains on a device with 1 GB of memory."""

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest

from benchmarks.language_model import BASES, BUILD_BYTES, MAKER, build, step_of_ours
from benchmarks.processes import Children, peak_resident_bytes
from edgeasync.graphs.split_base import base_bytes_of
from edgeasync.net.status import fetch_status
from tests.support.boards.memory_box import MemoryBox
from tests.support.programs.processes import PATIENCE_S
from tests.support.size import repetitions

pytestmark = pytest.mark.process

BUILD_S = 240.0
BASE_SHARES = {"int8": 0.27, "int4": 0.18}
"""The size of each base, at most, as a share of the float32 weights."""

APART = 0.15
"""How far the prediction of `model inspect` may be from what an agent needs."""

BOX_BYTES = 10**9
LONGEST_S = 600.0
STEP_BY_STEP = '[local]\nbatch_size = 1\n[policy.frequency]\nkind = "fixed"\nlocal_steps = 1\n'


class Built(NamedTuple):
    """A training graph in `folder / whole.onnx`, and what its build needed."""

    base: str
    folder: Path
    spec: object
    peak_bytes: int
    cpu_s: float


if repetitions("language models at full size"):

    @pytest.fixture(scope="module")
    def model(tmp_path_factory):
        path = tmp_path_factory.mktemp("model") / "model.onnx"
        onnx.save(MAKER["make_model"](), path)
        return path

    @pytest.fixture(scope="module", params=BASE_SHARES)
    def built(request, model, tmp_path_factory):
        folder = tmp_path_factory.mktemp(request.param)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        spec, peak_bytes, _ = build(model, request.param, folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Built(request.param, folder, spec, peak_bytes, cpu_s)

    def test_a_build_needs_little_memory_and_time(built, model):
        assert built.peak_bytes <= BUILD_BYTES
        assert built.cpu_s <= BUILD_S
        nbytes = base_bytes_of((built.folder / "whole.onnx").read_bytes())
        assert nbytes <= BASE_SHARES[built.base] * model.stat().st_size

    def test_a_step_needs_little_memory(built):
        with Children("edgeasync.training.onnx_trainer") as children:
            nbytes, _ = children.start(step_of_ours, built.folder, built.spec).hear(LONGEST_S)
        assert nbytes <= BASES[built.base]

    def test_an_agent_trains_with_a_gigabyte_as_predicted(built, commands):
        graph = built.folder / "whole.onnx"
        inspect = [sys.executable, "-m", "edgeasync", "model", "inspect", graph, "--batch-size", "1", "--json"]
        found = json.loads(subprocess.run(inspect, capture_output=True, check=True).stdout)
        predicted_bytes = found["training"]["step"]["memory_bytes"]
        model = f'kind = "onnx"\nfile = "{graph}"'
        _, address = commands.hub(commands.settings(model=model, more=STEP_BY_STEP))
        words = np.random.default_rng(0).integers(0, 49_152, (8, 257))
        np.savez(commands.folder / "words.npz", x=words[:, :-1], y=words[:, 1:])
        try:
            box = MemoryBox(BOX_BYTES)
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        with box:
            agent = commands.agent(address, "pi", data="words.npz", under=box.under)
            deadline = time.monotonic() + LONGEST_S
            while fetch_status(address, PATIENCE_S)["updates_applied"] < 3:
                assert not agent.ended
                assert time.monotonic() < deadline
                time.sleep(0.1)
            peak_bytes = peak_resident_bytes(agent.pid)
            agent.signal(signal.SIGTERM)
            assert agent.wait() == 0
        assert abs(predicted_bytes - peak_bytes) <= APART * peak_bytes
