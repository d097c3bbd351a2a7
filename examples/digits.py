"""Train handwritten digits in five lines, with four workers in this process, and export the network."""

from edgeasync import nn, train
from edgeasync.data import load_digits

network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
train(network, load_digits()).export("digits.onnx")
