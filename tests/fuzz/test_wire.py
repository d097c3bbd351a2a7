"""Whatever bytes come in, `wire.decode` gives a checked message or a `ProtocolError`, and nothing else."""

import math
import struct

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from edgeasync.errors import ProtocolError
from edgeasync.parameters import ParameterSpec
from edgeasync.protocol import wire
from edgeasync.protocol.messages import MESSAGES, PROTOCOL_VERSION, Ack, Fetch, Ping, Push, Refuse, StatusRequest
from tests.fuzz.mutations import NASTY_VALUES

SESSION = bytes(range(16))


# -- strategies, derived from the structs: a new message or field is fuzzed without a word here ------------------


def values_of(kind):  # noqa: C901, PLR0912 - one case a type
    """Return a strategy for everything that a field's type and bounds allow."""
    match kind:
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(kind.ge or 0, 2**64 - 1 if kind.le is None else kind.le)
        case inspect.FloatType():
            low, high = kind.ge if kind.gt is None else kind.gt, kind.le
            return st.floats(low, high, exclude_min=kind.gt is not None, allow_nan=False)
        case inspect.StrType(pattern=str()):
            return st.from_regex(kind.pattern)
        case inspect.StrType():
            return st.text(min_size=kind.min_length or 0, max_size=min(kind.max_length or 40, 40))
        case inspect.BytesType():
            return st.binary(min_size=kind.min_length or 0, max_size=kind.max_length)
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.NoneType():
            return st.none()
        case inspect.UnionType():
            return st.one_of(*map(values_of, kind.types))
        case inspect.VarTupleType():
            sizes = {"min_size": kind.min_length or 0, "max_size": min(kind.max_length or 4, 4)}
            return st.lists(values_of(kind.item_type), **sizes).map(tuple)
        case inspect.DictType(max_length=int()):
            return st.dictionaries(values_of(kind.key_type), values_of(kind.value_type), max_size=kind.max_length)
        case inspect.DictType():
            return st.dictionaries(st.text(max_size=8), PLAIN, max_size=3)
        case inspect.StructType():
            fields = {field.name: values_of(field.type) for field in kind.fields}
            if kind.cls is ParameterSpec:
                fields = {"parameters": fields["parameters"].map(as_spec)}
            return st.builds(kind.cls, **fields)
    raise AssertionError(f"no strategy for {kind}")


def as_spec(parameters):
    """Drop repeated names and put trained arrays first, as a spec demands."""
    unique = {parameter.name: parameter for parameter in parameters}
    return tuple(sorted(unique.values(), key=lambda parameter: parameter.role == "statistic"))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
BY_KIND = {kind: values_of(inspect.type_info(message)) for kind, message in MESSAGES.items()}
ANY_MESSAGE = st.one_of(*BY_KIND.values())
every_message = pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: MESSAGES[kind].__name__)


def pack(kind, fields, version=PROTOCOL_VERSION, padding=b""):
    return msgpack.packb([version, kind, fields, padding])


def fields_of(message):
    """Return the message's own array, as plain lists that a test may bend."""
    return msgpack.unpackb(wire.encode(message))[2]


def decode_or_refuse(header):
    """Decode; let nothing but a `ProtocolError` by, and look at both ends: the message and the sentence."""
    try:
        message = wire.decode(header)
    except ProtocolError as error:
        sentence = str(error)
        assert sentence.isprintable()
        assert 0 < len(sentence) <= 300
        assert not sentence.endswith(": ")
        return None
    assert type(message) in MESSAGES.values()
    return message


# -- what is valid ---------------------------------------------------------------------------------------------


def test_kinds_are_numbered_without_gaps():
    assert list(MESSAGES) == list(range(1, len(MESSAGES) + 1))
    assert all(message.kind == kind for kind, message in MESSAGES.items())


@every_message
@given(data=st.data())
def test_round_trip(kind, data):
    message = data.draw(BY_KIND[kind])
    header = wire.encode(message)
    assert len(header) >= wire.HEADER_BYTES_MIN
    again = wire.decode(header)
    assert again == message
    assert type(again) is MESSAGES[kind]
    assert wire.encode(again) == header


@given(ANY_MESSAGE)
def test_padding_brings_short_headers_to_64_bytes_and_leaves_long_ones(message):
    bare = len(pack(message.kind, fields_of(message)))
    assert len(wire.encode(message)) == max(64, bare)


@given(st.floats(), st.floats())
def test_losses_may_be_anything_a_float_is(mean, variance):
    fields = [SESSION, 1, ["0" * 16, 0], 1, 0, mean, variance, 0.0, "identity", 0, 0]
    push = wire.decode(pack(Push.kind, fields))
    assert struct.pack("<d", push.loss_mean) == struct.pack("<d", mean) or math.isnan(mean)
    assert math.isnan(push.loss_variance) == math.isnan(variance)


# -- evolution -------------------------------------------------------------------------------------------------


