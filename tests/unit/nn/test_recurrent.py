"""Recurrent layers, against references in numpy."""

import numpy as np

from edgeasync import nn
from tests.support.models.layers import computes, refuses_arguments, refuses_shapes, sigmoid


def lstm(x, w, r, b):
    size = r.shape[1]
    state, cell, states = np.zeros((len(x), size)), np.zeros((len(x), size)), []
    for t in range(x.shape[1]):
        i, o, f, c = np.split(x[:, t] @ w.T + state @ r.T + b[: 4 * size] + b[4 * size :], 4, 1)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(c)
        state = sigmoid(o) * np.tanh(cell)
        states.append(state)
    return np.stack(states, 1)


def gru(x, w, r, b):
    size = r.shape[1]
    state, states = np.zeros((len(x), size)), []
    for t in range(x.shape[1]):
        zx, rx, hx = np.split(x[:, t] @ w.T + b[: 3 * size], 3, 1)
        zh, rh, hh = np.split(state @ r.T + b[3 * size :], 3, 1)
        z = sigmoid(zx + zh)
        state = (1 - z) * np.tanh(hx + sigmoid(rx + rh) * hh) + z * state
        states.append(state)
    return np.stack(states, 1)


def recurrent(cell, x, p, prefix):
    """The states of one layer at all times, directions side by side, and the last state of each direction."""
    w, r, b = (p[prefix + key] for key in ("weight_ih", "weight_hh", "bias"))
    ahead = cell(x, w[0], r[0], b[0])
    if len(w) == 1:
        return ahead, ahead[:, -1]
    back = cell(x[:, ::-1], w[1], r[1], b[1])
    return np.concatenate([ahead, back[:, ::-1]], 2), np.concatenate([ahead[:, -1], back[:, -1]], 1)


def stacked(cell, x, p):
    states, _ = recurrent(cell, x, p, "0.0.")
    return recurrent(cell, states, p, "0.1.")


LAYERS = [
    (nn.LSTM(3, 4), (5, 3), lambda x, p: recurrent(lstm, x, p, "0.")[1]),
    (nn.LSTM(3, 4, bidirectional=True), (5, 3), lambda x, p: recurrent(lstm, x, p, "0.")[1]),
    (nn.LSTM(3, 4, 2, bidirectional=True, return_sequences=True), (5, 3), lambda x, p: stacked(lstm, x, p)[0]),
    (nn.GRU(3, 4, return_sequences=True), (5, 3), lambda x, p: recurrent(gru, x, p, "0.")[0]),
    (nn.GRU(3, 4, 2), (5, 3), lambda x, p: stacked(gru, x, p)[1]),
    (nn.GRU(3, 4, 2, bidirectional=True), (1, 3), lambda x, p: stacked(gru, x, p)[1]),
]

test_a_layer_computes_what_it_says = computes(LAYERS)

test_a_wrong_shape_is_refused_with_the_layer_s_path = refuses_shapes(
    ([nn.GRU(3, 2)], (5, 4), "0 GRU got [batch, 5, 4], but needs [batch, time, 3]"),
    ([nn.LSTM(3, 2)], (3,), "0 LSTM got [batch, 3], but needs [batch, time, 3]"),
)

test_a_wrong_argument_is_refused = refuses_arguments(
    (lambda: nn.LSTM(3, 4, 0), "LSTM: num_layers is 0"),
)
