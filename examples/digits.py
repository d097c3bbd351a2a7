"""Handwritten digits in five lines: four workers in this process train a network and export it."""

from sklearn.datasets import load_digits

from edgeasync import nn, train

x, y = load_digits(return_X_y=True)
network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
train(network, (x / 16, y)).export("digits.onnx")
