"""The device that a model computes on, with onnxruntime's providers substituted: no machine here has a GPU."""

import numpy as np
import onnxruntime
import pytest

from edgeasync.async_train import (
    AsyncGradientAccumulator,
    AsyncModelAverager,
    AsyncWorker,
    FaultTolerantTrainer,
    cuda,
    ignored,
    nn,
    optim,
)
from edgeasync.errors import ConfigError

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@pytest.fixture(autouse=True)
def _asked_again():
    """Let each test ask again, and be told again."""
    for cached in (cuda._onnxruntime_starts, ignored.say_once):
        cached.cache_clear()
    yield
    cuda._onnxruntime_starts.cache_clear()


def substitute(monkeypatch, available, starting):
    """Let onnxruntime have some providers, of which some start, on the CPU; return what it is asked for."""
    asked, real = [], onnxruntime.InferenceSession

    class Session(real):
        def __init__(self, graph, options, providers, **rest):
            asked.append(providers[0])
            self._starting = [name for name in providers if name in starting]
            super().__init__(graph, options, [CPU], **rest)

        def get_providers(self):
            return self._starting

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    return asked


def network():
    return nn.Sequential(nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("available", "starting", "wanted"),
    [([CPU], [CPU], False), ([CUDA, CPU], [CPU], False), ([CUDA, CPU], [CUDA, CPU], True)],
    ids=["without", "does not start", "starts"],
)
def test_a_gpu_is_available_if_onnxruntime_starts_on_it(monkeypatch, available, starting, wanted):
    substitute(monkeypatch, available, starting)
    assert (cuda.is_available(), cuda.device_count()) == (wanted, int(wanted))


DEVICES = {
    "AsyncGradientAccumulator": lambda folder, device: AsyncGradientAccumulator(network(), 1, device=device),
    "AsyncModelAverager": lambda folder, device: AsyncModelAverager(network(), device=device),
    "AsyncWorker": lambda folder, device: AsyncWorker("127.0.0.1:1", device=device),
    "FaultTolerantTrainer": lambda folder, device: FaultTolerantTrainer(network(), folder, device=device),
    "model.to": lambda folder, device: network().to(device or "cpu"),
}


@pytest.mark.parametrize("name", DEVICES)
def test_each_class_takes_a_gpu_that_is_there_or_says_that_it_is_not(monkeypatch, caplog, tmp_path, name):
    make = DEVICES[name]
    assert (make(tmp_path, None).device, caplog.messages) == ("cpu", [])
    for device in ("cuda", "cuda:0"):
        assert make(tmp_path, device).device == "cpu"
    why = "onnxruntime cannot use a GPU here; computing on the CPU"
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{name}: device is ignored: {why}")
    cuda._onnxruntime_starts.cache_clear()
    substitute(monkeypatch, [CUDA, CPU], [CUDA, CPU])
    assert make(tmp_path, "cuda").device.startswith("cuda")
    assert len(caplog.messages) == 1
    with pytest.raises(ConfigError, match="device is 'tpu'; choose 'cpu' or 'cuda'"):
        make(tmp_path, "tpu")


def test_gradients_are_computed_where_the_model_is(monkeypatch):
    asked = substitute(monkeypatch, [CUDA, CPU], [CUDA, CPU])
    for device in ("cpu", "cuda"):
        accumulator = AsyncGradientAccumulator(network(), 1, device=device)
        asked.clear()
        accumulator.train_step(np.eye(4), [0, 1, 0, 1], optimizer=optim.SGD(lr=0.1))
        assert (CUDA in asked) is (device == "cuda")


def test_values_stay_when_a_model_moves(monkeypatch):
    substitute(monkeypatch, [CUDA, CPU], [CUDA, CPU])
    model = network()
    before = model(np.eye(4))
    model.to("cuda")
    assert model.device == "cuda"
    np.testing.assert_array_equal(model(np.eye(4)), before)
    optim_before = model.network
    assert model.to("cuda").network is optim_before, "it is there already"


class Own:
    """A model of the user's own."""

    parameters = {"w": np.zeros(2, np.float32)}  # noqa: RUF012

    def gradient(self, arrays, x, y):
        return 0.0, arrays


def test_a_model_of_ones_own_computes_where_its_code_does(caplog):
    assert AsyncGradientAccumulator(Own(), 1, device="cuda").device == "cpu"
    assert "your own model chooses its device itself" in caplog.text
