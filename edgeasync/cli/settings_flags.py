"""Command-line flags for settings: one flag for each key in some tables of a command's settings file.

The flags are built when the command runs, from the structs that declare its settings. So an agent
does not import modules of a hub.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from msgspec import inspect as types
from msgspec.structs import replace
from typer.core import TyperCommand

from edgeasync.config import SIZE_DIGITS_MAX, ByteCount, FilePath, Section, convert, to_table
from edgeasync.errors import ConfigError
from edgeasync.setting_keys import Lists, SettingKey, bare, describe, meanings_of, structs_of, to_toml

Table = TypeVar("Table", bound=Section)

Flags = dict[str, dict[str, Any]]
"""Values from flags by table path and key, such as `{"agent": {"threads": 2}}`."""

TITLES = (
    *("Arguments", "Model", "Connection", "Identity", "Run", "Page and metrics"),
    *("Averaging", "Training", "Limits", "Heat and power", "Options"),
)
"""The groups of options, in the order of the help."""


class FlagTable(NamedTuple):
    """A settings table whose keys become flags.

    If `keys` is set, only these keys become flags; otherwise, all keys except subtables. The help
    lists a flag under the group of its field (`Section.GROUPS`), or else under `group`. `names`
    contains the flags whose names differ from their keys. `alone` contains the values of flags that
    may be used without a value.
    """

    path: str
    struct: type[Section]
    group: str
    keys: tuple[str, ...] | None = None
    names: Mapping[str, str] = {}
    alone: Mapping[str, str] = {}


class _Flag(NamedTuple):
    table: FlagTable
    key: SettingKey
    """The key without its description, which is read only for `--help`."""
    kind: types.Type
    name: str
    group: str

    @property
    def parameter(self) -> str:
        """The name of the command's parameter, which differs between tables with the same key."""
        return self.name.removeprefix("--").replace("-", "_")


class GroupedCommand(TyperCommand):
    """A command whose help groups its options by purpose."""

    flags: Sequence[_Flag] = ()

    def explain(self) -> None:
        """Set the help of the flags. Slow, because descriptions are read from source code."""
        parameters: dict[str, Any] = {parameter.name or "": parameter for parameter in self.params}
        for flag in self.flags:
            parameters[flag.parameter].help = _help(flag)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. A flag in `FlagTable.alone` without a value gets its default value."""
        alone = {
            flag.name: flag.table.alone[flag.key.name] for flag in self.flags if flag.key.name in flag.table.alone
        }
        said: list[str] = []
        for argument, following in pairwise([*args, ""]):
            said.append(argument)
            if argument in alone and not _is_address(following):
                said.append(alone[argument])
        return super().parse_args(ctx, said)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and each group of options under its title."""
        self.explain()
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for title, records in sorted(groups.items(), key=lambda group: TITLES.index(group[0])):
            with formatter.section(title):
                formatter.write_dl(records)


def with_flags(name: str | None, function: Callable[..., None], tables: Sequence[FlagTable]) -> GroupedCommand:
    """Return a command with a flag for each key of the tables.

    The function finds the values of the flags in `context.obj`.
    """
    flags = [flag for table in tables for flag in _flags_of(table)]

    def run(context: typer.Context, **given: Any) -> None:
        said: Flags = {table.path: {} for table in tables}
        for flag in flags:
            value = given.pop(flag.parameter)
            if value is not None and value != []:
                said[flag.table.path][flag.key.name] = _read(value, flag.kind)
        context.obj = said
        function(context, **given)

    own = inspect.signature(function).parameters.values()
    made = [_parameter(flag) for flag in flags]
    run.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*own, *made)}
    run.__doc__ = function.__doc__
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=GroupedCommand)(run)
    command = typer.main.get_command(app)
    assert isinstance(command, GroupedCommand)
    command.flags = flags
    return command


def apply_flags(section: Table, said: Mapping[str, Any], names: Mapping[str, str] = {}) -> Table:
    """Return a settings table with flags applied. Raises `ConfigError`, which names the flag.

    `names` contains the flags whose names differ from their keys.
    """
    if not said:
        return section
    replaced = {other for key, other in section.INSTEAD.items() if key in said and other not in said}
    table = {key: value for key, value in to_table(section).items() if key not in replaced}
    try:
        return convert(table | dict(said), type(section), where="flags")
    except ConfigError as error:
        raise named_by_flag(error, said, names) from error


