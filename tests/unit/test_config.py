import json
import pwd
from typing import Annotated, Literal

import pytest
from msgspec import Meta

from edgeasync.config import ByteCount, Section, convert, expanded, read_toml, to_table
from edgeasync.errors import ConfigError
from edgeasync.policies.policy import Policy
from edgeasync.runtime.agent_settings import AgentSettings
from edgeasync.runtime.hub_settings import HubSettings
from edgeasync.runtime.peer_settings import PeerSettings
from edgeasync.training.numpy_models import SoftmaxModel


class Half(Section, frozen=True, tag_field="kind", tag="half"):
    of: int


class Full(Section, frozen=True, tag_field="kind", tag="full"):
    height: int = 1


class Hub(Section, frozen=True):
    bind: str
    count: Annotated[int, Meta(ge=1)] = 1
    payload_bytes_max: ByteCount = ByteCount(1024)
    talks: Literal["loud", "low"] | None = None
    stage: Half | Full | None = None


class File(Section, frozen=True):
    hub: Hub
    steps: tuple[Hub, ...] = ()


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "hub.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def complaint(path):
    """What the person reads: one line that begins with the file."""
    with pytest.raises(ConfigError) as caught:
        read_toml(path, File)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message.splitlines()) == 1
    return message.removeprefix(f"{path}: ")


def test_reads_a_file_with_defaults(toml):
    path = toml('[hub]\nbind = "tcp://*:5555"\npayload_bytes_max = "64 MiB"\n[[steps]]\nbind = "x"\n')
    assert read_toml(path, File) == File(
        hub=Hub(bind="tcp://*:5555", payload_bytes_max=ByteCount(64 * 2**20)), steps=(Hub(bind="x"),)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[hub]\nbind = "x"\nbnd = 1', "hub: unknown key `bnd`; did you mean bind?"),
        ('[hub]\nbind = "x"\n[hbu]\n', "unknown key `hbu`; did you mean hub?"),
        (
            '[hub]\nbind = "x"\nport = 1',
            "hub: unknown key `port`; choose from bind, count, payload_bytes_max, talks, stage",
        ),
        ('[hub]\nbind = "x"\ntalks = "lowd"', "hub.talks: 'lowd' is not known; did you mean loud or low?"),
        ('[hub]\nbind = "x"\ntalks = "?"', "hub.talks: '?' is not known; choose from loud, low"),
        ('[hub]\nbind = "x"\nstage = { kind = "ful" }', "hub.stage.kind: 'ful' is not known; did you mean full?"),
        ('[hub]\nbind = "x"\nstage = { of = 2 }', "hub.stage: missing key `kind`; choose from half, full"),
        (
            '[hub]\nbind = "x"\nstage = { kind = "half", of = 1, off = 2 }',
            "hub.stage: unknown key `off`; did you mean of?",
        ),
        ('[hub]\nbind = "x"\n[[steps]]\nbind = "y"\nbin = 1', "steps[0]: unknown key `bin`; did you mean bind?"),
        ("[hub]\n", "hub: missing key `bind`"),
        ("hub = 3", "hub: expected `object`, got `int`"),
        ('[hub]\nbind = "x"\ncount = 0', "hub.count: expected `int` >= 1"),
        ('[hub]\nbind = "x"\ncount = true', "hub.count: expected `int`, got `bool`"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(toml, text, message):
    assert complaint(toml(text)) == message


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('[hub]\nbind = "tcp://\\u0000"', "hub.bind"),
        ('[hub]\nbind = "x"\n[[steps]]\nbind = "a\\u0000b"', "steps[0].bind"),
        ('name = ["", "\\u0000"]', "name[1]"),
    ],
)
def test_a_text_with_a_nul_is_refused(toml, text, path):
    """It would end a name of a file or an address for the system, but not for Python."""
    assert complaint(toml(text)) == f"{path}: contains a NUL character; remove it"


@pytest.mark.parametrize("text", ["[hub", "bind = ", "a = 1\na = 2", b"a = '\xff'", b"\x00", "hub = 1979-13-01"])
def test_broken_toml_is_one_line(toml, text):
    assert complaint(toml(text)).startswith("not valid TOML: ")


def test_missing_file_says_what_to_give(tmp_path):
    assert "no such file; pass the path of a TOML settings file" in complaint(tmp_path / "none.toml")