@every_message
@given(data=st.data(), extra=st.lists(PLAIN, min_size=1, max_size=3))
def test_unknown_fields_at_the_end_are_ignored(kind, data, extra):
    message = data.draw(BY_KIND[kind])
    assert wire.decode(pack(kind, fields_of(message) + extra)) == message


@given(message=BY_KIND[Push.kind], extra=st.lists(PLAIN, min_size=1, max_size=3))
def test_unknown_fields_at_the_end_of_inner_arrays_are_ignored(message, extra):
    fields = fields_of(message)
    fields[2] += extra
    assert wire.decode(pack(Push.kind, fields)) == message


@given(message=BY_KIND[Ack.kind], extra=st.lists(PLAIN, min_size=1, max_size=3))
def test_unknown_fields_at_the_end_of_outcomes_are_ignored(message, extra):
    fields = fields_of(message)
    fields[1] += extra
    assert wire.decode(pack(Ack.kind, fields)) == message


@every_message
@given(data=st.data())
def test_missing_fields_at_the_end_take_their_defaults_if_they_have_any(kind, data):
    message = data.draw(BY_KIND[kind])
    fields = fields_of(message)
    structure = msgspec.structs.fields(message)
    for kept in range(len(fields)):
        shortened = pack(kind, fields[:kept])
        if any(field.required for field in structure[kept:]):
            with pytest.raises(ProtocolError, match="at least length"):
                wire.decode(shortened)
        else:
            again = wire.decode(shortened)
            for field in structure[:kept]:
                assert getattr(again, field.name) == getattr(message, field.name)
            for field in structure[kept:]:
                assert getattr(again, field.name) == field.default


# -- what is not -----------------------------------------------------------------------------------------------

NASTY_BYTES = [
    b"\xc1",  # never used
    b"\x91" * 600,
    b"\x81\xa0" * 600,
    b"\x91" * 1200,  # deeper than msgpack goes
    b"\xdd\xff\xff\xff\xff",  # lengths that lie
    b"\xdd\x00\x00\x00\x40",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
    b"\xa2\xff\xfe",  # not UTF-8
    b"\xa3\xed\xa0\x80",  # a surrogate
    b"\x81\x90\x01",  # keys that cannot be hashed
    b"\x81\xc4\x01a\x01",
    b"\x82\xa1a\x01\xa1a\x02",
    b"\xc7\x00\x05",  # extensions
    b"\xd4\xff\x00",  # timestamps: of one byte, with too many nanoseconds, too far away
    b"\xd7\xff" + b"\xff" * 8,
    b"\xc7\x0c\xff" + b"\xff" * 12,
    b"\xc7\x0c\xff" + bytes(4) + b"\x7f" + b"\xff" * 7,
    b"\xcb\x7f\xf8" + bytes(6),  # NaN
    b"\xca\x7f\x80\x00\x01",  # a signalling NaN
    b"\xd3\x80" + bytes(7),
    b"\xcf" + b"\xff" * 8,
]
FRAGMENTS = st.sampled_from(NASTY_BYTES) | st.binary(max_size=12)
START = b"\x94\x01"


@given(st.binary(max_size=200))
def test_random_bytes(header):
    decode_or_refuse(header)


@given(st.sampled_from([b"", START, *(START + bytes((kind,)) for kind in MESSAGES)]), st.lists(FRAGMENTS))
def test_nasty_msgpack(start, fragments):
    decode_or_refuse(start + b"".join(fragments))


@settings(max_examples=300)
@given(st.data(), ANY_MESSAGE, ANY_MESSAGE)
def test_damaged_headers(data, message, other):
    header, donor = bytearray(wire.encode(message)), wire.encode(other)
    for damage in data.draw(st.lists(st.sampled_from(["flip", "cut", "insert", "replace", "splice"]), min_size=1)):
        place = data.draw(st.integers(0, len(header)), label="place")
        if damage == "flip" and place < len(header):
            header[place] ^= 1 << data.draw(st.integers(0, 7), label="bit")
        elif damage == "cut":
            del header[place : place + data.draw(st.integers(1, 64), label="length")]
        elif damage == "insert":
            header[place:place] = data.draw(FRAGMENTS)
        elif damage == "replace":
            fragment = data.draw(FRAGMENTS)
            header[place : place + len(fragment)] = fragment
        elif damage == "splice":
            header[place:] = donor[data.draw(st.integers(0, len(donor)), label="from") :]
    decode_or_refuse(bytes(header))


def places(value, path=()):
    """Return the path to every value inside nested lists."""
    yield path
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


@settings(max_examples=300)
@given(st.data(), ANY_MESSAGE, st.sampled_from(NASTY_VALUES) | PLAIN)
def test_a_wrong_value_anywhere(data, message, nasty):
    frame = [[PROTOCOL_VERSION, message.kind, fields_of(message), b""]]
    *way, last = data.draw(st.sampled_from([(0, *path) for path in places(frame[0])]))
    target = frame
    for index in way:
        target = target[index]
    target[last] = nasty
    decode_or_refuse(msgpack.packb(frame[0]))


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, 255, 2**64 - 1])
def test_other_protocol_versions_are_told_apart(version):
    with pytest.raises(
        wire.UnsupportedVersionError, match=f"got protocol version {version}, expected {PROTOCOL_VERSION}"
    ):
        wire.decode(pack(Fetch.kind, [SESSION], version))


