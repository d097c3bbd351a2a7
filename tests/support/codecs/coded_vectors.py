"""Specs and vectors for codec tests, and helpers that encode and decode them."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgeasync.parameters import CHUNK, Parameter, ParameterSpec
from edgeasync.protocol.codecs import VectorSource, make_codec
from tests.support.codecs.codecs import NAMES, decode

every_codec = pytest.mark.parametrize("name", NAMES)

SHAPES = st.lists(hnp.array_shapes(min_dims=0, max_dims=3, max_side=12), max_size=3)
LONG = ParameterSpec(
    (
        Parameter("w", (300, 301)),
        Parameter("b", (301,)),
        Parameter("v", (2, 2 * CHUNK)),
        Parameter("m", (9,), "statistic"),
    )
)


def random():
    return np.random.Generator(np.random.PCG64(7))


@st.composite
def specs(draw):
    roles = [("trained", draw(SHAPES)), ("statistic", draw(SHAPES))]
    parameters = [Parameter(f"{role}{i}", shape, role) for role, shapes in roles for i, shape in enumerate(shapes)]
    return ParameterSpec(tuple(parameters) or (Parameter("w", (1,)),))


@st.composite
def cases(draw, specs=specs(), largest=1e38):  # noqa: B008
    """Return a spec and a vector of it: some values of any kind, finite, at random places, or among others."""
    spec = draw(specs)
    bound = float(np.float32(largest))
    values = draw(st.lists(st.floats(-bound, bound, width=32), min_size=1, max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    vector = rng.choice(np.array(values, np.float32), spec.length)
    if draw(st.booleans()):
        others = rng.random(spec.length) < 0.7
        vector[others] = rng.standard_normal(int(others.sum())).astype(np.float32)
    return spec, vector


def long_vector(seed=1):
    return np.random.default_rng(seed).standard_normal(LONG.length).astype(np.float32) * np.float32(1e-3)


def there_and_back(name, spec, vector):
    codec = make_codec(name, spec)
    return decode(codec, codec.encode(VectorSource(vector), random()), spec.length)


def bits(values):
    return values.view(np.uint32)


def largest(vector, count):
    """Return the vector with all but the largest `count` values zero; of equal ones the first are kept."""
    order = np.lexsort((np.arange(vector.size), -np.abs(vector)))[:count]
    kept = np.zeros_like(vector)
    kept[order] = vector[order]
    return kept