def test_a_user_without_a_home_is_told_to_write_the_whole_path(monkeypatch, tmp_path):
    """As in a container: no HOME, and no entry of the user."""

    def unknown(_):
        raise KeyError

    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/state") == tmp_path / "state"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match="~/state: unknown home folder; use an absolute path"):
        expanded("~/state")
    assert expanded(tmp_path) == tmp_path


def test_folder_instead_of_file(tmp_path):
    assert complaint(tmp_path).startswith("cannot be read: ")


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = " + "[" * 20_000], ids=["digits", "nesting"])
def test_toml_beyond_the_parser_is_a_config_error(toml, text):
    assert complaint(toml(text)).startswith("not valid TOML: ")


@pytest.mark.parametrize("key", ["x` - at `$.foo", "x` - at `$[7]", "x` - at `$.hub.bind.y"])
def test_a_key_that_looks_like_a_path_is_a_config_error(toml, key):
    assert "unknown key `x`" in complaint(toml(f'"{key}" = 1\n[hub]\nbind = "x"'))


@pytest.mark.parametrize("settings", [HubSettings, AgentSettings, PeerSettings, Policy])
def test_a_key_with_one_letter_too_many_is_answered_with_the_right_one(settings):
    """Every key of every table that has a default, wherever it stands."""
    whole = to_table(settings(**({"model": SoftmaxModel(inputs=8, classes=3)} if settings is HubSettings else {})))
    keys = list(paths(whole))
    assert len(keys) > 8
    for *above, key in keys:
        table = json.loads(json.dumps(whole))
        inner = table
        for step in above:
            inner = inner[step]
        inner[key + "x"] = inner[key]
        with pytest.raises(ConfigError) as caught:
            convert(table, settings, where="it")
        told = str(caught.value)
        assert f"unknown key `{key}x`; did you mean {key}" in told, told


def paths(table, above=()):
    """Yield the path of every key in nested tables."""
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        if isinstance(value, dict | list):
            yield from paths(value, (*above, key))
        if isinstance(table, dict) and key != "kind":
            yield (*above, key)


@pytest.mark.parametrize("key", [r"a\nb", "a - at b"])
def test_strange_key_stays_whole_and_on_one_line(toml, key):
    message = complaint(toml(f'[hub]\nbind = "x"\n"{key}" = 1'))
    assert message.startswith("hub: unknown key ")
    assert key in message


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0),
        (2**40, 2**40),
        ("0 B", 0),
        ("512B", 512),
        ("500 kB", 500_000),
        ("3 MB", 3_000_000),
        ("2 GB", 2_000_000_000),
        ("1 KiB", 1024),
        ("64 MiB", 64 * 2**20),
        (" 1.5  GiB ", 3 * 2**29),
    ],
)
def test_sizes(value, size):
    parsed = ByteCount.parse(value)
    assert type(parsed) is ByteCount
    assert parsed == size


@pytest.mark.parametrize(
    "value", [-1, 1.5, True, None, "", "64", "64 MIB", "64 KB", "64 kiB", "-1 B", "1e3 B", "1 TiB", "B", [1]]
)
def test_what_is_not_a_size_is_refused_with_the_units(value):
    with pytest.raises(ValueError, match="is not a size; use bytes or one of B, kB, MB, GB, KiB, MiB, GiB"):
        ByteCount.parse(value)


def test_wrong_size_has_its_path(toml):
    message = complaint(toml('[hub]\nbind = "x"\npayload_bytes_max = "64 mb"'))
    assert message.startswith("hub.payload_bytes_max: '64 mb' is not a size")


def test_endless_size_is_a_config_error(toml):
    complaint(toml(f'[hub]\nbind = "x"\npayload_bytes_max = "{"9" * 400} B"'))


def test_whole_sizes_are_exact():
    assert ByteCount.parse("9007199254740993 B") == 2**53 + 1


def test_convert_says_where_the_table_came_from():
    with pytest.raises(ConfigError, match=r"^--set hub: missing key `bind`$"):
        convert({}, Hub, where="--set hub")


def test_table_and_settings_round_trip():
    settings = File(hub=Hub(bind="x", payload_bytes_max=ByteCount(7)), steps=(Hub(bind="y"),))
    table = to_table(settings)
    assert table["hub"] == {"bind": "x", "count": 1, "payload_bytes_max": 7, "talks": None, "stage": None}
    assert convert(table, File, where="again") == settings
