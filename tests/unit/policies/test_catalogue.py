"""The catalogue of policies: of the real ones nothing is missing, of made-up ones everything is read."""

import re
import tomllib
from typing import Annotated, ClassVar, Literal

import msgspec
import pytest
from msgspec import Meta

from edgeasync.config import ByteCount, Section, convert
from edgeasync.policies.catalogue import catalogue, to_toml
from edgeasync.policies.policy import Policy

KINDS = catalogue()

# What one part asks of another is for `Policy` to check; an example is of one part alone.
PARTS = msgspec.defstruct(
    "Parts",
    [(field.name, field.type, field.default) for field in msgspec.structs.fields(Policy)],
    bases=(Section,),
    frozen=True,
)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.part}:{kind.kind}")


# -- the real ones ---------------------------------------------------------------------------------------------


@every_kind
def test_it_says_what_it_does_in_one_sentence(kind):
    assert kind.summary
    assert "\n" not in kind.summary
    assert not kind.summary.endswith(".")


@every_kind
def test_every_key_has_a_meaning_and_a_type(kind):
    assert [key.name for key in kind.parameters if not key.description] == []
    assert all(key.type for key in kind.parameters)


@every_kind
def test_its_example_has_the_defaults_or_values_to_begin_with(kind):
    """Never one that only fits: a rate of 1 would be read, and would do harm."""
    if kind.default is not None:
        assert kind.default in kind.example
    assert set(kind.chosen) <= {
        "behind_max", "decay", "delay", "every", "rate", "staleness_max", "trust", "updates", "warm_up"
    }, "give the key's Meta an example"  # fmt: skip
    assert not re.search(r"\b(behind_max|decay|delay|every|rate|updates) = [12](\.0)?\b", kind.example)


@every_kind
def test_its_example_is_read(kind):
    assert convert(tomllib.loads(kind.example), PARTS, where=kind.example) is not None


def test_every_part_is_there_and_has_its_default():
    assert {kind.part.split(".")[0] for kind in KINDS} == set(Policy.__struct_fields__)
    optional = {field.name for field in msgspec.structs.fields(Policy) if field.default is None}
    defaults = [kind for kind in KINDS if kind.default is not None]
    assert {kind.part for kind in defaults} >= set(Policy.__struct_fields__) - optional
    assert ("staleness", "polynomial") in [(kind.part, kind.kind) for kind in defaults]


def test_no_kind_stands_twice_in_a_part():
    names = [(kind.part, kind.kind) for kind in KINDS]
    assert len(names) == len(set(names))


# -- made-up ones ----------------------------------------------------------------------------------------------


class Plain(Section, frozen=True, tag_field="kind", tag="plain"):
    """As Doe et al. 2020 do, e.g. here; it is
    short. Nothing of this sentence.
    """

    paper: ClassVar[str] = "Doe et al. 2020"

    needed: Annotated[int, Meta(ge=2, le=8)]
    """How many."""
    size: ByteCount = ByteCount(1024)
    ratio: Annotated[float, Meta(gt=0.0, lt=0.5)] | None = None
    """How much.

    As a share.
    """
    mode: Literal["a", "b"] = "b"
    names: tuple[str, ...] = ()
    widths: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: [3]
    )
    on: bool = False


class Bare(Section, frozen=True, tag_field="kind", tag="bare"):
    """Nothing to set"""


class Chain(Section, frozen=True, tag_field="kind", tag="chain"):
    """Kinds within a kind. It may hold itself."""

    first: "Plain | Bare"
    label: str
    """A name."""
    rest: "tuple[Plain | Chain, ...]" = ()


class Watch(Section, frozen=True):
    """Keys and kinds, but no kind of its own."""

    every: float | None = None
    """How often."""
    seldom: float | None = None
    """How seldom."""
    on: tuple[Plain | Bare, ...] = (Bare(), Plain(needed=3))

    def __post_init__(self):
        if (self.every or 1.0) > 1.0 or (self.every is None and self.seldom is None and self.on == ()):
            raise ValueError


class Whole(Section, frozen=True):
    one: Plain | Bare | None = None
    """A part."""
    chain: Chain = Chain(first=Bare(), label="x")
    watch: Watch = Watch()
    limit: Annotated[float, Meta(gt=9.0)] | None = None
    """How far."""


MADE_UP = catalogue(Whole)


def found(part, kind):
    (one,) = [item for item in MADE_UP if (item.part, item.kind) == (part, kind)]
    return one


