"""Type, bounds, default and meaning of a setting follow from the struct that declares it."""

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from edgeasync.cli.settings import FILES
from edgeasync.config import ByteCount, FilePath, Section
from edgeasync.setting_keys import SettingKey, keys_of, meanings_of, plain, tables_of


class Base(Section, frozen=True):
    folder: FilePath | None = None
    """Where it lies."""


class Mean(Section, frozen=True, tag_field="kind", tag="mean"):
    share: Annotated[float, Meta(gt=0, le=1)] = 0.5


class Inner(Section, frozen=True):
    size: ByteCount = ByteCount(1 << 16)


class Made(Base, frozen=True, kw_only=True):
    count: Annotated[int, Meta(ge=1, lt=9)]
    """How many, see [the
    page](/page.md). Not one.

    Really.
    """
    word: Literal["a", "b"] | None = None
    either: Annotated[int, Meta(ge=1)] | Literal["auto"] = "auto"
    combine: Mean = Mean()
    inner: Inner = Inner()


def test_keys_have_type_bounds_default_and_meaning():
    assert [msgspec.structs.astuple(key) for key in keys_of(Made)] == [
        ("folder", "path", "", False, None, "Where it lies."),
        ("count", "integer", "1 to under 9", True, None, "How many, see [the page](/page.md). Not one. Really."),
        ("word", '"a" or "b"', "", False, None, ""),
        ("either", 'integer, 1 or more or "auto"', "", False, "auto", ""),
        ("combine", "table", "", False, {"kind": "mean"}, "One of mean."),
        ("inner", "table", "", False, {}, ""),
    ]  # fmt: skip


def test_a_terminal_gets_no_links_and_help_the_first_sentence():
    count = keys_of(Made)[1]
    assert count.words == "How many, see the page. Not one. Really."
    assert count.summary == "How many, see the page"
    assert SettingKey("a", "", "", False, None, "The file: [A page](/a.md). More.").summary == "The file"


def test_a_class_without_source_has_no_meanings():
    assert meanings_of(msgspec.defstruct("Typed", [("one", int, 1)])) == {}


def test_sizes_have_units_and_kinds_only_what_is_not_a_default():
    assert plain(ByteCount(3 << 20)) == "3 MiB"
    assert plain(ByteCount(0)) == "0 B"
    assert plain((Mean(), Mean(share=1.0))) == [{"kind": "mean"}, {"kind": "mean", "share": 1.0}]
    assert plain(msgspec.UNSET) is None


def test_tables_are_found_by_their_paths():
    assert dict(tables_of(Made)) == {"": Made, "combine.mean": Mean, "inner": Inner}


TABLES = {path or file: struct for file, whole in FILES.items() for path, struct in tables_of(whole)}


@pytest.mark.parametrize("path", TABLES)
def test_every_setting_says_what_it_means(path):
    for key in keys_of(TABLES[path]):
        assert key.description.endswith((".", "?")), f"{path}.{key.name}: write a docstring below the field"
