"""Generates parts of pages from the code, at each mark `<!-- generated: NAME -->`."""

import inspect
import re
import types
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Union, get_origin, get_type_hints

import msgspec
import typer
from msgspec import UnsetType

import edgeasync
from docs.draw import BOUND
from docs.messages import messages
from edgeasync import errors, nn
from edgeasync.cli.main import app
from edgeasync.cli.mistakes import Commands
from edgeasync.cli.schemas import OUTPUTS, structs_in
from edgeasync.cli.settings import FILES
from edgeasync.cli.settings_flags import GroupedCommand
from edgeasync.policies.catalogue import Kind, catalogue
from edgeasync.sdk.service import Service
from edgeasync.setting_keys import SettingKey, keys_of, meanings_of, tables_of, to_toml
from edgeasync.web.metric_tables import DEVICE_METRICS, HUB_METRICS

MARK = re.compile(r"^<!-- generated: (\w+)(?: (\S+))? -->$", re.MULTILINE)


def fill(text: str) -> str:
    """Insert the generated part after every mark of a page."""

    def generate(found: re.Match[str]) -> str:
        part = GENERATORS[found[1]]() if found[2] is None else PARTS[found[1]](found[2])
        return f"{found[0]}\n\n{part}\n"

    return MARK.sub(generate, text)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a Markdown table."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# -- the command line -------------------------------------------------------------------------------------------


def commands() -> str:
    """Describe every command with its arguments and options."""
    return "\n\n".join(_command(command, name) for name, command in every_command())


def every_command() -> list[tuple[str, Any]]:
    """Return name and command of every command, subcommands such as `model build` included."""
    root = typer.main.get_command(app)
    found: list[tuple[str, Any]] = []
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found += [(name, command)] if inner is None else [(f"{name} {each}", inner[each]) for each in inner]
    whole = [(name, Commands.whole(name, command)) for name, command in found]
    for _, command in whole:
        if isinstance(command, GroupedCommand):
            command.explain()
    return whole


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
    """Return the default, unless the help text has it."""
    if parameter.required:
        return " Required."
    if parameter.default in (None, False) or "[default" in parameter.help:
        return ""
    return f" [default: {parameter.default}]"


# -- settings files ---------------------------------------------------------------------------------------------


def settings_tables() -> dict[str, type]:
    """Return every table of the settings files by its place: `hub:model.mlp`, or `agent:` for a whole file."""
    return {
        f"{file.removesuffix('.toml')}:{path}": struct
        for file, whole in FILES.items()
        for path, struct in tables_of(whole)
    }


def settings(place: str) -> str:
    """Describe the keys of a settings table from the struct that declares them."""
    rows = [_setting(key) for key in keys_of(settings_tables()[place])]
    return table(["key", "type", "default", "meaning"], rows)


def _setting(key: SettingKey) -> list[str]:
    default = "required" if key.required else "none" if key.default is None else f"`{to_toml(key.default)}`"
    if key.type == "table" and isinstance(key.default, dict) and "kind" not in key.default:
        default = "defaults"
    return [f"`{key.name}`", ", ".join(filter(None, [key.type, key.bounds])), default, key.description]


# -- policies ---------------------------------------------------------------------------------------------------

DRAWN_FOR = {"constant": f"`staleness_max = {BOUND:g}`"}
"""Kind -> settings of its plot that are not defaults."""

ARXIV = re.compile(r"arXiv:(\d+\.\d+)")


def policies() -> str:
    """Describe every kind of every part of a policy, with papers and plots of weights."""
    parts: dict[str, list[Kind]] = {}
    for kind in catalogue():
        parts.setdefault(kind.part, []).append(kind)
    shown: list[tuple[str, tuple[SettingKey, ...]]] = []
    return "\n\n".join(_part(part, kinds, shown) for part, kinds in parts.items())


def _part(part: str, kinds: list[Kind], shown: list[tuple[str, tuple[SettingKey, ...]]]) -> str:
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
        lines.append(f"{kind.summary}." + (f" Paper: {paper}." if paper else ""))
        if part == "staleness":
            lines.append(f"![The weight of an update under {kind.kind}](../pictures/staleness-{kind.kind}.svg)")
            if kind.kind in DRAWN_FOR:
                lines.append(f"Drawn for {DRAWN_FOR[kind.kind]}. A cross means rejected as `stale`.")
        lines.append(f"```toml\n[policy]\n{kind.example}\n```")
        if default and str(kind.default) not in kind.example:
            lines.append(f"In the default policy it is `{kind.default}`.")
        if chosen := ", ".join(f"`{name}`" for name in kind.chosen):
            lines.append(f"There is no default for {chosen}. The value above is an example.")
    return "\n\n".join(lines)


# -- Python -----------------------------------------------------------------------------------------------------

