"""Lists every kind of every part of a policy from the types: a new kind appears by itself."""

import inspect
import re
from typing import Any

import msgspec
from msgspec import inspect as types

from edgeasync.config import convert, kinds_of, to_table
from edgeasync.errors import ConfigError, PluginError
from edgeasync.plugins import CODECS, POLICIES, find_policy, installed, load_class, name_of, package_of
from edgeasync.policies.guards import parts_of
from edgeasync.policies.policy import Policy

_HOLE = "\0"

MANY = ("optimizer", "monitor.detectors")
"""The parts that are lists."""

_Lists = types.ListType | types.VarTupleType

_SENTENCE_END = re.compile(r"(?<!\bal)(?<!\be\.g)(?<!\bi\.e)\.(?=\s|$)")


class PolicyKey(msgspec.Struct, frozen=True):
    """One key of a kind.

    `default` is the plain value, or `None` if the key is required or is left out by default.
    """

    name: str
    type: str
    bounds: str
    required: bool
    default: Any
    description: str


class Kind(msgspec.Struct, frozen=True):
    """One kind of a part of a policy. A part that is a single key, or a table without kinds, has the kind `""`.

    `part` is the part's path in `[policy]`. If `many` is true, the part is a list, and the list may have a kind
    more than once. `table` is the kind's TOML table with its defaults. `default` is the part's default value, if
    that value is of this kind. `example` is a line of `[policy]` that chooses the kind, with the part's
    default if that is of this kind, or else with the kind's own defaults. Of a plugin, `code` is the name of its
    class, and `package` the package that has installed it, if one has.
    """

    part: str
    many: bool
    kind: str
    default: str | None
    summary: str
    paper: str
    parameters: tuple[PolicyKey, ...]
    table: str
    example: str
    package: str = ""
    code: str = ""

    @property
    def chosen(self) -> list[str]:
        """The keys in `example` that have no default: their values there are examples."""
        names = [key.name for key in self.parameters if key.default is None]
        return [name for name in names if self.default is None and re.search(rf"\b{name} = ", self.example)]


def catalogue(policy: type[msgspec.Struct] = Policy) -> list[Kind]:
    """Return every kind: parts in their order, the kinds of each in the order of its union."""
    info = types.type_info(policy)
    assert isinstance(info, types.StructType)
    found: list[Kind] = []
    _walk(info, (), "", "", found)
    return found


def plugin_kinds() -> list[Kind]:
    """Return the kinds and codecs that installed packages add, those that cannot be used with the reason."""
    found = []
    for name, point in sorted(installed(POLICIES).items()):
        try:
            found += describe_plugin(name, package_of(point))
        except PluginError as error:
            found.append(_unusable(name, "?", package_of(point), point.value, str(error)))
    for name, point in sorted(installed(CODECS).items()):
        try:
            summary = _summary(load_class(point.value))
        except PluginError as error:
            summary = str(error)
        found.append(_unusable(name, "codec", package_of(point), point.value, summary))
    return found


def describe_plugin(kind: str, package: str = "") -> list[Kind]:
    """Return a plugin as each part that it can be; raises `PluginError` if it cannot be had."""
    plugin = find_policy(kind)
    if plugin is None:
        return []
    info = types.type_info(plugin)
    assert isinstance(info, types.StructType)
    parts = parts_of(plugin)
    if not parts:
        raise PluginError(f"plugin {kind}: has the methods of no part of a policy; see docs/train/plugins.md")
    table = to_toml(_table(info) | {"kind": kind})
    return [
        Kind(
            part=part,
            many=part in MANY,
            kind=kind,
            default=None,
            summary=_summary(plugin),
            paper=getattr(plugin, "paper", ""),
            parameters=tuple([_parameter(key) for key in info.fields]),
            table=table,
            example=_line(part, table),
            package=package,
            code=name_of(plugin),
        )
        for part in parts
    ]


