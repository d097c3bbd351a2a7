"""`edgeasync settings`: the effective settings of a file; and the schemas of settings files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types
from msgspec.structs import replace

from edgeasync.cli.options import one_of
from edgeasync.cli.output import Printer
from edgeasync.cli.outputs import EffectiveSetting
from edgeasync.config import ByteCount, convert, installed_kinds, read_toml
from edgeasync.errors import ConfigError
from edgeasync.host.readings import Readings
from edgeasync.runtime.agent_settings import AgentSettings
from edgeasync.runtime.hub_settings import HubSettings
from edgeasync.runtime.peer_settings import PeerSettings
from edgeasync.runtime.profiles import with_profile
from edgeasync.setting_keys import bare, default_of, meanings_of, plain, structs_of, to_toml

FILES: dict[str, type[msgspec.Struct]] = {
    "hub.toml": HubSettings,
    "agent.toml": AgentSettings,
    "peer.toml": PeerSettings,
}
"""The settings class of each settings file, by its name in the documentation."""


def print_settings(path: Path, kind: str | None, printer: Printer, *, changed: bool) -> None:
    """Print every effective setting of a file. Raises `ConfigError` if the file is invalid."""
    written = read_toml(path, dict[str, Any])
    settings = convert(written, FILES[_kind_of(path, written, kind)], where=str(path))
    resolved, derived = _resolve(settings)
    found = [one for one in _walk(resolved, settings, written, "", derived) if one.changed or not changed]
    if printer.json:
        printer.object(found)
        return
    table = None
    for one in found:
        if one.table != table:
            if table is not None:
                printer.line("")
            printer.line(f"[{one.table}]")
            table = one.table
        default = f"; default {to_toml(one.default)}" if one.changed and one.default is not None else ""
        line = f"{one.key} = {to_toml(one.value)}"
        printer.line(
            f"{line:<44}  # {one.source}{default}" if one.value is not None else f"# {one.key}: {one.source}"
        )


def _resolve(settings: Any) -> tuple[msgspec.Struct, str]:
    """Return the effective settings, and the source of values that are not in the file."""
    if isinstance(settings, HubSettings):
        hub = replace(settings.hub, quiet=settings.quiet)
        return replace(settings, hub=hub, policy=settings.fleet_policy), "from [hub]"
    table = "agent" if isinstance(settings, AgentSettings) else "peer"
    section, profile = with_profile(getattr(settings, table), Readings())
    return replace(settings, **{table: section}), "" if profile is None else f"profile {profile.name}"


def _walk(
    settings: msgspec.Struct, read: msgspec.Struct, written: Mapping[str, Any], path: str, derived: str
) -> Iterator[EffectiveSetting]:
    """Yield the settings of a table and its subtables.

    `derived` is the source to report for values that differ from those that were read.
    """
    tables = []
    if (tag := settings.__struct_config__.tag) is not None:
        yield _effective(path, str(settings.__struct_config__.tag_field), tag, None, "file")
    for field in msgspec.structs.fields(settings):
        value, before = getattr(settings, field.name), getattr(read, field.name)
        said = written.get(field.encode_name)
        if isinstance(value, msgspec.Struct) and (value.__struct_config__.tag is None or not path):
            inner = said if isinstance(said, Mapping) else {}
            tables.append((value, before, inner, f"{path}.{field.encode_name}".removeprefix("."), derived))
            continue
        if value is None and not path:  # an omitted table
            continue
        source = "default" if value == before else derived
        default = None if field.required else field.default
        place = source if said is None else "file"
        yield _effective(path, field.encode_name, plain(value), plain(default), place)
    for table in tables:
        yield from _walk(*table)


def _effective(table: str, key: str, value: Any, default: Any, source: str) -> EffectiveSetting:
    changed = bool(value != default)
    return EffectiveSetting(table=table, key=key, value=value, default=default, source=source, changed=changed)


def schema_of(settings: type[msgspec.Struct], title: str) -> dict[str, Any]:
    """Return the JSON schema of a settings file, including descriptions of the settings."""
    tables: dict[str, dict[str, Any]] = {}
    whole = _schema(types.type_info(settings), tables)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **whole, "$defs": tables}


def _schema(kind: types.Type, tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a type, and add the schemas of its tables to `tables`."""
    if isinstance(kind, types.CustomType) and (own := structs_of(kind)):
        named = {"anyOf": [{"pattern": ":"}, {"enum": installed_kinds(kind.cls)}]}
        plugin = {"type": "object", "properties": {"kind": {"type": "string", **named}}, "required": ["kind"]}
        return {"anyOf": [*[_schema(one, tables) for one in own], plugin]}
    match bare(kind):
        case types.BoolType():
            return {"type": "boolean"}
        case types.IntType() | types.FloatType() as number:
            limits = {"minimum": number.ge, "exclusiveMinimum": number.gt, "maximum": number.le}
            limits["exclusiveMaximum"] = number.lt
            known = {name: limit for name, limit in limits.items() if limit is not None}
            return {"type": "integer" if isinstance(number, types.IntType) else "number"} | known
        case types.LiteralType(values=values):
            return {"enum": list(values)}
        case types.ListType() | types.VarTupleType() as many:
            lengths = {"minItems": many.min_length, "maxItems": many.max_length}
            known = {name: length for name, length in lengths.items() if length is not None}
            return {"type": "array", "items": _schema(many.item_type, tables)} | known
        case types.UnionType(types=several):
            return {"anyOf": [_schema(one, tables) for one in several]}
        case types.CustomType(cls=cls) if cls is ByteCount:
            words = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([kMG]?B|[KMG]iB)\s*$"}
            return {"anyOf": [{"type": "integer", "minimum": 0}, words]}
        case types.StructType() as table:
            _add_table(table, tables)
            return {"$ref": f"#/$defs/{table.cls.__name__}"}
    return {"type": "string"}


def _add_table(table: types.StructType, tables: dict[str, dict[str, Any]]) -> None:
    name = table.cls.__name__
    if name in tables:
        return
    properties: dict[str, Any] = {}
    tables[name] = {"type": "object", "properties": properties, "additionalProperties": False}
    if table.tag is not None:
        properties[str(table.tag_field)] = {"const": table.tag}
    meanings = meanings_of(table.cls)
    for field in table.fields:
        found = _schema(field.type, tables) | {"description": meanings.get(field.name, "")}
        default = plain(default_of(field))
        properties[field.encode_name] = found if default is None else found | {"default": default}
    required = [str(table.tag_field)] if table.tag is not None else []
    tables[name]["required"] = required + [field.encode_name for field in table.fields if field.required]


def _kind_of(path: Path, written: Mapping[str, Any], kind: str | None) -> str:
    """Return the key in `FILES` that this settings file belongs to.

    Raises `ConfigError` if several keys are possible.
    """
    programs = [name.removesuffix(".toml") for name in FILES]
    if kind is not None:
        return f"{one_of('--for', kind, programs)}.toml"
    if len(named := [name for name in programs if name in written]) == 1:
        return f"{named[0]}.toml"
    fits = [name for name, struct in FILES.items() if set(written) <= set(struct.__struct_fields__)]
    if len(fits) == 1:
        return fits[0]
    raise ConfigError(f"{path}: unclear which program reads this file; add --for {' or --for '.join(programs)}")
