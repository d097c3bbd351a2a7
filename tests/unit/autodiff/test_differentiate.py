"""Gradients of tensors that are used more than once."""

import pytest

from tests.support.models.gradients import check, numbers

JOINED = {
    "one gradient for two parameters": "a = Add(h, w)\ny = Add(a, v)",
    "a parameter used twice": "a = Mul(h, w)\nb = Tanh(a)\ny = Mul(b, w)",
    "a parameter multiplied by itself": "a = Mul(w, w)\ny = Mul(h, a)",
    "a parameter added to itself": "a = Add(w, w)\ny = Mul(h, a)",
    "a parameter added at the end": "a = Tanh(h)\nb = Mul(a, w)\ny = Add(b, v)",
    "a parameter subtracted at the end": "a = Mul(w, h)\ny = Sub(a, v)",
    "many readers": "a = Tanh(h)\nb = Mul(a, a)\nc = Mul(b, a)\nd = Sum(a, b, c, a)\ne = Mul(d, w)\ny = Add(e, v)",
    "two ways that meet": "a = Tanh(h)\nb = Sigmoid(h)\nc = Mul(a, b)\ny = Add(c, h)",
    "through identities": "a = Identity(h)\nb = Identity(a)\nc = Mul(b, w)\ny = Identity(c)",
    "a weight by another name": "u = Identity(w)\na = Mul(h, w)\nb = Tanh(a)\ny = Mul(b, u)",
    "a way that ends": "a = Greater(h, w)\nb = Cast<to=1>(a)\nc = Mul(b, v)\ny = Add(c, h)",
}


@pytest.mark.parametrize("text", JOINED.values(), ids=JOINED)
def test_gradients_that_meet_or_part(text):
    parameters = {"w": numbers((3,), 5), "v": numbers((3,), 6)}
    check(
        text, (3,), {name: value for name, value in parameters.items() if f"{name}" in text.replace("Where", "")}
    )