def test_every_part_within_parts_is_found_in_order():
    assert [(kind.part, kind.kind, kind.many) for kind in MADE_UP] == [
        ("one", "plain", False),
        ("one", "bare", False),
        ("chain", "chain", False),
        ("chain.first", "plain", False),
        ("chain.first", "bare", False),
        ("chain.rest", "plain", True),
        ("chain.rest", "chain", True),
        ("watch", "", False),
        ("watch.on", "plain", True),
        ("watch.on", "bare", True),
        ("limit", "", False),
    ]


def test_what_is_said_of_a_kind():
    plain = found("one", "plain")
    assert plain.summary == "As Doe et al. 2020 do, e.g. here; it is short"
    assert plain.paper == "Doe et al. 2020"
    assert [msgspec.structs.astuple(key) for key in plain.parameters] == [
        ("needed", "integer", "2 to 8", True, None, "How many."),
        ("size", "size", "", False, "1 KiB", ""),
        ("ratio", "number", "over 0 to under 0.5", False, None, "How much. As a share."),
        ("mode", '"a" or "b"', "", False, "b", ""),
        ("names", "list of strings", "", False, [], ""),
        ("widths", "list of integers", "1 or more, each 1 or more", False, [3], ""),
        ("on", "boolean", "", False, False, ""),
    ]
    bare = found("one", "bare")
    assert (bare.summary, bare.paper, bare.parameters) == ("Nothing to set", "", ())


def test_a_part_within_a_kind_is_a_key_too():
    first, label, rest = found("chain", "chain").parameters
    assert (first.type, first.required, first.description) == ("table", True, "One of plain, bare.")
    assert (label.type, label.description) == ("string", "A name.")
    assert (rest.type, rest.description) == ("list of tables", "One of plain, chain.")


def test_a_mere_key_is_a_part():
    limit = found("limit", "")
    assert (limit.summary, limit.default, limit.example) == ("How far", None, "limit = 10.0")
    (key,) = limit.parameters
    assert (key.name, key.type, key.bounds) == ("limit", "number", "over 9")


def test_the_default_of_a_part_is_marked_with_its_values():
    assert [(kind.part, kind.kind) for kind in MADE_UP if kind.default] == [
        ("chain", "chain"),
        ("watch", ""),
        ("watch.on", "plain"),
        ("watch.on", "bare"),
    ]
    assert found("watch.on", "plain").default.startswith('{ kind = "plain", needed = 3, ')
    assert found("watch.on", "plain").table.startswith('{ kind = "plain", needed = 2, ')


@pytest.mark.parametrize("kind", MADE_UP, ids=lambda kind: f"{kind.part}:{kind.kind}")
def test_an_example_chooses_its_kind(kind):
    value = convert(tomllib.loads(kind.example), Whole, where=kind.example)
    for key in kind.part.split("."):
        value = getattr(value, key)
        value = value[0] if isinstance(value, tuple) else value
    if kind.part == "limit":
        assert value == 10.0
        return
    assert value.__struct_config__.tag == (kind.kind or None)


def test_an_example_within_a_kind_stands_in_that_kind():
    assert found("chain.first", "bare").example == (
        'chain = { kind = "chain", label = "text", first = { kind = "bare" } }'
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1, "b": None, "c": [1.0, True]}, "{ a = 1, c = [1.0, true] }"),
        ({}, "{}"),
        (1e-8, "1e-08"),
        (float("inf"), "inf"),
        ('say "so"\n', r'"say \"so\"\n"'),
        ((), "[]"),
    ],
)
def test_toml_on_one_line(value, text):
    assert to_toml(value) == text
    assert tomllib.loads(f"x = {text}")["x"] is not None


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({}, ""),
        ({"ge": 0}, "0 or more"),
        ({"gt": 0.5}, "over 0.5"),
        ({"le": 1_000_000}, "1,000,000 or less"),
        ({"lt": 1}, "under 1"),
        ({"gt": -1, "le": 0}, "over -1 to 0"),
    ],
)
def test_bounds_in_words(bounds, words):
    struct = msgspec.defstruct(
        "Kind",
        [("key", Annotated[float, Meta(**bounds)])],
        bases=(Section,),
        frozen=True,
        tag_field="kind",
        tag="k",
    )
    whole = msgspec.defstruct("Whole", [("part", struct)], bases=(Section,), frozen=True)
    (kind,) = catalogue(whole)
    assert kind.parameters[0].bounds == words
    assert kind.summary == ""
    convert(tomllib.loads(kind.example), whole, where=kind.example)
