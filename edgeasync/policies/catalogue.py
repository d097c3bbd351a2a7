"""List the kinds of all parts of a policy from their types."""

import re
from typing import Any

import msgspec
from msgspec import inspect as types

from edgeasync.config import convert, to_table
from edgeasync.errors import ConfigError, PluginError
from edgeasync.plugins import CODECS, POLICIES, find_policy, installed, load_class, name_of, package_of
from edgeasync.policies.guards import parts_of
from edgeasync.policies.policy import Policy
from edgeasync.setting_keys import (
    Lists,
    SettingKey,
    bare,
    braces,
    default_of,
    describe,
    first_sentence,
    keys_of,
    meanings_of,
    structs_of,
    to_toml,
)

_HOLE = "\0"

MANY = ("optimizer", "monitor.detectors")
"""Parts of a policy that are lists."""


class Kind(msgspec.Struct, frozen=True):
    """One kind of a part of a policy.

    If the part is a single key, or a table without kinds, the kind is `""`.

    `part` is the part's path in `[policy]`. If `many` is true, the part is a list that may contain
    a kind more than once. `table` is the kind's TOML table with its default values. `default` is
    the part's default value if that value is of this kind. `example` is a line of `[policy]` that
    selects this kind; it contains the part's default value if that is of this kind, otherwise the
    kind's default values. For a plugin, `code` is the name of its class, and `package` is the
    package that installed it, if any.
    """

    part: str
    many: bool
    kind: str
    default: str | None
    summary: str
    paper: str
    parameters: tuple[SettingKey, ...]
    table: str
    example: str
    package: str = ""
    code: str = ""

    @property
    def chosen(self) -> list[str]:
        """The keys in `example` that have no default value. Their values are only examples."""
        names = [key.name for key in self.parameters if key.default is None]
        return [name for name in names if self.default is None and re.search(rf"\b{name} = ", self.example)]


def catalogue(policy: type[msgspec.Struct] = Policy) -> list[Kind]:
    """Return all kinds, ordered by part and then by their order in the part's union type."""
    info = types.type_info(policy)
    assert isinstance(info, types.StructType)
    found: list[Kind] = []
    _walk(info, (), "", "", found)
    return found


def plugin_kinds() -> list[Kind]:
    """Return the kinds and codecs of installed packages, with the reason if one is unusable."""
    found = []
    for name, point in sorted(installed(POLICIES).items()):
        try:
            found += describe_plugin(name, package_of(point))
        except PluginError as error:
            found.append(_unusable(name, "?", package_of(point), point.value, str(error)))
    for name, point in sorted(installed(CODECS).items()):
        try:
            summary = first_sentence(load_class(point.value).__doc__ or "")
        except PluginError as error:
            summary = str(error)
        found.append(_unusable(name, "codec", package_of(point), point.value, summary))
    return found


