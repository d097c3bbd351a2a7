"""Output of `edgeasync policies`."""

import json
import re

import msgspec
import pytest
from typer.testing import CliRunner

from edgeasync.cli.main import app
from edgeasync.cli.policies import choose
from edgeasync.errors import ConfigError
from edgeasync.policies.catalogue import Kind, catalogue

KINDS = catalogue()


# -- the command -----------------------------------------------------------------------------------------------


@pytest.fixture
def say(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        told = CliRunner().invoke(app, ["policies", *arguments])
        assert told.exit_code == 0
        return told.stdout

    return run


def test_the_list_has_every_kind_and_marks_the_defaults(say):
    told = say()
    assert max(map(len, told.splitlines())) <= 80
    parts = dict(re.findall(r"^([a-z_.]+)(?: \([^)]+\))?\n(.+?)\n\n", told, re.MULTILINE | re.DOTALL))
    assert list(parts) == list(dict.fromkeys(kind.part for kind in KINDS))
    for kind in KINDS:
        mark = (r"\*" if kind.default else " ") + f" {kind.kind} " if kind.kind else r"  \S"
        assert re.search(rf"^{mark}", parts[kind.part], re.MULTILINE), (kind.part, kind.kind)
        words = " ".join(parts[kind.part].split())
        assert "as above" in words or all(key.name in words for key in kind.parameters), (kind.part, kind.kind)


def test_a_kind_of_two_parts_is_told_once(say):
    told = say("synchronous")
    assert told.startswith("aggregate, kind synchronous\n")
    assert "also in warm_up.aggregate\n" in told
    assert say("fixed").count("local_steps: integer") == 1
    assert 'by default warm_up.frequency has { kind = "fixed", local_steps = 8 }\n' in say("fixed")
    assert say("monitor").startswith("monitor\nWatch for divergence")
    assert say("take").startswith("take\ntake: ")


def test_one_kind_in_full(say):
    told = say("trimmed_mean")
    assert told.startswith("combine, kind trimmed_mean\n")
    assert "trim: number, over 0 to under 0.5, default 0.1\n    Share of the values that is removed" in told
    assert told.endswith('\n\ncombine = { kind = "trimmed_mean", trim = 0.1 }\n')
    assert "staleness_max: number, 0 or more, optional\n" in say("constant")
    assert "rate: number, over 0 to 1, required\n" in say("weight_decay")
    assert say("polynomial").startswith("staleness, kind polynomial (the default)\n")


def test_one_part_in_full(say):
    told = say("staleness")
    assert [line for line in told.splitlines() if line.startswith("staleness = ")] == [
        kind.example for kind in KINDS if kind.part == "staleness"
    ]


def test_json_is_one_array(say):
    kinds = json.loads(say("--json"))
    assert kinds == json.loads(msgspec.json.encode(KINDS))
    assert [msgspec.convert(kind, Kind).kind for kind in kinds] == [kind.kind for kind in KINDS]
    (constant,) = json.loads(say("constant", "--json"))
    assert (constant["kind"], constant["default"]) == ("constant", None)
    assert [key["name"] for key in constant["parameters"]] == ["staleness_max"]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("constants", "did you mean constant"),
        ("stalness", "did you mean staleness"),
        ("??", "with `edgeasync policies`"),
    ],
)
def test_what_there_is_not_is_answered_with_what_is_near(name, advice):
    with pytest.raises(ConfigError) as caught:
        choose(KINDS, name)
    assert f"{name!r}; " in str(caught.value)
    assert advice in str(caught.value)
