"""Train one model on three kinds of devices: with torch, with an ONNX graph, and with numpy alone.

python mixed_fleet.py --updates 300
"""

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import edgeasync
from edgeasync import SGD, Agent, Hub, Run, Stop
from edgeasync.data import load_digits

parser = argparse.ArgumentParser(description="Train digits by torch, ONNX and numpy together.")
parser.add_argument("--updates", type=int, default=300, help="updates to apply before it ends")
updates = parser.parse_args().updates

torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


class Perceptron:
    """The same model in numpy. The hub compares only names and shapes of its arrays."""

    parameters: Mapping[str, Any] = {name: array.numpy() for name, array in module.state_dict().items()}

    def gradient(self, arrays: Mapping[str, Any], x: Any, y: Any) -> tuple[float, Mapping[str, Any]]:
        hidden = np.maximum(x @ arrays["0.weight"].T + arrays["0.bias"], 0)
        scores = hidden @ arrays["2.weight"].T + arrays["2.bias"]
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        slope = (chances - np.eye(10)[y]) / len(y)
        back = (slope @ arrays["2.weight"]) * (hidden > 0)
        return -float(np.log(chances[np.arange(len(y)), y]).mean()), {
            "2.weight": slope.T @ hidden,
            "2.bias": slope.sum(axis=0),
            "0.weight": back.T @ x,
            "0.bias": back.sum(axis=0),
        }


digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits))
x, y = digits.x[order], digits.y[order]
graph = edgeasync.torch.to_onnx(module, torch.zeros(2, 64), exporter="legacy")
hub = Hub(
    graph,
    run="runs/mixed-fleet",
    bind="tcp://127.0.0.1:*",
    optimizer=SGD(learning_rate=0.1),
    until=Stop(updates=updates),
)
with (
    hub,
    Agent(hub.address, (x[0:1200:3], y[0:1200:3]), name="torch", model=edgeasync.torch.model(module)),
    Agent(hub.address, (x[1:1200:3], y[1:1200:3]), name="onnx"),
    Agent(hub.address, (x[2:1200:3], y[2:1200:3]), name="numpy", model=Perceptron()),
):
    hub.wait()
run = Run.open(hub.path)
device = run.history["device"]
print({name: int((device == name).sum()) for name in ("torch", "onnx", "numpy")}, "updates")
trained = edgeasync.torch.load(module, run)
with torch.no_grad():
    right = trained(torch.from_numpy(x[1200:])).argmax(1).numpy() == y[1200:]
print(f"accuracy on {len(right)} digits that no device had: {right.mean():.1%}")
