"""Describes settings: the keys of a table with type, bounds, default and meaning.

The meaning of a key is the docstring below its field. It is read from the source code only when it
is needed: for `--help`, for the reference in the documentation, and for `edgeasync schema`.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import inspect as types

from edgeasync.config import ByteCount, FilePath, kinds_of, to_table

Lists = types.ListType | types.VarTupleType

_SENTENCE_END = re.compile(r"(?<!\bal)(?<!\be\.g)(?<!\bi\.e)\.(?=\s|$)")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


class SettingKey(msgspec.Struct, frozen=True):
    """One key of a settings table.

    `default` is the plain value, or `None` if the key is required or omitted by default.
    """

    name: str
    type: str
    bounds: str
    required: bool
    default: Any
    description: str

    @property
    def words(self) -> str:
        """The description without links, for a terminal."""
        return _LINK.sub(r"\1", self.description)

    @property
    def summary(self) -> str:
        """The first sentence of the description, without its period and without a link at its end."""
        return _LINK.sub(r"\1", re.sub(rf"[:;,] {_LINK.pattern}$", "", first_sentence(self.description)))


def first_sentence(words: str) -> str:
    """Return the first sentence of a docstring on one line, without its period.

    >>> first_sentence("Wait for all, e.g. for ten. Then begin.")
    'Wait for all, e.g. for ten'
    """
    paragraph = inspect.cleandoc(words).split("\n\n")[0]
    return _SENTENCE_END.split(" ".join(paragraph.split()), maxsplit=1)[0]


def keys_of(settings: type) -> list[SettingKey]:
    """Return the keys of a struct in order."""
    info = types.type_info(settings)
    assert isinstance(info, types.StructType)
    meanings = meanings_of(settings)
    return [describe(field, meanings.get(field.name, "")) for field in info.fields]


def describe(field: types.Field, meaning: str) -> SettingKey:
    """Describe a field. If `meaning` is empty and there are several kinds, the description lists them."""
    kinds = [str(struct.tag) for struct in structs_of(field.type) if struct.tag is not None]
    if kinds and not meaning:
        meaning = f"One of {', '.join(kinds)}."
    word, bounds = _words(field.type)
    return SettingKey(
        name=field.encode_name,
        type=word,
        bounds=bounds,
        required=field.required,
        default=None if field.required else plain(default_of(field)),
        description=meaning,
    )


@lru_cache(maxsize=256)
def meanings_of(settings: type) -> dict[str, str]:
    """Return the docstrings of a class's fields, each on one line, by field name.

    Docstrings of base classes are included.

    The result is empty for a class without source code, such as one defined at a prompt.
    """
    found: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        if issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct:
            found |= _docstrings_in(kind)
    return found


def _docstrings_in(kind: type) -> dict[str, str]:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    body = getattr(tree, "body", [])
    found = {}
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(words))):
                    found[field.target.id] = " ".join(words.split())
    return found


def plain(value: Any) -> Any:
    """Convert a setting to its shortest form in a file.

    Sizes get a unit, and tables omit default values.
    """
    if isinstance(value, ByteCount):
        return value.words
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is msgspec.UNSET:
        return None
    if not isinstance(value, msgspec.Struct):
        return to_table(value)
    config = value.__struct_config__
    table = {} if config.tag is None else {str(config.tag_field): config.tag}
    for field in msgspec.structs.fields(value):
        given = getattr(value, field.name)
        if given is not msgspec.UNSET and (field.required or given != field.default):
            table[field.encode_name] = plain(given)
    return table


def to_toml(value: Any) -> str:
    """Format a plain value as TOML on one line. Keys without a value are omitted."""
    if isinstance(value, dict):
        return braces([f"{key} = {to_toml(item)}" for key, item in value.items() if item is not None])
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # includes infinity, which JSON cannot represent
    return msgspec.json.encode(value).decode()


def braces(items: list[str]) -> str:
    """Format an inline table of TOML.

    >>> braces(["kind = 'mean'"])
    "{ kind = 'mean' }"
    """
    return "{ " + ", ".join(items) + " }" if items else "{}"


def bare(kind: types.Type) -> types.Type:
    """Return a type without bounds, and without the `None` of an optional key."""
    while isinstance(kind := kinds_of(kind), types.Metadata):
        kind = kind.type
    if isinstance(kind, types.UnionType):
        others = [inner for inner in kind.types if not isinstance(inner, types.NoneType)]
        return bare(others[0]) if len(others) == 1 else types.UnionType(tuple(others))
    return kind


def structs_of(kind: types.Type) -> list[types.StructType]:
    """Return the tables that a type may contain: a table, a union of kinds, or a list of them."""
    inner = bare(kind)
    if isinstance(inner, types.StructType):
        return [inner]
    if isinstance(inner, types.UnionType):
        return [struct for each in inner.types for struct in structs_of(each)]
    return structs_of(inner.item_type) if isinstance(inner, Lists) else []


def tables_of(settings: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Yield every table of a settings file with its path, such as `hub.stop`; the top level has "".

    For a key with several kinds, the path includes the kind: `model.mlp`.
    """
    yield path, settings
    info = types.type_info(settings)
    assert isinstance(info, types.StructType)
    for field in info.fields:
        for inner in structs_of(field.type):
            below = f"{path}.{field.encode_name}".removeprefix(".")
            yield from tables_of(inner.cls, below if inner.tag is None else f"{below}.{inner.tag}")


def default_of(field: types.Field) -> Any:
    """Return the default of a field, or `None` if it has none or is omitted by default."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default in (msgspec.NODEFAULT, msgspec.UNSET) else field.default


def _words(kind: types.Type) -> tuple[str, str]:
    """Return the type and bounds of a setting in words."""
    inner = bare(kind)
    if isinstance(inner, types.IntType | types.FloatType):
        return ("integer" if isinstance(inner, types.IntType) else "number"), _range(inner)
    if isinstance(inner, types.LiteralType):
        return " or ".join(map(to_toml, inner.values)), ""
    if isinstance(inner, Lists):
        item, bounds = _words(inner.item_type)
        said = [f"{inner.min_length} or more" if inner.min_length else "", f"each {bounds}" if bounds else ""]
        return f"list of {item}s", ", ".join(filter(None, said))
    if structs_of(inner):
        return "table", ""
    if isinstance(inner, types.UnionType):
        words = [_words(each) for each in inner.types]
        return " or ".join([", ".join(filter(None, both)) for both in words]), ""
    if isinstance(inner, types.CustomType):
        return {ByteCount: "size", FilePath: "path"}.get(inner.cls, "string"), ""
    names = {types.BoolType: "boolean", types.StrType: "string"}
    return names.get(type(inner), type(inner).__name__.removesuffix("Type").lower()), ""


def _range(number: types.IntType | types.FloatType) -> str:
    low, high = "", ""
    if number.ge is not None:
        low = _digits(number.ge)
    elif number.gt is not None:
        low = f"over {_digits(number.gt)}"
    if number.le is not None:
        high = _digits(number.le)
    elif number.lt is not None:
        high = f"under {_digits(number.lt)}"
    if low and high:
        return f"{low} to {high}"
    if low:
        return low if number.ge is None else f"{low} or more"
    return high if number.le is None else f"{high} or less"


def _digits(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else repr(value)
