"""Codecs of installed packages: tried when they are loaded, negotiated, and never trusted with a peer's bytes."""

from importlib.metadata import EntryPoint

import numpy as np
import pytest

from edgeasync.config import convert
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.errors import ConfigError, PluginError, ProtocolError
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.plugins import CODECS
from edgeasync.protocol.codecs import (
    VectorSource,
    catalogue,
    find_codec,
    known_stages,
    make_codec,
    plugin,
    stages_of,
)

SPEC = ParameterSpec((Parameter("weight", (5, 3)), Parameter("mean", (2,), role="statistic")))
VECTOR = np.linspace(-1.0, 1.0, SPEC.length, dtype=np.float32)


class Halves:
    needs_feedback = True

    def nbytes(self, length):
        return 2 * length

    def encode(self, values):
        return values.astype(np.float16).tobytes()

    def decode(self, coded, length):
        return coded.view(np.float16)


class Scaled(Halves):
    def nbytes(self, length):
        return 4 + length

    def encode(self, values):
        scale = np.float32(max(np.abs(values).max(), 1e-30) / 127)
        return scale.tobytes() + np.rint(values / scale).astype(np.int8).tobytes()

    def decode(self, coded, length):
        return coded[4:].view(np.int8) * coded[:4].view(np.float32)[0]


class Picky(Halves):
    def decode(self, coded, length):
        if coded[0] == 255:
            raise IndexError("what is this?")
        return coded.view(np.float16)[: length - (coded[0] == 254)]


class Random(Halves):
    def encode(self, values):
        return np.random.default_rng().bytes(2 * len(values))


class Long(Halves):
    def encode(self, values):
        return bytes(2 * len(values) + 1)


class Large(Halves):
    def nbytes(self, length):
        return 5 * length

    def encode(self, values):
        return bytes(5 * len(values))

    def decode(self, coded, length):
        return np.zeros(length, np.float32)


class Torn(Halves):
    def decode(self, coded, length):
        raise ValueError("unreadable")


class Bare:
    needs_feedback = True


@pytest.fixture
def packages(monkeypatch):
    """Install codecs of this module, as packages do."""
    caches = (plugin.plugin_stage, catalogue._make)
    points = {
        name: EntryPoint(name, f"{__name__}:{name.title()}", CODECS)
        for name in ("halves", "scaled", "picky", "random", "long", "large", "torn", "bare", "absent")
    }
    monkeypatch.setattr(plugin, "installed", lambda group: points)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def decoded(codec, payload):
    source = codec.open(payload)
    return source.read(0, source.length, np.empty(source.length, np.float32)).copy()


@pytest.mark.parametrize("name", ["halves", "top_k(0.2)+halves", "halves+zstd"])
def test_it_codes_wherever_a_dense_stage_may_stand(packages, name):
    codec = make_codec(name, SPEC)
    assert codec.name == name
    assert "halves" in stages_of(name)
    payload = codec.encode(VectorSource(VECTOR))
    found = find_codec(name, len(payload), SPEC)
    assert codec.needs_feedback
    assert not codec.elementwise
    values = decoded(found, payload)
    np.testing.assert_array_equal(values[15:], VECTOR[15:], "statistics stay float32")
    if name == "halves":
        np.testing.assert_array_equal(values[:15], VECTOR[:15].astype(np.float16))
    broken = VECTOR.copy()
    broken[3] = np.nan
    assert not np.isfinite(decoded(codec, codec.encode(VectorSource(broken)))).all()


def test_it_is_not_asked_to_code_nothing(packages):
    codec = make_codec("top_k(0.2)+scaled", SPEC)
    zeros = np.zeros(SPEC.length, np.float32)
    np.testing.assert_array_equal(decoded(codec, codec.encode(VectorSource(zeros))), zeros)


def test_an_agent_lists_those_that_can_be_used_and_a_hub_refuses_others(packages, caplog):
    known = known_stages()
    assert {"halves", "picky"} < set(known)
    assert not {"random", "long", "large", "torn", "bare", "absent"} & set(known)
    assert "codec random" in caplog.text
    with pytest.raises(ProtocolError, match="unknown codec 'thirds'; known: identity"):
        find_codec("thirds", 10, SPEC)
    with pytest.raises(ProtocolError, match="codec random"):
        find_codec("random", 31, SPEC)


def test_bytes_that_it_cannot_read_are_a_refused_update(packages):
    codec = make_codec("picky", SPEC)
    payload = np.frombuffer(codec.encode(VectorSource(VECTOR)), np.uint8).copy()
    for first, words in (
        (255, "cannot read a payload: what is this"),
        (254, r"array of shape \(14,\), expected \(15,\)"),
    ):
        payload[:2] = 1, first
        with pytest.raises(ProtocolError, match=words):
            codec.open(payload.data)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("random", "encodes equal values differently"),
        ("long", "encode returned 3 bytes for 1 values, but nbytes returned 2"),
        ("large", r"nbytes\(100\) is 500"),
        ("torn", "decode cannot read what encode wrote"),
        ("bare", "missing nbytes, encode, decode"),
        ("absent", "test_plugin has no 'Absent'"),
    ],
)
def test_one_that_cannot_be_used_is_told_when_the_settings_are_read(packages, name, words):
    with pytest.raises(PluginError, match=words):
        convert({"push": name}, CodecSettings, where="codec")


def test_one_that_is_not_installed_is_told_by_its_name():
    with pytest.raises(ConfigError, match="unknown codec 'halves'"):
        convert({"push": "halves"}, CodecSettings, where="codec")
