"""Write a small convolutional network for 8 x 8 digits as an ONNX model, with random weights.

    python digits_cnn.py digits-cnn.onnx

`edgeasync.nn` writes the ONNX graph without torch. You can also export a model with another library.
"""

import sys

from edgeasync import nn

network = nn.Sequential(
    nn.Reshape(1, 8, 8),
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(128, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)

if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "digits-cnn.onnx"
    nn.save(network, path, input_shape=(64,), seed=0)
    print(f"{path}: takes rows of 64 pixels, gives 10 scores")
