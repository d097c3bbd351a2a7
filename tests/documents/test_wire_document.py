"""docs/reference/wire is what others write their agents from: it must not drift from the structs."""

import json
import math
import re
from pathlib import Path
from typing import get_args

import jsonschema
import msgpack
import msgspec
import numpy as np
import pytest
from msgspec import inspect

from edgeasync.core.hub.events import Evaluated, HubReceived
from edgeasync.core.hub.fleet_words import REMEDIES
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.member import DeviceState
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.monitor import Observation, Remedy
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import STAGES, VectorSource, make_codec, stages_of
from edgeasync.protocol.messages import (
    MESSAGES,
    Applied,
    Buffered,
    Deltas,
    DeviceProfile,
    Duplicate,
    Frozen,
    Hello,
    ModelVersion,
    Order,
    RefusalCode,
    Rejected,
)
from edgeasync.protocol.peer_messages import PEER_MESSAGES
from edgeasync.protocol.status import ActiveAlarm, DeviceStatus
from edgeasync.protocol.transfers import PIECE_BYTES_MIN
from edgeasync.setting_keys import meanings_of
from tests.support.parts.statuses import DAEMON
from tests.support.programs.outputs import validator

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("index", "messages", "transfers", "keys", "peers")
TEXT = "\n".join((DOCS / f"reference/wire/{page}.md").read_text(encoding="utf-8") for page in PAGES)
every_message = pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: MESSAGES[kind].__name__)


def section(heading, text=TEXT):
    """Return the text under a heading, up to the next one of any level."""
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, f"no heading {heading!r}"
    return re.split(r"\n#+ ", rest, maxsplit=1)[0]


def rows(text):
    """Return the table rows whose first cell is code: that code, and the rest of the row."""
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.MULTILINE))


def check_fields(struct, text):
    table = rows(text)
    assert tuple(table) == struct.__struct_fields__
    for field in msgspec.structs.fields(struct):
        assert ("default" in table[field.name]) == (not field.required), field.name


def test_every_page_is_read():
    assert {path.stem for path in (DOCS / "reference/wire").glob("*.md")} == set(PAGES)


def test_the_messages_are_all_there_in_order():
    headings = re.findall(r"^### (\w+) \((\d+)\)$", TEXT, re.MULTILINE)
    assert headings == [(message.__name__, str(kind)) for kind, message in MESSAGES.items()]


@every_message
def test_every_field_is_described_in_order_with_its_default(kind):
    message = MESSAGES[kind]
    check_fields(message, section(f"### {message.__name__} ({kind})"))


@pytest.mark.parametrize("struct", [ModelVersion, DeviceProfile, Deltas, Frozen, ParameterSpec, Parameter])
def test_inner_arrays_are_described_in_order(struct):
    check_fields(struct, section(f"### {struct.__name__}"))


@every_message
def test_bounds_stand_in_the_row_of_their_field(kind):
    check_bounds(MESSAGES[kind], section(f"### {MESSAGES[kind].__name__} ({kind})"))


def test_bounds_of_a_profile_stand_in_their_rows():
    check_bounds(DeviceProfile, section("### DeviceProfile"))


def test_bounds_of_a_checksum_of_frozen_arrays_stand_in_their_rows():
    check_bounds(Frozen, section("### Frozen"))


def check_bounds(struct, text):
    table = rows(text)
    for field in inspect.type_info(struct).fields:
        name = field.encode_name
        wire_type, bound, _ = (cell.strip() for cell in f"{table[name]} ".split("|"))
        if wire_type in ("count", "u64"):  # their bounds stand under Types
            assert (field.type.ge, field.type.le) == (0, 2**53 if wire_type == "count" else None), name
            continue
        values = [getattr(field.type, limit, None) for limit in ("ge", "gt", "le")]
        for value in values:
            assert value is None or written(value) in bound.replace(" ", ""), name
        if isinstance(field.type, inspect.LiteralType) and name != "code":
            assert re.findall(r"`(\w+)`", bound) == sorted(field.type.values)


def written(value):
    powers = {2**53: "2⁵³", 2**31: "2³¹", 2**30: "2³⁰", 1e9: "10⁹"}
    return powers.get(value, f"{value:g}" if value < 1e5 else str(int(value)))


def test_outcomes_and_reasons():
    text = section("### Outcomes")
    outcomes = [
        (outcome.__struct_config__.tag, *outcome.__struct_fields__)
        for outcome in (Applied, Buffered, Rejected, Duplicate)
    ]
    found = re.findall(r'`\["(\w+)", (\w+(?:, \w+)*)\]`', text)
    assert [(name, *fields.split(", ")) for name, fields in found] == outcomes
    reason, _ = inspect.type_info(Rejected).fields
    assert sorted(rows(text)) == sorted(reason.type.values)


def test_refusals_and_codecs():
    assert tuple(rows(section("## Refusals"))) == get_args(RefusalCode)
    assert tuple(rows(section("## Codecs"))) == (*(stage for stage in STAGES if stage != "zstd"), "zstd")


CODED = rows(section("### Examples of payloads"))


def test_every_stage_has_an_example():
    assert set(STAGES) <= set().union(
        *(stages_of(name) for name in CODED if "zstd" in STAGES or "zstd" not in name)
    )


