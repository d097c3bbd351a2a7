"""Write a small language model of Llama's architecture as an ONNX file, with random weights.

Run as `python examples/small_lm/make_model.py lm.onnx`. The default shape is that of SmolLM-135M.
The names of the weights are those of Hugging Face's `LlamaForCausalLM`, so that PEFT can load
adapters for them. Needs `pip install onnx`.
"""

import argparse
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
NORM_EPSILON = 1e-5
ROPE_BASE = 10_000.0
INITIAL_STD = 0.02


class Shape(NamedTuple):
    """The sizes of a model."""

    layers: int = 30
    hidden: int = 576
    intermediate: int = 1536
    heads: int = 9
    key_value_heads: int = 3
    vocabulary: int = 49_152
    tokens: int = 256
    """Tokens per example. The batch size is dynamic, this is not."""


SMOLLM = Shape()
"""The shape of SmolLM-135M."""


class _Writer:
    """Collects the nodes and weights of the model."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._generator = np.random.default_rng(seed)
        self._scope = "model"

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Add a node, and return the name of its result."""
        made = name or f"{self._scope}/{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [made], made, **attributes))
        return made

    def constant(self, value: Any) -> str:
        """Add a value that is not trained, which an initializer would be."""
        return self.op("Constant", value=numpy_helper.from_array(np.asarray(value)))

    def weight(self, name: str, *size: int) -> str:
        values = self._generator.standard_normal(size, np.float32)
        values *= np.float32(INITIAL_STD)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        """Multiply by a weight of shape (outputs, inputs), as torch stores it."""
        weight = self.weight(f"{name}.weight", rows, columns)
        return self.op("MatMul", x, self.op("Transpose", weight, perm=[1, 0]))

    def norm(self, x: str, name: str) -> str:
        """Divide by the root mean square."""
        self.weights.append(numpy_helper.from_array(np.ones(self.shape.hidden, np.float32), f"{name}.weight"))
        squares = self.op("ReduceMean", self.op("Mul", x, x), self.constant(np.array([-1])), keepdims=1)
        root = self.op("Sqrt", self.op("Add", squares, self.constant(np.float32(NORM_EPSILON))))
        return self.op("Mul", self.op("Div", x, root), f"{name}.weight")

    def heads(self, x: str, name: str, count: int) -> str:
        """Project to `count` heads: (batch, tokens, hidden) to (batch, heads, tokens, size)."""
        size, (tokens, hidden) = self.shape.hidden // self.shape.heads, (self.shape.tokens, self.shape.hidden)
        flat = self.linear(x, name, count * size, hidden)
        split = self.op("Reshape", flat, self.constant(np.array([-1, tokens, count, size])))
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def rotate(self, x: str, cosines: str, sines: str) -> str:
        """Apply rotary position embeddings (Su et al. 2021, arXiv:2104.09864)."""
        half = self.shape.hidden // self.shape.heads // 2
        low = self.op("Slice", x, *[self.constant(np.array([value])) for value in (0, half, 3)])
        high = self.op("Slice", x, *[self.constant(np.array([value])) for value in (half, 2 * half, 3)])
        turned = self.op("Concat", self.op("Neg", high), low, axis=3)
        return self.op("Add", self.op("Mul", x, cosines), self.op("Mul", turned, sines))

    def repeat(self, x: str) -> str:
        """Repeat each key and value head, so that every query head has one."""
        shape = self.shape
        groups, size = shape.heads // shape.key_value_heads, shape.hidden // shape.heads
        wide = self.op("Unsqueeze", x, self.constant(np.array([2])))
        to = self.constant(np.array([1, shape.key_value_heads, groups, shape.tokens, size]))
        merged = self.constant(np.array([-1, shape.heads, shape.tokens, size]))
        return self.op("Reshape", self.op("Expand", wide, to), merged)

    def attention(self, x: str, name: str, rotary: tuple[str, str], mask: str) -> str:
        shape = self.shape
        queries = self.rotate(self.heads(x, f"{name}.q_proj", shape.heads), *rotary)
        keys = self.repeat(self.rotate(self.heads(x, f"{name}.k_proj", shape.key_value_heads), *rotary))
        values = self.repeat(self.heads(x, f"{name}.v_proj", shape.key_value_heads))
        scores = self.op("MatMul", queries, self.op("Transpose", keys, perm=[0, 1, 3, 2]))
        scale = self.constant(np.float32((shape.hidden // shape.heads) ** -0.5))
        weights = self.op("Softmax", self.op("Add", self.op("Mul", scores, scale), mask), axis=-1)
        merged = self.op("Transpose", self.op("MatMul", weights, values), perm=[0, 2, 1, 3])
        flat = self.op("Reshape", merged, self.constant(np.array([-1, shape.tokens, shape.hidden])))
        return self.linear(flat, f"{name}.o_proj", shape.hidden, shape.hidden)

    def feed_forward(self, x: str, name: str) -> str:
        """Return the gated feed-forward layer (Shazeer 2020, arXiv:2002.05202)."""
        hidden, intermediate = self.shape.hidden, self.shape.intermediate
        gate = self.linear(x, f"{name}.gate_proj", intermediate, hidden)
        active = self.op("Mul", gate, self.op("Sigmoid", gate))
        up = self.linear(x, f"{name}.up_proj", intermediate, hidden)
        return self.linear(self.op("Mul", active, up), f"{name}.down_proj", hidden, intermediate)

    def layer(self, x: str, name: str, rotary: tuple[str, str], mask: str) -> str:
        self._scope = name
        attended = self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", rotary, mask)
        x = self.op("Add", x, attended)
        normed = self.norm(x, f"{name}.post_attention_layernorm")
        return self.op("Add", x, self.feed_forward(normed, f"{name}.mlp"))


def make_model(shape: Shape = SMOLLM, seed: int = 0) -> onnx.ModelProto:
    """Return a model from `tokens`, int64 of (batch, tokens), to `scores`, (batch, vocabulary, tokens).

    The scores at a token are those of the next one. Input and output embeddings share their weight.
    """
    writer = _Writer(shape, seed)
    size, positions = shape.hidden // shape.heads, np.arange(shape.tokens)
    angles = np.outer(positions, ROPE_BASE ** (-np.arange(0, size, 2) / size))
    angles = np.concatenate([angles, angles], axis=1)
    rotary = (
        writer.constant(np.cos(angles).astype(np.float32)),
        writer.constant(np.sin(angles).astype(np.float32)),
    )
    later = positions[None, :] > positions[:, None]
    mask = writer.constant(np.where(later, np.float32(-1e9), np.float32(0)))
    embedding = writer.weight("model.embed_tokens.weight", shape.vocabulary, shape.hidden)
    x = writer.op("Gather", embedding, "tokens")
    for number in range(shape.layers):
        x = writer.layer(x, f"model.layers.{number}", rotary, mask)
    x = writer.norm(x, "model.norm")
    scores = writer.op("MatMul", x, writer.op("Transpose", embedding, perm=[1, 0]))
    writer.op("Transpose", scores, name="scores", perm=[0, 2, 1])
    ids = helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", shape.tokens])
    out = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", shape.vocabulary, shape.tokens])
    graph = helper.make_graph(writer.nodes, "small_lm", [ids], [out], writer.weights)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", OPSET)])


def main() -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(description="Write a small language model with random weights.")
    parser.add_argument("file", help="ONNX file to write")
    for name, default in SMOLLM._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    file, seed = arguments.pop("file"), arguments.pop("seed")
    onnx.save(make_model(Shape(**arguments), seed), file)


if __name__ == "__main__":
    main()
