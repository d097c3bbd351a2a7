import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.errors import ProtocolError
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol.codecs import (
    STAGES,
    VectorSource,
    catalogue,
    check_codec_name,
    find_codec,
    make_codec,
    stages_of,
)
from tests.support.codecs.codecs import NAMES, flat

SPEC = flat(1000)


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_is_made_once_and_says_its_name(name):
    codec = make_codec(name, SPEC)
    assert codec.name == name
    check_codec_name(name)
    assert make_codec(name, flat(1000)) is codec is find_codec(name, codec.payload_bytes_min, SPEC)
    assert make_codec(name, flat(1001)) is not codec
    assert stages_of(name) <= set(STAGES)


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("top_k(0.010)", "top_k(0.01)"),
        ("top_k(0.01)+identity", "top_k(0.01)"),
        ("top_k(0.000000001)+int4(stochastic)", "top_k(0.000000001)+int4(stochastic)"),
    ],
)
def test_names_become_canonical(spelled, name):
    assert make_codec(spelled, SPEC).name == name


@pytest.mark.parametrize(
    "name",
    [
        "", "Identity", "identity ", "int8(nearest)", "int16", "float16+int8", "identity+identity", "zstd",
        "zstd+int8", "int8+", "+int8", "int8++zstd", "int8+zstd+zstd", "top_k", "top_k()", "top_k(0)",
        "top_k(0.0)", "top_k(0.51)", "top_k(1)", "top_k(1e-2)", "top_k(-0.1)", "top_k(.1)", "top_k(nan)",
        "top_k(0.\u0661)", "top_k(0.1)+top_k(0.1)", "int8+top_k(0.1)", "low_rank(4)",
        "top_k(0.0000000001)", "int8" + "+zstd" * 20, "int8\n", "float16(stochastic)",
    ],
)  # fmt: skip
def test_other_names_are_refused_with_the_known_ones(name):
    for ask in (check_codec_name, stages_of, lambda name: make_codec(name, SPEC)):
        with pytest.raises(ValueError, match=r"unknown codec .*; known: identity, float16"):
            ask(name)
    with pytest.raises(ProtocolError, match="unknown codec"):
        find_codec(name, 40, SPEC)


@given(st.text("abcdefghijklmnopqrstuvwxyz_0123456789.()+- \0\u0661\ud800", max_size=80))
def test_any_text_is_refused_as_a_protocol_error_or_named(name):
    try:
        codec = find_codec(name, 4000, SPEC)
    except ProtocolError:
        return
    assert codec.name


def test_stages_are_named_without_arguments():
    assert stages_of("identity") == {"identity"}
    assert stages_of("int4(stochastic)") == {"int4"}
    assert stages_of("top_k(0.01)") == {"top_k", "identity"}
    assert stages_of("top_k(0.1)+bfloat16") == {"top_k", "bfloat16"}


def test_without_its_package_zstd_is_unknown(monkeypatch):
    monkeypatch.setattr(catalogue, "HAS_ZSTD", False)
    with pytest.raises(ValueError, match=re.escape("pip install 'edgeasync[zstd]'")):
        check_codec_name("int8+zstd")


def test_a_model_of_statistics_alone_and_one_of_single_values():
    spec = ParameterSpec((Parameter("m", (3,), "statistic"),))
    scalars = ParameterSpec((Parameter("a", ()), Parameter("b", (1, 1))))
    for name in NAMES:
        for each in (spec, scalars):
            codec = make_codec(name, each)
            vector = np.arange(1, each.length + 1, dtype=np.float32)
            source = codec.open(codec.encode(VectorSource(vector), np.random.default_rng(1)))
            assert source.read(0, each.length, np.empty(each.length, np.float32)).shape == vector.shape
