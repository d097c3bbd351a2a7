"""Writes the parts of the pages that follow from code: a page marks each by `<!-- generated: NAME -->`."""

import re
import types
from collections.abc import Callable, Iterable
from typing import Any, get_type_hints

import msgspec
import typer

import edgeasync
from docs.draw import DEVICES_LIVE, SHOWN
from edgeasync import errors
from edgeasync.cli.main import app
from edgeasync.durable.run_replay import Beginning, Evaluation, Happening, Update
from edgeasync.policies.catalogue import Kind, Parameter, catalogue
from edgeasync.runtime.runs import Mark, RunSummary

MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def fill(text: str) -> str:
    """Return a page with every mark followed by what is generated for it."""
    return MARK.sub(lambda found: f"{found[0]}\n\n{GENERATORS[found[1]]()}\n", text)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# -- the command line -------------------------------------------------------------------------------------------


def commands() -> str:
    """Return every command with its arguments and options, from the code that reads them."""
    return "\n\n".join(_command(command, name) for name, command in every_command())


def every_command() -> list[tuple[str, Any]]:
    """Return all commands that can be run, with their names, those of `model` among them."""
    root = typer.main.get_command(app)
    found: list[tuple[str, Any]] = []
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found += [(name, command)] if inner is None else [(f"{name} {each}", inner[each]) for each in inner]
    return found


def _command(command: Any, name: str) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join(
        (parameter.metavar or parameter.name.upper())
        if parameter.required
        else f"[{parameter.metavar or parameter.name.upper()}]"
        for parameter in arguments
    )
    rows = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            shown = parameter.metavar or parameter.name.upper()
        else:
            shown = parameter.opts[-1] + (" VALUE" if not parameter.is_flag else "")
        rows.append([f"`{shown}`", f"{parameter.help}{_default(parameter)}"])
    line = f"edgeasync {name} {usage}".rstrip() + " [OPTIONS]"
    words = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    return f"## `edgeasync {name}`\n\n{words}\n\n```text\n{line}\n```\n\n{table(['option', 'meaning'], rows)}"


def _default(parameter: Any) -> str:
    """Return a default that the help text does not name itself."""
    if parameter.required:
        return " Required."
    if parameter.default in (None, False) or "[default" in parameter.help:
        return ""
    return f" [default: {parameter.default}]"


# -- policies ---------------------------------------------------------------------------------------------------

ARXIV = re.compile(r"arXiv:(\d+\.\d+)")


def policies() -> str:
    """Return every kind of every part of a policy, with its paper, and the weight functions as plots."""
    parts: dict[str, list[Kind]] = {}
    for kind in catalogue():
        parts.setdefault(kind.part, []).append(kind)
    shown: list[tuple[str, tuple[Parameter, ...]]] = []
    return "\n\n".join(_part(part, kinds, shown) for part, kinds in parts.items())


def _part(part: str, kinds: list[Kind], shown: list[tuple[str, tuple[Parameter, ...]]]) -> str:
    lines = [f"## `{part}`"]
    known = [kind.kind for kind in kinds if (kind.kind, kind.parameters) in shown]
    if known and len(known) == len(kinds):
        default = next((f" The default is `{kind.default}`." for kind in kinds if kind.default), "")
        return f"{lines[0]}\n\nThe same kinds as above: {', '.join(f'`{kind}`' for kind in known)}.{default}"
    for kind in kinds:
        shown.append((kind.kind, kind.parameters))
        default = " (the default)" if kind.default and kind.kind else ""
        if kind.kind:
            lines.append(f"### `{kind.kind}`{default}")
        paper = ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", kind.paper)
        lines.append(f"{kind.summary}." + (f" {paper}." if paper else ""))
        if part == "staleness":
            beside = f", for {DEVICES_LIVE} live devices" if kind.kind == "ringmaster" else ""
            line = f"`{msgspec.json.encode(msgspec.to_builtins(SHOWN[kind.kind])).decode()}`"
            lines.append(f"![The weight of an update under {kind.kind}](../pictures/staleness-{kind.kind}.svg)")
            lines.append(f"Drawn with {line}{beside}. A cross: refused as `stale`.")
        lines.append(f"```toml\n[policy]\n{kind.example}\n```")
    return "\n\n".join(lines)


# -- Python -----------------------------------------------------------------------------------------------------


VALUES = {
    "Vector": "A flat numpy vector of float32: all parameters of a model, in the order of its `ParameterSpec`."
}
"""What is said of public names that are neither classes nor functions."""


def python() -> str:
    """Return directives that describe every public name."""
    blocks = []
    for name in sorted(edgeasync.__all__, key=str.lower):
        value = getattr(edgeasync, name)
        if isinstance(value, type):
            kind = "autoexception" if issubclass(value, Exception) else "autoclass"
            options = "\n   :members:" + (
                "" if kind == "autoexception" else "\n   :inherited-members: object, Struct"
            )
            if issubclass(value, msgspec.Struct):
                options += "\n   :undoc-members:"
        else:
            kind, options = ("autofunction", "") if isinstance(value, types.FunctionType) else ("py:data", "")
        if kind == "py:data":  # the name of a type, whose own description is numpy's
            options = "\n\n   " + VALUES[name]
        blocks.append(f"## {name}\n\n```{{eval-rst}}\n.. {kind}:: edgeasync.{name}{options}\n```")
    return "\n\n".join(blocks)


# -- what `--json` prints ---------------------------------------------------------------------------------------


def replay_keys() -> str:
    """Return the keys of the lines of `edgeasync replay --json`."""
    return "\n\n".join(_keys(struct) for struct in (Beginning, Update, Evaluation, Happening))


def runs_keys() -> str:
    """Return the keys of the lines of `edgeasync runs --json`."""
    return "\n\n".join(_keys(struct) for struct in (RunSummary, Mark))


def policies_keys() -> str:
    """Return the keys of the objects of `edgeasync policies --json`."""
    return "\n\n".join(_keys(struct) for struct in (Kind, Parameter))


def _keys(struct: type[msgspec.Struct]) -> str:
    hints = get_type_hints(struct)
    rows = [[f"`{name}`", _type(hints[name])] for name in struct.__struct_fields__]
    words = " ".join((struct.__doc__ or "").split())
    return f"**{struct.__name__}.** {words}\n\n{table(['key', 'type'], rows)}"


def _type(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_type(each) for each in hint.__args__)
    names = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", Any: "any"}
    if hint in names:
        return names[hint]
    origin, arguments = getattr(hint, "__origin__", None), getattr(hint, "__args__", ())
    if origin in (list, tuple):
        return f"list of {_type(arguments[0])}"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"{hint.__name__}"
    return "string" if all(isinstance(each, str) for each in arguments) else str(hint)


# -- errors -----------------------------------------------------------------------------------------------------


def exit_codes() -> dict[int, str]:
    """Return the exit codes of the error tree, each with what it stands for."""
    found = {
        error.exit_code: (error.__doc__ or "").rstrip(".")
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.EdgeAsyncError)
        if error is not errors.TransitionError
    }
    return dict(sorted(found.items()))


GENERATORS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "policies": policies,
    "python": python,
    "replay_keys": replay_keys,
    "runs_keys": runs_keys,
    "policies_keys": policies_keys,
}
