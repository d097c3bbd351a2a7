"""ONNX models for tests: one that a hub can train, and hubs that ship what no device should run."""

import contextlib
import threading

import numpy as np
import zmq
from onnx import TensorProto, helper, numpy_helper

from edgeasync import nn
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol import wire
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import FetchGraph, GraphHeader, Hello, Welcome

SESSION = b"s" * 16
SPEC = ParameterSpec((Parameter("w", (3,)),))
OPSETS = [helper.make_opsetid("", 18)]
LENET = nn.Sequential(
    nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
)  # fmt: skip
"""For images of 1 x 28 x 28: 61,706 parameters."""


def forward_model(*, inputs=8, hidden=16, classes=3, extra=()):
    """Return a small multilayer perceptron as a serialized forward model of named parameters."""
    generator = np.random.default_rng(0)

    def weight(name, *shape):
        return numpy_helper.from_array(generator.normal(0, 0.3, shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Gemm", ["x", "body.weight", "body.bias"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "head.weight", "head.bias"], ["scores"]),
        *extra,
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", inputs])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", classes])],
        [
            weight("body.weight", inputs, hidden),
            weight("body.bias", hidden),
            weight("head.weight", hidden, classes),
            weight("head.bias", classes),
        ],
    )
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=9).SerializeToString()


def plain_graph(operator="Relu", *, domain="", initializers=()):
    """Return a serialized graph of one node."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    node = helper.make_node(operator, ["x"], ["y"], name="suspect", domain=domain)
    graph = helper.make_graph([node], "g", [value], [out], initializers)
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=9).SerializeToString()


class HostileHub:
    """Welcomes every device, and ships a graph as it is told to; use it in a `with`."""

    def __init__(self, graph, *, announced=None, announced_bytes=None):
        self.fetched = 0
        self._graph = ShippedGraph(graph)
        self._fingerprint = announced or self._graph.fingerprint
        self._bytes = len(graph) if announced_bytes is None else announced_bytes
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._context.term()  # the thread's next call tells it, and it closes the socket
        self._thread.join()

    def _serve(self):
        with contextlib.suppress(zmq.ContextTerminated), self._socket:
            while True:
                peer, header, *_ = self._socket.recv_multipart()
                message = wire.decode(header)
                if isinstance(message, Hello):
                    training = {"model": {"kind": "graph"}}
                    welcome = Welcome(
                        SESSION, SPEC, training, 0, "identity", 5.0, 15.0, 1 << 20, self._fingerprint, self._bytes
                    )
                    self._socket.send_multipart([peer, wire.encode(welcome)])
                elif isinstance(message, FetchGraph):
                    self.fetched += 1
                    answer = GraphHeader(self._fingerprint, self._graph.checksum, len(self._graph.payload))
                    self._socket.send_multipart([peer, wire.encode(answer), self._graph.payload])