def _line(part: str, table: str) -> str:
    first, _, inner = part.partition(".")
    value = f"[{table}]" if part in MANY else table
    return f"{first} = {{ {inner} = {value} }}" if inner else f"{first} = {value}"


def _unusable(kind: str, part: str, package: str, code: str, summary: str) -> Kind:
    """Describe what has no keys: a codec, or a plugin that cannot be used."""
    example = f'push = "{kind}"' if part == "codec" else ""
    return Kind(part, False, kind, None, summary, "", (), f'"{kind}"', example, package, code)


def to_toml(value: Any) -> str:
    """Write a plain value as TOML has it on one line; a key without a value is left out."""
    if isinstance(value, dict):
        return _braces([f"{key} = {to_toml(item)}" for key, item in value.items() if item is not None])
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # infinity too, which JSON does not have
    return msgspec.json.encode(value).decode()


def _braces(items: list[str]) -> str:
    return "{ " + ", ".join(items) + " }" if items else "{}"


def _walk(struct: types.StructType, above: tuple[type, ...], path: str, around: str, found: list[Kind]) -> None:
    """Add the kinds below a struct to `found`.

    `path` is the struct's place in `[policy]`, and `around` a line of TOML with a hole for the struct, from which
    the examples are made. `above` has the structs around it, since one that contains itself is entered only once.
    """
    for field in struct.fields:
        many = isinstance(_bare(field.type), _Lists)
        hole = f"{field.name} = [{_HOLE}]" if many else f"{field.name} = {_HOLE}"
        if around:
            beside = {name: value for name, value in _table(struct, defaults=False).items() if name != field.name}
            given = [f"{name} = {to_toml(value)}" for name, value in beside.items()]
            hole = around.replace(_HOLE, _braces([*given, hole]))
        part = f"{path}.{field.name}".removeprefix(".")
        default = _default(field)
        if not above and not _structs(field.type):
            found.append(_key(field))
        for inner in _structs(field.type):
            chosen = [value for value in (default if many else [default]) if type(value) is inner.cls]
            table = to_toml(_table(inner))
            standard = to_toml(to_table(chosen[0])) if chosen else None
            found.append(
                Kind(
                    part=part,
                    many=many,
                    kind="" if inner.tag is None else str(inner.tag),
                    default=standard,
                    summary=_summary(inner.cls),
                    paper=getattr(inner.cls, "paper", ""),
                    parameters=tuple([_parameter(key) for key in inner.fields]),
                    table=table,
                    example=hole.replace(_HOLE, standard or table),
                )
            )
            if inner.cls not in above:
                _walk(inner, (*above, inner.cls), part, hole, found)


def _key(field: types.Field) -> Kind:
    """Describe a part that is a single value."""
    parameter = _parameter(field)
    value = to_toml(_sample(field.type) if parameter.default is None else parameter.default)
    return Kind(
        part=field.name,
        many=False,
        kind="",
        default=None if parameter.default is None else value,
        summary=parameter.description,
        paper="",
        parameters=(parameter,),
        table=value,
        example=f"{field.name} = {value}",
    )


def _summary(struct: type) -> str:
    """Return the first sentence of a docstring."""
    paragraph = inspect.cleandoc(struct.__doc__ or "").split("\n\n")[0]
    return _SENTENCE_END.split(" ".join(paragraph.split()), maxsplit=1)[0]


def _parameter(field: types.Field) -> PolicyKey:
    description = ""
    if isinstance(field.type, types.Metadata):
        description = (field.type.extra_json_schema or {}).get("description", "")
    kinds = [str(struct.tag) for struct in _structs(field.type) if struct.tag is not None]
    if kinds and not description:
        description = f"one of {', '.join(kinds)}"
    word, bounds = _words(field.type)
    return PolicyKey(
        name=field.name,
        type=word,
        bounds=bounds,
        required=field.required,
        default=None if field.required else to_table(_default(field)),
        description=description,
    )


