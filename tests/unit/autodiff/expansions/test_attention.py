"""Attention of the standard and of onnxruntime's optimizer: its values, and finite differences."""

import numpy as np
import pytest

from tests.support.models.gradients import assert_same_values, check, forward, numbers
from tests.support.models.small_models import names, refused

HIDDEN = -10000.0


def softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def attend(query, key, value, bias=0.0, *, scale=None, softcap=0.0):
    """Attend, with the axes batch, heads, positions and features; heads of keys and values may be fewer."""
    key, value = (np.repeat(entry, query.shape[1] // entry.shape[1], 1) for entry in (key, value))
    scores = query @ key.swapaxes(2, 3) * (scale or query.shape[3] ** -0.5)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    return softmax(scores + bias) @ value


def heads(x, count):
    return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


def joined(x):
    return x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1)


def causal(queries, keys):
    return np.triu(np.full((queries, keys), -1e30), 1)


# -- of the standard -------------------------------------------------------------------------------------------

LENGTH, OTHERS = 3, 4
BOOLEAN = np.array([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]], np.bool_)
CASES = {
    "plain": ("", {}, 0.0, {}),
    "scale": ("scale=0.3", {}, 0.0, {"scale": 0.3}),
    "softcap": ("softcap=0.7", {}, 0.0, {"softcap": 0.7}),
    "causal": ("is_causal=1", {}, causal(LENGTH, OTHERS), {}),
    "boolean mask": ("", {"mask": BOOLEAN}, np.where(BOOLEAN, 0, -1e30), {}),
    "boolean mask, causal, softcap": ("is_causal=1, softcap=0.7", {"mask": BOOLEAN | np.eye(3, 4, dtype=bool)},
                                      np.where(BOOLEAN | np.eye(3, 4, dtype=bool), 0, -1e30)
                                      + causal(LENGTH, OTHERS), {"softcap": 0.7}),
    "trained bias": ("", {"mask": numbers((LENGTH, OTHERS), 8)}, None, {}),
    "bias of heads only": ("", {"mask": numbers((4, LENGTH, OTHERS), 8)}, None, {}),
    "trained bias of heads": ("softcap=0.7", {"mask": numbers((1, 4, LENGTH, OTHERS), 8)}, None, {"softcap": 0.7}),
}  # fmt: skip


@pytest.mark.parametrize("wide", [True, False], ids=["four axes", "three axes"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("case", CASES)
def test_attention(case, groups, wide):
    attributes, parameters, bias, options = CASES[case]
    parameters = parameters | {"m": numbers((OTHERS, LENGTH), 4), "wk": numbers((8, groups * 2), 5),
                               "wv": numbers((8, groups * 3), 6)}  # fmt: skip
    text = "o = MatMul(m, h)\nk = MatMul(o, wk)\nv = MatMul(o, wv)\n"
    if wide:
        parameters |= {"qs": np.array([0, 0, 4, -1]), "ks": np.array([0, 0, groups, -1])}
        for side in "qkv":
            text += f"{side}1 = Reshape({'h' if side == 'q' else side}, {'q' if side == 'q' else 'k'}s)\n"
            text += f"{side}2 = Transpose<perm=[0, 2, 1, 3]>({side}1)\n"
    else:
        attributes = ", ".join(filter(None, [attributes, f"q_num_heads=4, kv_num_heads={groups}"]))
    given = ("q2, k2, v2" if wide else "h, k, v") + (", mask" if "mask" in parameters else "")
    text += f"y = Attention{'<' + attributes + '>' if attributes else ''}({given})"

    def formula(x, values):
        h = x * values["p"]
        others = values["m"] @ h
        result = attend(heads(h, 4), heads(others @ values["wk"], groups), heads(others @ values["wv"], groups),
                        values["mask"] if bias is None else bias, **options)  # fmt: skip
        return result if wide else joined(result)

    check(text, (LENGTH, 8), parameters, opset=24 if wide else 23, reference=formula)


@pytest.mark.parametrize("is_causal", [0, 1])
@pytest.mark.parametrize("kind", [None, -np.inf, float(np.finfo(np.float32).min), -1e38, -1e9])
def test_a_query_that_sees_no_key(kind, is_causal):
    """Its result is 0, but not if the keys were hidden by numbers that are not the lowest."""
    mask = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 1]], np.bool_)
    if kind is not None:
        mask = np.where(mask, 0, kind).astype(np.float32)
    text = f"h = Mul(x, p)\ny = Attention<q_num_heads=2, kv_num_heads=2, is_causal={is_causal}>(h, h, h, mask)"
    model = forward(text, {"p": numbers((1, 3, 4)), "mask": mask}, (3, 4), opset=24)
    assert_same_values(model, numbers((2, 3, 4), 1), train=("p",))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("y, a, b = Attention(h, h, h, , past, past)", "it has past keys as input 4; export the model without"),
        ("a, k, v = Attention(h, h, h)\ny = Add(a, k)", "its output 1, 'k', is used; export the model without"),
    ],
)
def test_a_cache_is_refused(text, why):
    used = {"past": numbers((2, 2, 3, 4), 3)} if "past" in text else {}
    model = forward(f"h = Mul(x, p)\n{text}", {"p": numbers((1, 2, 3, 4))} | used, (2, 3, 4), opset=24, batch=2)
    refused(model, rf"Attention that computes '\w' cannot be written .*: {why}", freeze=tuple(used))