@pytest.mark.parametrize("name", CODED)
def test_payloads_are_what_the_examples_say(name):
    if "zstd" in name and "zstd" not in STAGES:
        pytest.skip("the zstandard package is missing")
    spec = ParameterSpec((Parameter("w", (3, 3)), Parameter("m", (1,), "statistic")))
    vector = np.array([0.5, -1, 0.25, 1, -2, 0.5, 0, 0, 0, 0.75], np.float32)
    codec = make_codec(name, spec)
    payload = bytes.fromhex(CODED[name].strip("` |"))
    if "zstd" not in name:  # others may compress otherwise
        assert bytes(codec.encode(VectorSource(vector))) == payload
    decoded = codec.open(payload).read(0, 10, np.empty(10, np.float32))
    exact = {
        "int8": 0.01,
        "int4": 0.15,
        "sign": 1.5,
        "top_k(0.2)": 1.0,
        "top_k(0.2)+float16": 1.0,
    }
    np.testing.assert_allclose(decoded, vector, atol=exact.get(name, 0.0), rtol=0.0)


def test_bytes_of_dense_stages_are_what_their_formulas_say():
    table = rows(section("## Codecs"))
    for name in ("identity", "float16", "bfloat16", "int8", "int4", "sign"):
        formula = table[name].partition(" | ")[0]
        formula = re.sub(r"⌈n / (\d+)⌉", r"(-(-n // \1))", formula)
        formula = re.sub(r"(\d) (?=[n(])", r"\1 * ", formula)
        for n in (1, 2, 255, 256, 257, 1000):
            spec = ParameterSpec((Parameter("w", (n,)), Parameter("m", (2,), "statistic")))
            assert make_codec(name, spec).payload_bytes_max == eval(formula, {"n": n}) + 8, name


def test_the_status_has_the_keys_that_are_described():
    spec = ParameterSpec((Parameter("weights", (3,)),))
    core = HubCore(
        spec=spec, training={}, policy=Policy(), settings=HubCoreSettings(),
        version=ModelVersion("00c0ffee00c0ffee", 0), make_session=lambda: bytes(16), now_s=0.0,
    )  # fmt: skip
    core.handle(HubReceived(b"peer", Hello("a", bytes(16), 1)), 0.0)
    for _ in range(3):
        core.policy_engine.divergence.watch_device(
            Observation("a", math.nan, 1, math.nan, core.members.members["a"].voter, finite=False),
            core.policy_engine.state.fleet,
            0.0,
            voters=("a",),
            voters_live=1,
        )
    with_alarm = core.status(1.0)
    core.handle(HubReceived(b"operator", Order("a", "release")), 1.0)
    core.policy_engine.observe_evaluation(Evaluated(0, 1.0, 0.5), 0.0)
    for status in (with_alarm, core.status(1.0)):
        assert status["alarms"] or status["alarms_past"]
        validator("status").validate(json.loads(msgspec.json.encode(status | DAEMON)))
    with pytest.raises(jsonschema.ValidationError):
        validator("status").validate(status | DAEMON | {"unknown": 1})


def test_states_and_remedies_are_those_of_the_hub():
    fields = {field.name: field.type for field in inspect.type_info(DeviceStatus).fields}
    assert set(fields["state"].values) == set(get_args(DeviceState))
    named = set(re.findall(r"`(\w+)`", meanings_of(ActiveAlarm)["remedy"])) - {"trust"}
    assert named == {*get_args(Remedy), *REMEDIES}


def test_limits():
    text = "".join(TEXT.split()).lower()
    assert f"atleast{wire.HEADER_BYTES_MIN}byteslong" in text
    assert f"atmost{wire.HEADER_BYTES_MAX}bytes" in text
    assert f"atleast{PIECE_BYTES_MIN}." in text


def shown(value):
    return value.hex() if isinstance(value, bytes) else value


def test_examples_decode_to_what_they_say():
    examples = re.findall(r"```hex\n(.+?)```\s+```json\n(.+?)```", TEXT, re.DOTALL)
    assert len(examples) == 2
    for digits, described in examples:
        header = bytes.fromhex(digits)
        name, fields = json.loads(described)
        message = wire.decode(header)
        assert type(message).__name__ == name
        assert tuple(fields) == message.__struct_fields__
        assert list(fields.values()) == [shown(value) for value in msgpack.unpackb(header)[2]]
        assert wire.encode(message) == header


def test_the_examples_payload_has_its_checksum_and_values():
    (digits,) = re.findall(r"```payload\n(.+?)```", TEXT, re.DOTALL)
    payload = bytes.fromhex(digits)
    assert f"`{wire.checksum(payload):016x}`" in TEXT
    assert f'"checksum": {wire.checksum(payload)}, "payload_bytes": {len(payload)}' in TEXT
    assert list(memoryview(payload).cast("f")) == [0.5, -1.0, 0.25]


def test_messages_between_peers_and_their_fields():
    table = re.findall(r"^\| `(\w+)` \((\d+)\) \| (.+) \|$", section("## Messages between peers"), re.MULTILINE)
    told = {int(kind): (name, *re.findall(r"`(\w+)`", fields)) for name, kind, fields in table}
    assert told == {
        kind: (message.__name__, *message.__struct_fields__) for kind, message in PEER_MESSAGES.items()
    }