NAMES = {
    "Train": ("train", "train_async", "join", "Stop", "Run"),
    "Run a hub and agents, or peers": ("Hub", "Agent", "Peer", "fetch_status"),
    "Callbacks": (
        *[f"callbacks.{name}" for name in ("Progress", "CSVLog", "StopWhen", "SaveBest", "StopTraining", "Event")],
        *[f"callbacks.{name}Event" for name in ("Join", "Leave", "Update", "Version", "Evaluation", "Best")],
        *[f"callbacks.{name}Event" for name in ("Alert", "Exchange", "End")],
    ),
    "Trainers": ("Trainer", "GradientTrainer", "OnnxTrainer", "StepResult"),
    "Models": ("ParameterSpec", "Parameter", "Vector"),
    "Data": ("Dataset", "data.load", "data.from_iterable", "data.iid", "data.dirichlet", "data.batches"),
    "Losses": (
        "losses.CrossEntropy", "losses.BinaryCrossEntropy", "losses.MeanSquaredError", "losses.MeanAbsoluteError",
        "losses.Huber", "losses.OnnxLoss",
    ),
    "Adapters": ("lora.LoRA",),
    "Metrics": ("metrics.Accuracy", "metrics.TopK", "metrics.F1", "metrics.MAE", "metrics.Meter"),
    "Policies": ("Policy", "SGD", "Adam"),
    "Errors": ("EdgeAsyncError",),
}  # fmt: skip
"""Heading -> public names under it."""

MODULES: tuple[str, ...] = edgeasync._MODULES  # noqa: SLF001 - they are not among the names
"""The public modules."""


def public_names() -> dict[str, Any]:
    """Return every public class, function and value by its full name."""
    found = {f"edgeasync.{name}": getattr(edgeasync, name) for name in edgeasync.__all__}
    for name in MODULES:
        module = getattr(edgeasync, name)
        found |= {f"edgeasync.{name}.{each}": getattr(module, each) for each in getattr(module, "__all__", ())}
    return found


VALUES = {"Vector": "The type of a model's parameters: a one-dimensional, C-contiguous numpy array of float32."}
"""Descriptions of public names that are neither classes nor functions."""


def python() -> str:
    """Return a directive for every public name: the groups, then the remaining names of each module."""
    said = {name for names in NAMES.values() for name in names}
    groups = {group: list(names) for group, names in NAMES.items()}
    for module in MODULES:
        all_of_it = getattr(getattr(edgeasync, module), "__all__", ())
        rest = [f"{module}.{name}" for name in all_of_it if not {name, f"{module}.{name}"} & said]
        groups |= {f"Module `{module}`": rest} if rest else {}
    return "\n\n".join(
        f"## {group}\n\n" + "\n\n".join(_describe(name, attrgetter(name)(edgeasync)) for name in names)
        for group, names in groups.items()
    )


def _describe(name: str, value: Any) -> str:
    """Return the directive for one name."""
    if name in VALUES:
        directive = f"{{py:data}} edgeasync.{name}\n\n{VALUES[name]}"
    elif isinstance(value, type) and issubclass(value, msgspec.Struct):
        fields = ", ".join(_argument(field) for field in msgspec.structs.fields(value))
        words = _fence_examples(inspect.cleandoc(value.__doc__ or ""))
        directive = f"{{py:class}} edgeasync.{name}({fields})\n\n{words}"
    elif isinstance(value, type):
        kind = "autoexception" if issubclass(value, Exception) else "autoclass"
        inherited = "\n   :inherited-members:" if issubclass(value, Service) else ""
        # A protocol is not called: Python's own signature for it, (*args, **kwargs), would mislead.
        call = "()" if getattr(value, "_is_protocol", False) else ""
        members = "" if issubclass(value, nn.Layer) else f"\n   :members:{inherited}"
        directive = f"{{eval-rst}}\n.. {kind}:: edgeasync.{name}{call}{members}"
    else:
        directive = f"{{eval-rst}}\n.. autofunction:: edgeasync.{name}"
    return f"### {name}\n\n````{directive}\n````"


def _fence_examples(words: str) -> str:
    """Fence the examples of a docstring, because `>>>` begins a quotation in Markdown."""
    parts = words.split("\n\n")
    return "\n\n".join(f"```pycon\n{part}\n```" if part.startswith(">>>") else part for part in parts)


def _argument(field: msgspec.structs.FieldInfo) -> str:
    """Format a field as an argument, with an ellipsis for a default that is a settings table."""
    if field.required:
        return field.name
    known = isinstance(field.default, str | int | float | None)
    return (
        f"{field.name}={field.default!r}"
        if known and field.default is not msgspec.NODEFAULT
        else f"{field.name}=..."
    )


# -- what `--json` prints ---------------------------------------------------------------------------------------