@pytest.mark.parametrize("wide", [True, False], ids=["four axes", "three axes"])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("part", [0, 4])
@pytest.mark.parametrize("positions", [True, False])
def test_rotary_embeddings(wide, interleaved, part, positions):
    """Positions, or else the angles themselves, are computed from the input."""
    size = part or 6
    parameters = {"zero": np.array([0]), "half": np.array([size // 2]), "last": np.array([-1]),
                  "one": np.array([1]), "w": numbers((6,) if wide else (12,), 5)}  # fmt: skip
    begin = "first = Gather<axis=1>(x, number)\n" if wide else "first = Identity(x)\n"
    parameters |= {"number": np.int64(0)} if wide else {}
    begin += "angles = Slice(first, zero, half, last)\n"
    if positions:
        parameters["table"] = numbers((5, size // 2), 3)
        parameters["four"] = np.float32(4)
        begin += ("alone = Slice(first, zero, one, last)\nflat = Squeeze(alone, last)\nsize = Abs(flat)\n"
                  "least = Min(size, four)\nplaces = Cast<to=7>(least)\n"
                  "cosines = Cos(table)\nsines = Sin(table)\n")  # fmt: skip
    else:
        begin += "cosines = Cos(angles)\nsines = Sin(angles)\n"
    attributes = f"interleaved={interleaved}" + ("" if wide else ", num_heads=2")
    attributes += f", rotary_embedding_dim={part}" if part else ""
    more = ", places" if positions else ""

    def formula(x, values):
        h, first = x * values["p"], x[:, 0] if wide else x
        angles = first[..., : size // 2]
        if positions:
            angles = values["table"][np.minimum(abs(first[..., 0]), 4).astype(int)]
        split = h if wide else heads(h, 2)
        result = rotated(split, np.cos(angles)[:, None], np.sin(angles)[:, None], interleaved, size)
        return (result if wide else joined(result)) * values["w"]

    check(f"{begin}r = RotaryEmbedding<{attributes}>(h, cosines, sines{more})\ny = Mul(r, w)",
          (2, 3, 6) if wide else (3, 12), parameters, opset=23, reference=formula)  # fmt: skip


def test_the_angles_of_rotary_embeddings_are_not_trained():
    text = "h = Mul(x, p)\ny = RotaryEmbedding(h, cosines, sines)"
    parameters = {"p": numbers((1, 2, 3, 4)), "cosines": numbers((2, 3, 2), 1), "sines": numbers((2, 3, 2), 2)}
    model = forward(text, parameters, (2, 3, 4), opset=23, batch=2)
    assert names(assert_same_values(model, numbers((2, 2, 3, 4), 3))) == ["p"]


def rotated(x, cosines, sines, interleaved, size):
    """Rotate the first `size` features of the last axis."""
    first, second = (x[..., :size:2], x[..., 1:size:2]) if interleaved else np.split(x[..., :size], 2, -1)
    parts = first * cosines - second * sines, first * sines + second * cosines
    turned = np.stack(parts, -1).reshape(*x.shape[:-1], size) if interleaved else np.concatenate(parts, -1)
    return np.concatenate([turned, x[..., size:]], -1)


# -- of onnxruntime's optimizer --------------------------------------------------------------------------------

CAST, LARGE = "mask = Cast<to=6>(seen)\n", "seen = Greater({}, zero)\n"
SEEN = "first = Gather<axis=2>(x, number)\nnear = Add(first, far)\n"
MASKS = {
    "none": ("", lambda *_: 0.0),
    "keys": (
        SEEN + LARGE.format("near") + CAST,
        lambda _, near: np.where(near > 0, 0, HIDDEN)[:, None, None],
    ),
    "queries and keys": (
        f"{SEEN}d = Unsqueeze(near, one)\ne = Unsqueeze(first, two)\nf = Add(d, e)\n" + LARGE.format("f") + CAST,
        lambda first, near: np.where(near[:, None] + first[:, :, None] > 0, 0, HIDDEN)[:, None],
    ),
    "lengths": (
        f"{SEEN}seen = Greater(near, zero)\nkept = Cast<to=6>(seen)\nmask = ReduceSum<keepdims=0>(kept, one)\n",
        lambda _, near: np.where(np.arange(LENGTH) < (near > 0).sum(1)[:, None], 0, HIDDEN)[:, None, None],
    ),
}  # fmt: skip
"""Masks, which are computed from the first feature of the input. Each query sees the first key."""

INDICES = {"number": np.int64(0), "zero": np.float32(0), "one": np.array([1]), "two": np.array([2])}
FAR = np.float32([10, 0, 0])


def hidden_by(mask, x):
    """Return the bias that a mask makes of the input."""
    return MASKS[mask][1](x[:, :, 0], x[:, :, 0] + FAR)


@pytest.mark.parametrize("causal_mask", [0, 1])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", ""])
def test_attention_with_one_matrix(mask, causal_mask, biased):
    begin, _ = MASKS[mask]
    parameters = INDICES | {"far": FAR} | {"w": numbers((6, 4 + 4 + 6), 3), "b": numbers((14,), 4)}
    parameters |= {"bias": numbers((1, 2, LENGTH, LENGTH), 5)} if biased else {}
    given = f"h, w, b, {'mask' if begin else ''}" + (", , bias" if biased else "")
    attributes = f"num_heads=2, qkv_hidden_sizes=[4, 4, 6], unidirectional={causal_mask}"

    def formula(x, values):
        query, key, value = np.split((x * values["p"]) @ values["w"] + values["b"], [4, 8], 2)
        bias = hidden_by(mask, x) + (values["bias"] if biased else 0) + causal(LENGTH, LENGTH) * causal_mask
        return joined(attend(heads(query, 2), heads(key, 2), heads(value, 2), bias))

    graph = check(f"{begin}y = com.microsoft.Attention<{attributes}>({given})", (LENGTH, 6), parameters,
                  reference=formula, freeze=("far",) * bool(begin))  # fmt: skip
    assert names(graph) == ["p", "w", "b", *(["bias"] if biased else [])]


def test_attention_of_equal_thirds_with_a_scale_and_a_filter():
    begin, _ = MASKS["keys"]

    def formula(x, values):
        query, key, value = np.split((x * values["p"]) @ values["w"] + values["b"], 3, 2)
        bias = hidden_by("keys", x) * 2e-4
        return joined(attend(heads(query, 2), heads(key, 2), heads(value, 2), bias, scale=0.3))

    check(f"{begin}y = com.microsoft.Attention<num_heads=2, scale=0.3, mask_filter_value=-2.0>(h, w, b, mask)",
          (LENGTH, 6), INDICES | {"far": FAR, "w": numbers((6, 12), 3), "b": numbers((12,), 4)},
          reference=formula, freeze=("far",))  # fmt: skip


@pytest.mark.parametrize("causal_mask", [0, 1])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("biased", [True, False], ids=["biases", ""])
def test_attention_with_separate_matrices(mask, causal_mask, biased):
    begin, _ = MASKS[mask]
    parameters = INDICES | {"far": FAR} | {"wk": numbers((6, 6), 3), "wv": numbers((6, 8), 4)}
    parameters |= {"b": numbers((20,), 5), "bias": numbers((1, 2, LENGTH, LENGTH), 6)} if biased else {}
    given = f"h, k, v, {'b' if biased else ''}, {'mask' if begin else ''}, {'bias' if biased else ''}"

    def formula(x, values):
        h = x * values["p"]
        parts = [h, h @ values["wk"], h @ values["wv"]]
        if biased:
            parts = [part + b for part, b in zip(parts, np.split(values["b"], [6, 12]), strict=True)]
        bias = hidden_by(mask, x) + (values["bias"] if biased else 0) + causal(LENGTH, LENGTH) * causal_mask
        return joined(attend(*[heads(part, 2) for part in parts], bias))

    check(f"{begin}k = MatMul(h, wk)\nv = MatMul(h, wv)\n"
          f"y = com.microsoft.MultiHeadAttention<num_heads=2, unidirectional={causal_mask}>({given})",
          (LENGTH, 6), parameters, reference=formula, freeze=("far",) * bool(begin))  # fmt: skip


@pytest.mark.parametrize("causal_mask", [0, 1])
def test_padding_everywhere(causal_mask):
    text = ("h = Mul(x, p)\nfirst = Gather<axis=2>(x, number)\n" + LARGE.format("first") + CAST +
            f"y = com.microsoft.Attention<num_heads=2, unidirectional={causal_mask}>(h, w, b, mask)")  # fmt: skip
    parameters = {"p": np.ones((1, 3, 4), np.float32), "w": numbers((4, 12), 1), "b": numbers((12,), 2)}
    known = {name: INDICES[name] for name in ("number", "zero")}
    assert_same_values(forward(text, parameters | known, (3, 4)), -np.ones((2, 3, 4), np.float32))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "y = com.microsoft.Attention<num_heads=2>(h, w, , ends)",
            r"the shape of its mask is \(4,\); use the orig",
        ),
        (
            "y = com.microsoft.MultiHeadAttention<num_heads=2>(h, four, four)",
            "it needs query, key and value as tensors",
        ),
        (
            "y, k, v = com.microsoft.MultiHeadAttention<num_heads=2>(h, h, h, , , , past, past)",
            "it has past keys as input 6; export the model without",
        ),
    ],
)
def test_what_has_no_exact_equivalent_is_refused(text, why):
    known = {"w": numbers((6, 18), 2), "ends": np.array([3, 3, 0, 0], np.int32), "b": numbers((18,), 3),
             "four": numbers((2, 2, LENGTH, 3), 4), "past": numbers((2, 2, LENGTH, 3), 5)}  # fmt: skip
    used = {name: value for name, value in known.items() if name in text.partition("(")[2]}
    model = forward(f"h = Mul(x, p)\n{text}", {"p": numbers((1, LENGTH, 6))} | used, (LENGTH, 6), batch=2)
    refused(model, f"Attention that computes 'y' cannot be written with operators that have a gradient: {why}")