def describe_plugin(kind: str, package: str = "") -> list[Kind]:
    """Return one `Kind` for each part that a plugin can be used as.

    Raises `PluginError` if the plugin cannot be loaded.
    """
    plugin = find_policy(kind)
    if plugin is None:
        return []
    info = types.type_info(plugin)
    assert isinstance(info, types.StructType)
    parts = parts_of(plugin)
    if not parts:
        raise PluginError(
            f"plugin {kind}: implements no part of a policy; see docs/train/plugins.md for the required methods"
        )
    table = to_toml(_table(info) | {"kind": kind})
    return [
        Kind(
            part=part,
            many=part in MANY,
            kind=kind,
            default=None,
            summary=first_sentence(plugin.__doc__ or ""),
            paper=getattr(plugin, "paper", ""),
            parameters=tuple(keys_of(plugin)),
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
    """Describe a codec or an unusable plugin, without any settings keys."""
    example = f'push = "{kind}"' if part == "codec" else ""
    return Kind(part, False, kind, None, summary, "", (), f'"{kind}"', example, package, code)


def _walk(struct: types.StructType, above: tuple[type, ...], path: str, around: str, found: list[Kind]) -> None:
    """Add the kinds of all parts nested in a struct to `found`.

    `path` is the struct's path in `[policy]`. `around` is a line of TOML with a placeholder for the
    struct; the examples are built from it. `above` contains the enclosing structs, so that a
    recursive struct is visited only once.
    """
    for field in struct.fields:
        many = isinstance(bare(field.type), Lists)
        hole = f"{field.name} = [{_HOLE}]" if many else f"{field.name} = {_HOLE}"
        if around:
            beside = {name: value for name, value in _table(struct, defaults=False).items() if name != field.name}
            given = [f"{name} = {to_toml(value)}" for name, value in beside.items()]
            hole = around.replace(_HOLE, braces([*given, hole]))
        part = f"{path}.{field.name}".removeprefix(".")
        default = default_of(field)
        if not above and not structs_of(field.type):
            found.append(_key(field, meanings_of(struct.cls).get(field.name, "")))
        for inner in structs_of(field.type):
            chosen = [value for value in (default if many else [default]) if type(value) is inner.cls]
            table = to_toml(_table(inner))
            standard = to_toml(to_table(chosen[0])) if chosen else None
            found.append(
                Kind(
                    part=part,
                    many=many,
                    kind="" if inner.tag is None else str(inner.tag),
                    default=standard,
                    summary=first_sentence(inner.cls.__doc__ or ""),
                    paper=getattr(inner.cls, "paper", ""),
                    parameters=tuple(keys_of(inner.cls)),
                    table=table,
                    example=hole.replace(_HOLE, standard or table),
                )
            )
            if inner.cls not in above:
                _walk(inner, (*above, inner.cls), part, hole, found)


def _key(field: types.Field, meaning: str) -> Kind:
    """Describe a part that is a single value."""
    parameter = describe(field, meaning)
    value = to_toml(_sample(field.type) if parameter.default is None else parameter.default)
    return Kind(
        part=field.name,
        many=False,
        kind="",
        default=None if parameter.default is None else value,
        summary=parameter.summary,
        paper="",
        parameters=(parameter,),
        table=value,
        example=f"{field.name} = {value}",
    )


def _table(struct: types.StructType, *, defaults: bool = True) -> dict[str, Any]:
    """Return a table that selects a struct: its kind, its required keys and its defaults.

    If `defaults` is false, default values are omitted. If a struct requires one of several optional
    keys, the table contains the first such key that makes it valid.
    """
    table: dict[str, Any] = {} if struct.tag is None else {str(struct.tag_field): struct.tag}
    spare = {}
    for field in struct.fields:
        if field.required:
            table[field.name] = _sample(field.type)
            continue
        if (default := to_table(default_of(field))) is None:
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
    """Return a valid value of a key: the first of its examples, if it has any."""
    examples = (kind.extra_json_schema or {}).get("examples") if isinstance(kind, types.Metadata) else None
    if examples:
        return examples[0]
    inner = bare(kind)
    if isinstance(inner, types.IntType | types.FloatType):
        number = int if isinstance(inner, types.IntType) else float
        low, high = inner.ge if inner.gt is None else inner.gt, inner.le if inner.lt is None else inner.lt
        middle = 2 if low is None else low + 1
        if high is not None:
            middle = high - 1 if low is None else (low + high) / 2
        return next((number(value) for value in (2, 1, 0) if _allowed(inner, value)), number(middle))
    if isinstance(inner, types.LiteralType):
        return inner.values[0]
    if isinstance(inner, Lists):
        return [_sample(inner.item_type)]
    if tables := structs_of(inner):
        return _table(tables[0], defaults=False)
    return {types.BoolType: True, types.CustomType: "1 MiB"}.get(type(inner), "text")


def _allowed(number: types.IntType | types.FloatType, value: float) -> bool:
    return (
        (number.ge is None or value >= number.ge)
        and (number.gt is None or value > number.gt)
        and (number.le is None or value <= number.le)
        and (number.lt is None or value < number.lt)
    )