@pytest.mark.parametrize(
    "frame",
    [
        None, [], [1, 3, [SESSION]], [1, 3, [SESSION], b"", None], {1: 3}, ["1", 3, [SESSION], b""],
        [True, 3, [SESSION], b""], [1, True, [SESSION], b""], [1, "3", [SESSION], b""], [1, [3], [SESSION], b""],
        [1, 0, [SESSION], b""], [1, 17, [SESSION], b""], [1, -1, [SESSION], b""],
        [1, 3, {"session": SESSION}, b""], [1, 3, msgpack.ExtType(5, SESSION), b""],
    ],
)  # fmt: skip
def test_what_is_no_frame_is_refused(frame):
    with pytest.raises(ProtocolError):
        wire.decode(msgpack.packb(frame))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Fetch.kind, [SESSION.decode("latin1")]),
        (Fetch.kind, ["A" * 22 + "=="]),  # base64 text is not bytes
        (Refuse.kind, ["busy", "", math.nan]),
        (Refuse.kind, ["busy", "", math.inf]),
        (Refuse.kind, ["busy", "", -1e-9]),
        (Refuse.kind, ["later", "", None]),
        (Refuse.kind, ["busy", "x" * 1025, None]),
        (Ack.kind, [-1, ["applied", 1]]),
        (Ack.kind, [1.0, ["applied", 1]]),
        (Ack.kind, [2**53 + 1, ["applied", 1]]),
        (Ack.kind, [1, ["duplicate", ["duplicate", ["applied", 1]]]]),
        (Ack.kind, [1, ["rejected", "dislike"]]),
        (Ping.kind, [SESSION, 0.0, True]),
        (1, [[1], "device\n", SESSION, 0]),  # `$` would let the line break by
        (1, [[1], "a/1000", SESSION, 0]),
        (1, [[1], "../a", SESSION, 0]),
        (1, [[], "a", SESSION, 0]),
        (1, [[1], "a", SESSION, 0, None, 0, [], ["identity"], "0" * 32 + "\n"]),
        (2, [SESSION, [[["a", [0]]]], {}, 0, "identity", 5.0, 15.0, 65536]),
        (2, [SESSION, [[["a", [1], "frozen"]]], {}, 0, "identity", 5.0, 15.0, 65536]),
        (2, [SESSION, [[["a", [1]], ["a", [1]]]], {}, 0, "identity", 5.0, 15.0, 65536]),
        (2, [SESSION, [[["a", [1]]]], {}, 0, "identity", 0.0, 15.0, 65536]),
        (2, [SESSION, [[["a", [1]]]], {}, 0, "identity", math.nan, 15.0, 65536]),
        (2, [SESSION, [[["a", [1]]]], {}, 0, "identity", 5.0, 15.0, 65535]),
        (2, [SESSION, [[["a", [1]]]], {1: 2}, 0, "identity", 5.0, 15.0, 65536]),
    ],
)
def test_values_out_of_bounds_are_refused(kind, fields):
    with pytest.raises(ProtocolError):
        wire.decode(pack(kind, fields))


@pytest.mark.parametrize(
    "header",
    [
        pack(Refuse.kind, ["x" * 500_000, ""]),  # a long value is not quoted whole
        pack(Ack.kind, [1, ["\n" * 500_000]]),
        (b"\x94\x01\x05" + (b"\xdd" + struct.pack(">I", 10**6)) * 1000).ljust(10**6 + 5000, b"\xc0"),
        b"\x94\x01\x02\x98\xc4\x10" + SESSION + b"\xc0\x81\xa1s" + b"\x91" * 1000 + b"\x90",
        pack(2, [SESSION, [[[f"{i:x}", [1]] for i in range(100_001)]], {}, 0, "identity", 5.0, 15.0, 65536]),
        pack(2, [SESSION, [[["a", [2**40] * 9]]], {}, 0, "identity", 5.0, 15.0, 65536]),
    ],
    ids=["value", "tag", "claimed memory", "deep settings", "many parameters", "many dimensions"],
)
def test_large_headers_are_refused_briefly(header):
    assert len(header) <= wire.HEADER_BYTES_MAX
    assert decode_or_refuse(header) is None


def test_headers_over_the_limit_are_refused_unread():
    header = pack(StatusRequest.kind, [], padding=bytes(wire.HEADER_BYTES_MAX))
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        wire.decode(header)
    fits = pack(StatusRequest.kind, [], padding=bytes(wire.HEADER_BYTES_MAX - 9))
    assert len(fits) == wire.HEADER_BYTES_MAX
    assert wire.decode(fits) == StatusRequest()