def output(name: str) -> str:
    """Return the keys of the objects that a command prints with `--json`.

    `name` may be followed by a colon and the name of one struct.
    """
    command, _, one = name.partition(":")
    structs = [struct for struct in structs_in(OUTPUTS[command].objects) if one in ("", struct.__name__)]
    return "\n\n".join(map(_keys, structs))


def _keys(struct: type[msgspec.Struct]) -> str:
    hints, meanings = get_type_hints(struct), meanings_of(struct)
    rows = [[f"`{name}`", _type(hints[name]), meanings.get(name, "")] for name in struct.__struct_fields__]
    head = ["key", "type", "meaning"]
    if not meanings:
        rows, head = [row[:2] for row in rows], head[:2]
    words = " ".join((struct.__doc__ or "").split())
    return f"**{struct.__name__}.** {words}\n\n{table(head, rows)}"


def _type(hint: Any) -> str:
    if get_origin(hint) in (types.UnionType, Union):
        return " or ".join(_type(each) for each in hint.__args__ if each is not UnsetType)
    names = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", Any: "any"}
    if hint in names:
        return names[hint]
    origin: Any = getattr(hint, "__origin__", None)
    arguments: tuple[Any, ...] = getattr(hint, "__args__", ())
    if origin in (list, tuple):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"object of {_type(arguments[1])}"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"{hint.__name__}"
    return "string" if all(isinstance(each, str) for each in arguments) else str(hint)


# -- errors -----------------------------------------------------------------------------------------------------


def error_tree() -> list[type[errors.EdgeAsyncError]]:
    """Return every class of the error tree in order of exit codes, the one for bugs last."""
    found = [
        error
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.EdgeAsyncError)
    ]
    return sorted(found, key=lambda error: (error is errors.TransitionError, error.exit_code))


def exit_codes() -> dict[int, str]:
    """Return the exit codes of the error tree, each with its meaning."""
    found: dict[int, str] = {}
    for error in error_tree():
        found.setdefault(error.exit_code, _parts_of(error)["when"].rstrip("."))
    return found


def error_classes() -> str:
    """Return a table of the error tree, from the docstrings of its classes."""
    rows = []
    for error in error_tree():
        parts = _parts_of(error)
        rows.append([f"`{error.__name__}`", str(error.exit_code), parts["when"], parts["Cause"], parts["Cure"]])
    return table(["class", "exit code", "when", "cause", "cure"], rows)


def _parts_of(error: type[errors.EdgeAsyncError]) -> dict[str, str]:
    """Return the first line of a docstring, and its paragraphs `Cause:` and `Cure:`."""
    words = inspect.cleandoc(error.__doc__ or "")
    found = {"when": words.partition("\n")[0]}
    for name, said in re.findall(r"^(Cause|Cure): (.*?)(?=^Cure: |\n\n|\Z)", words, re.MULTILINE | re.DOTALL):
        sentence = " ".join(said.split())
        found[name] = sentence[:1].upper() + sentence[1:]
    return found


GROUPS = {
    "Refuse": "A hub's refusals of a device or operator, which prints the sentence.",
    "Finding": "Findings of `edgeasync doctor`, each with its cure.",
    "ValueError": "Invalid settings and arguments. A command prefixes most of these with the key's path.",
}
"""Introductions to the messages outside the error tree."""


def error_messages() -> str:
    """Return every message in the source, by class and module, with values as names in angle brackets."""
    parts: dict[str, dict[str, list[str]]] = {}
    order = [error.__name__ for error in error_tree()] + ["Refuse", "Finding", "ValueError", "TypeError"]
    for message in sorted(messages(), key=lambda each: (each.module, each.line)):
        texts = parts.setdefault(message.error, {}).setdefault(message.module, [])
        if message.text not in texts:
            texts.append(message.text)
    lines = []
    for error in sorted(parts, key=lambda name: (order.index(name) if name in order else len(order), name)):
        lines += [f"### {error}", *filter(None, [GROUPS.get(error, "")])]
        for module, texts in parts[error].items():
            lines += [f"**`{module}`**", "\n".join(f"- {_code(text)}" for text in texts)]
    return "\n\n".join(lines)


def _code(text: str) -> str:
    """Return text as code that may have backticks itself."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


# -- metrics ----------------------------------------------------------------------------------------------------


def metrics() -> str:
    """Return a table of the metrics of a hub and of its devices."""
    rows = [
        [f"`{row.shown_name}`", row.kind, f"`{row.label}`" if row.label else "", row.words + "."]
        for row in HUB_METRICS + DEVICE_METRICS
    ]
    return table(["metric", "kind", "label", "meaning"], rows)


GENERATORS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "policies": policies,
    "python": python,
    "error_classes": error_classes,
    "error_messages": error_messages,
    "metrics": metrics,
}

PARTS: dict[str, Callable[[str], str]] = {"output": output, "settings": settings}
"""The generators whose mark has an argument."""
