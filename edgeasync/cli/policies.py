"""`edgeasync policies`."""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from edgeasync.cli.output import Printer
from edgeasync.config import suggest
from edgeasync.errors import ConfigError
from edgeasync.plugins import is_name
from edgeasync.policies.catalogue import Kind, catalogue, describe_plugin, plugin_kinds
from edgeasync.setting_keys import SettingKey, to_toml


def print_policies(name: str | None, printer: Printer) -> None:
    """Print a table of all policies or, if `name` is set, the details of that policy or group.

    Raises `ConfigError` if the name is unknown.
    """
    kinds = [*catalogue(), *plugin_kinds()]
    parts = list(dict.fromkeys(kind.part for kind in kinds))
    kinds.sort(key=lambda kind: parts.index(kind.part))
    if name is not None:
        kinds = describe_plugin(name) if is_name(name) else choose(kinds, name)
    if printer.json:
        printer.object(kinds)
        return
    console = Console(highlight=False, markup=False, emoji=False)
    if name is None:
        width = max(len(kind.kind) for kind in kinds)
        shown: list[Kind] = []
        for _, group in groupby(kinds, key=lambda kind: kind.part):
            part = list(group)
            console.print(part_table(part, width, shown), "", sep="\n")
            shown += part
        console.print("* default. Details of one policy: edgeasync policies KIND")
        return
    for index, kind in enumerate(kinds):
        same = [other for other in kinds if _same(kind, other)]
        if same[0] is kind:
            if index:
                printer.line("")
            console.print(full(kind, same[1:]))
            choice = [f"# no default; choose: {', '.join(kind.chosen)}"] if kind.chosen else []
            for line in ("", *choice, *kind.example.splitlines()):
                printer.line(line)  # not wrapped, so that it can be copied


def choose(kinds: list[Kind], name: str) -> list[Kind]:
    """Return the policies that `name` selects: those with this name, or those in the group of this name.

    Raises `ConfigError`, which suggests similar names.
    """
    if found := [kind for kind in kinds if name in _names(kind)]:
        return found
    advice = suggest(name, [known for kind in kinds for known in _names(kind)])
    advice = advice or "list them with `edgeasync policies`"
    raise ConfigError(f"unknown policy {name!r}; {advice}")


def part_table(part: list[Kind], width: int, shown: Sequence[Kind] = ()) -> Group:
    """Return a table of one group's policies: purpose, keys with defaults, and paper.

    Policies in `shown` were printed in another group already, so only their names are printed.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    if any(kind.kind for kind in part):
        table.add_column("kind", no_wrap=True, min_width=width + 2)
    else:
        table.add_column("indent", width=1)
    table.add_column("what it does")
    for kind in part:
        lines = [Text(kind.summary)]
        if any(_same(kind, other) for other in shown):
            own = f", with {kind.default}" if kind.default not in (None, kind.table) else ""
            lines = [Text(f"as above{own}")]
        else:
            if kind.parameters:
                lines.append(Text(", ".join([_brief(key) for key in kind.parameters]), style="cyan"))
            if kind.paper:
                lines.append(Text(kind.paper, style="dim"))
            if kind.package:
                lines.append(Text(f"plugin {kind.code} of {kind.package}", style="dim"))
        table.add_row(f"{'*' if kind.default and kind.kind else ' '} {kind.kind}".rstrip(), Group(*lines))
    note = " (a list)" if part[0].many else "" if any(kind.default for kind in part) else " (none by default)"
    return Group(Text(part[0].part + note, style="bold"), table)


def full(kind: Kind, same: Sequence[Kind] = ()) -> Group:
    """Return all details of a policy except its example.

    `same` contains the policy's entries in other groups.
    """
    title = f"{kind.part}, kind {kind.kind}" if kind.kind else kind.part
    parts: list[RenderableType] = [
        Text(title + (" (the default)" if kind.default and kind.kind else ""), style="bold")
    ]
    if [key.summary for key in kind.parameters] != [kind.summary]:
        parts.append(Text(kind.summary))
    if kind.paper:
        parts.append(Text(kind.paper, style="dim"))
    if kind.code:
        parts.append(Text(f"plugin {kind.code}{f' of {kind.package}' if kind.package else ''}", style="dim"))
    for key in kind.parameters:
        facts = ", ".join(filter(None, [key.type, key.bounds, _default(key)]))
        parts.append(Text.assemble((key.name, "cyan"), f": {facts}"))
        if key.description:
            parts.append(Padding(Text(key.words), (0, 0, 0, 4), expand=False))
    special = [place for place in (kind, *same) if place.default not in (None, place.table)]
    parts += [Text(f"by default {place.part} has {place.default}") for place in special]
    if same:
        parts.append(Text(f"also in {', '.join([other.part for other in same])}"))
    return Group(*parts)


def _names(kind: Kind) -> list[str]:
    """Return the names by which a policy can be selected."""
    return list(filter(None, [kind.kind, kind.part, kind.part.rpartition(".")[2]]))


def _same(one: Kind, other: Kind) -> bool:
    """Return whether two entries are the same policy, possibly in different groups."""
    return (one.kind, one.summary, one.parameters) == (other.kind, other.summary, other.parameters)


def _default(key: SettingKey) -> str:
    if key.required:
        return "required"
    return "optional" if key.default is None else f"default {to_toml(key.default)}"


def _brief(key: SettingKey) -> str:
    if key.required:
        return f"{key.name} (required)"
    if key.default is None or key.type in ("table", "list of tables"):  # their policies are listed as a group
        return key.name
    return f"{key.name} = {to_toml(key.default)}"