def _bare(kind: types.Type) -> types.Type:
    """Return a type without its description, and without the `None` of a key that may be left out."""
    while isinstance(kind := kinds_of(kind), types.Metadata):
        kind = kind.type
    if isinstance(kind, types.UnionType):
        others = [inner for inner in kind.types if not isinstance(inner, types.NoneType)]
        return _bare(others[0]) if len(others) == 1 else types.UnionType(tuple(others))
    return kind


def _structs(kind: types.Type) -> list[types.StructType]:
    """Return the tables that a type may hold: it may be a table, a union of kinds, or a list of those."""
    bare = _bare(kind)
    if isinstance(bare, types.StructType):
        return [bare]
    if isinstance(bare, types.UnionType):
        return [struct for inner in bare.types for struct in _structs(inner)]
    return _structs(bare.item_type) if isinstance(bare, _Lists) else []


def _default(field: types.Field) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def _words(kind: types.Type) -> tuple[str, str]:
    """Return type and bounds in words, as the settings are documented."""
    bare = _bare(kind)
    if isinstance(bare, types.IntType | types.FloatType):
        return ("integer" if isinstance(bare, types.IntType) else "number"), _range(bare)
    if isinstance(bare, types.LiteralType):
        return " or ".join(map(to_toml, bare.values)), ""
    if isinstance(bare, _Lists):
        item, bounds = _words(bare.item_type)
        said = [f"{bare.min_length} or more" if bare.min_length else "", f"each {bounds}" if bounds else ""]
        return f"list of {item}s", ", ".join(filter(None, said))
    if _structs(bare):
        return "table", ""
    names = {types.BoolType: "boolean", types.StrType: "string", types.CustomType: "size"}
    return names.get(type(bare), type(bare).__name__.removesuffix("Type").lower()), ""


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


def _table(struct: types.StructType, *, defaults: bool = True) -> dict[str, Any]:
    """Return a table that chooses a struct: its kind, its required keys, and its defaults if asked for.

    Some structs need one of several optional keys: then the table has the first one that makes it valid.
    """
    table: dict[str, Any] = {} if struct.tag is None else {str(struct.tag_field): struct.tag}
    spare = {}
    for field in struct.fields:
        if field.required:
            table[field.name] = _sample(field.type)
            continue
        if (default := to_table(_default(field))) is None:
            spare[field.name] = _sample(field.type)
        if defaults:
            table[field.name] = default
    tables = [table, *[{**table, name: value} for name, value in spare.items()]]
    return next((some for some in tables if _is_read(some, struct.cls)), table)


def _is_read(table: dict[str, Any], struct: type) -> bool:
    try:
        convert(table, struct, where="")
    except ConfigError:
        return False
    return True


def _sample(kind: types.Type) -> Any:
    """Return some value that a key might have: the first of its examples, if it has some."""
    examples = (kind.extra_json_schema or {}).get("examples") if isinstance(kind, types.Metadata) else None
    if examples:
        return examples[0]
    bare = _bare(kind)
    if isinstance(bare, types.IntType | types.FloatType):
        number = int if isinstance(bare, types.IntType) else float
        low, high = bare.ge if bare.gt is None else bare.gt, bare.le if bare.lt is None else bare.lt
        middle = 2 if low is None else low + 1
        if high is not None:
            middle = high - 1 if low is None else (low + high) / 2
        return next((number(value) for value in (2, 1, 0) if _allowed(bare, value)), number(middle))
    if isinstance(bare, types.LiteralType):
        return bare.values[0]
    if isinstance(bare, _Lists):
        return [_sample(bare.item_type)]
    if tables := _structs(bare):
        return _table(tables[0], defaults=False)
    return {types.BoolType: True, types.CustomType: "1 MiB"}.get(type(bare), "text")


def _allowed(number: types.IntType | types.FloatType, value: float) -> bool:
    return (
        (number.ge is None or value >= number.ge)
        and (number.gt is None or value > number.gt)
        and (number.le is None or value <= number.le)
        and (number.lt is None or value < number.lt)
    )