def model_of(table: object, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `[model]` table of a file with flags applied.

    `--model` replaces a model of another kind.
    Raises `ConfigError` if no model file is set.
    """
    known = table if isinstance(table, dict) and table.get("kind") == "onnx" else {}
    if "file" not in known | dict(said):
        raise ConfigError("--loss, --train and similar flags need an ONNX model; add --model FILE.onnx")
    return {"kind": "onnx"} | known | dict(said)


def named_by_flag(error: ConfigError, said: Mapping[str, Any], names: Mapping[str, str] = {}) -> ConfigError:
    """Return an error whose message names flags instead of the keys that these flags set."""

    def name(key: str) -> str:
        return names.get(key) or flag_of(key)

    key, stop, what = str(error).removeprefix("flags: ").partition(": ")
    first = key.partition("[")[0].rpartition(".")[2]
    if stop and first in said:
        return type(error)(f"{name(first)}: {what}")

    def as_flags(found: re.Match[str]) -> str:
        return re.sub(r"\w+", lambda word: name(word[0]) if word[0] in said else word[0], found[0])

    # An error about a whole table starts with keys, all of which are replaced. In the rest of the
    # message, a word without an underscore may be ordinary text, so only words with underscores are
    # replaced.
    told = re.sub(r"(?<=^flags: )\w+(?: and \w+)*|\b\w+_\w+", as_flags, str(error))
    return error if told == str(error) else type(error)(told.removeprefix("flags: "))


def flag_of(key: str) -> str:
    """Return the flag of a key.

    >>> flag_of("step_s_min")
    '--step-s-min'
    """
    return "--" + key.replace("_", "-")


def _is_address(argument: str) -> bool:
    """Return whether an argument after a flag in `FlagTable.alone` is its value, possibly a wrong one.

    Otherwise, it is the next flag or the settings file.
    """
    if not argument or argument.startswith("-"):
        return False
    return bool(re.search(r":(\d+|\*)$", argument)) or not (argument.endswith(".toml") or Path(argument).exists())


def _flags_of(table: FlagTable) -> list[_Flag]:
    info = types.type_info(table.struct)
    assert isinstance(info, types.StructType)
    begins = table.struct.GROUPS
    found, group = [], table.group
    for field in info.fields:
        group = begins.get(field.encode_name, group)
        if table.keys is not None and field.encode_name not in table.keys:
            continue
        if isinstance(bare(field.type), types.StructType) or (
            isinstance(bare(field.type), Lists) and structs_of(field.type)
        ):
            continue  # tables can only be set in the settings file
        name = table.names.get(field.encode_name) or flag_of(field.encode_name)
        found.append(_Flag(table, describe(field, ""), bare(field.type), name, group))
    return found


def _parameter(flag: _Flag) -> inspect.Parameter:
    kind: Any = str
    if isinstance(flag.kind, types.BoolType):
        kind = bool
    elif isinstance(flag.kind, types.IntType):
        kind = int
    elif isinstance(flag.kind, types.FloatType):
        kind = float
    elif _takes_many(flag.kind):
        kind = list[str]
    option = typer.Option(
        f"{flag.name}/--no-{flag.name.removeprefix('--')}" if kind is bool else flag.name,
        metavar=None if kind is bool else _metavar(flag),
        rich_help_panel=flag.group,
        show_default=False,
    )
    return inspect.Parameter(
        flag.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _help(flag: _Flag) -> str:
    meaning = meanings_of(flag.table.struct).get(flag.key.name, "")
    words = replace(flag.key, description=meaning).summary + "."
    if _takes_many(flag.kind):
        words += " May be repeated."
    if flag.key.default in (None, False, [], ()) or flag.key.required:
        return words
    default = flag.key.default
    return f"{words} [default: {default if isinstance(default, str) else to_toml(default)}]"


def _metavar(flag: _Flag) -> str:
    if isinstance(flag.kind, types.LiteralType):
        return "|".join(map(str, flag.kind.values))
    if isinstance(flag.kind, types.CustomType):
        return {ByteCount: "SIZE", FilePath: "PATH"}.get(flag.kind.cls, "TEXT")
    if "s" in flag.key.name.split("_"):  # the unit, as in `step_s_min`
        return "SECONDS"
    if isinstance(flag.kind, types.IntType | types.FloatType):
        return "NUMBER"
    if flag.key.name in flag.table.alone:
        return "[HOST:PORT]"
    if flag.name == PAGE_FLAGS["hosts"]:
        return "NAME"
    return "PATTERN" if _takes_many(flag.kind) and not isinstance(flag.kind, types.UnionType) else "TEXT"


def _takes_many(kind: types.Type) -> bool:
    if isinstance(kind, types.UnionType):
        return any(map(_takes_many, kind.types))
    return isinstance(kind, Lists)


def _read(value: Any, kind: types.Type) -> Any:
    """Convert a flag's text to a settings value. Digits become an int if the key also accepts integers."""
    takes_number = isinstance(kind, types.UnionType) or (
        isinstance(kind, types.CustomType) and kind.cls is ByteCount
    )
    if takes_number and isinstance(value, str) and value.isdecimal() and len(value) <= SIZE_DIGITS_MAX:
        return int(value)
    return value


MODEL_FLAGS = ("file", "loss", "train", "freeze", "output", "target", "recompute", "lora", "base")
"""Keys of a `[model]` table of the kind `onnx` that become flags."""

PAGE_FLAGS = {"bind": "--page"} | {key: f"--page-{key}" for key in ("certificate", "key", "hosts", "insecure")}
METRICS_FLAGS = {"bind": "--metrics", "devices": "--metrics-devices"}
"""Maps the keys of `[page]` and `[metrics]` to their flags."""

DOCTOR_FLAGS = ("data", "device_id", "state", "provider", "hub", "insecure", "enrol", "hub_key")
"""Keys of `[agent]` that become flags of `edgeasync doctor`."""


def _model_table(keys: tuple[str, ...] = MODEL_FLAGS) -> FlagTable:
    from edgeasync.graphs.onnx_model import OnnxModel  # noqa: PLC0415

    return FlagTable("model", OnnxModel, "Model", keys, {"file": "--model"})


def _hub_tables() -> list[FlagTable]:
    from edgeasync.core.hub.settings import CheckpointSettings  # noqa: PLC0415
    from edgeasync.runtime.hub_settings import HubSection  # noqa: PLC0415 - a device imports nothing of a hub
    from edgeasync.runtime.page_settings import (  # noqa: PLC0415
        METRICS_BIND,
        PAGE_BIND,
        MetricsSection,
        PageSection,
    )

    recovery = FlagTable("checkpoint", CheckpointSettings, "Run", ("recovery",))
    page = FlagTable("page", PageSection, "Page and metrics", names=PAGE_FLAGS, alone={"bind": PAGE_BIND})
    metrics = FlagTable("metrics", MetricsSection, page.group, names=METRICS_FLAGS, alone={"bind": METRICS_BIND})
    return [_model_table(), FlagTable("hub", HubSection, "Run"), recovery, page, metrics]


def _agent_tables() -> list[FlagTable]:
    from edgeasync.core.device.limits import DeviceLimits  # noqa: PLC0415
    from edgeasync.core.device.throttle import ThrottleSection  # noqa: PLC0415

    limits = FlagTable("limits", DeviceLimits, "Limits")
    return [_agent_table(), limits, FlagTable("throttle", ThrottleSection, "Heat and power")]


def _agent_table(keys: tuple[str, ...] | None = None) -> FlagTable:
    from edgeasync.runtime.agent_settings import AgentSection  # noqa: PLC0415

    return FlagTable("agent", AgentSection, "Training", keys)


def _peer_tables() -> list[FlagTable]:
    from edgeasync.runtime.peer_settings import PeerSection  # noqa: PLC0415

    return [_model_table(), FlagTable("peer", PeerSection, "Training")]


FLAGS: dict[str, Callable[[], list[FlagTable]]] = {
    "hub": _hub_tables,
    "agent": _agent_tables,
    "peer": _peer_tables,
    "doctor": lambda: [_agent_table(DOCTOR_FLAGS)],
    **dict.fromkeys(("model build", "model inspect", "model check"), lambda: [_model_table(MODEL_FLAGS[1:])]),
}
"""Maps each command to the tables whose keys become its flags."""
