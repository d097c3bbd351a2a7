"""Suggestions for unknown commands and flags."""

import inspect
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from edgeasync.errors import ConfigError

UsageError: Any = typer.BadParameter.__mro__[1]  # typer does not export click's UsageError


def check_settings_file(config: Path | None, flags: Mapping[str, str]) -> None:
    """Raise `ConfigError` if the settings file has a suffix that belongs to one of the `flags`."""
    if config is not None and config.suffix in flags:
        flag = flags[config.suffix]
        raise ConfigError(f"{config}: not a settings file (TOML); use {flag} {config}")


class Commands(TyperGroup):
    """A group of commands that suggests corrections for misspelt commands and flags."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command. Raises `UsageError` with a suggestion if it is unknown."""
        from edgeasync.config import suggest  # noqa: PLC0415 - only a mistake needs it

        self.suggest_commands = False  # typer's own suggestions can be unrelated to the input
        try:
            name, command, rest = super().resolve_command(ctx, args)
            return name, self.whole(f"{name}" if ctx.parent is None else f"{ctx.info_name} {name}", command), rest
        except UsageError as error:
            error.advice = suggest(args[0], self.commands)
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as typer calls it
        """List the commands, each with the whole first sentence of its help."""
        from edgeasync.setting_keys import first_sentence  # noqa: PLC0415

        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, first_sentence(self.commands[name].help or "") + ".") for name in self.commands]
            )

    @staticmethod
    def whole(name: str, command: Any) -> Any:
        """Return a command with its settings flags, which are built only for the command that runs."""
        from edgeasync.cli.settings_flags import FLAGS, with_flags  # noqa: PLC0415

        if name not in FLAGS:
            return command
        return with_flags(command.name, inspect.unwrap(command.callback), FLAGS[name]())


def commands_of(module: str) -> type[Commands]:
    """Return a group with the commands of a module in this package, imported on first use."""

    class CommandsOfModule(Commands):
        @property
        def commands(self) -> dict[str, Any]:
            return _commands_in(module)

        @commands.setter
        def commands(self, _: object) -> None:
            """Ignore assignments by typer."""

    return CommandsOfModule


@cache
def _commands_in(module: str) -> dict[str, Any]:
    found: dict[str, Any] = vars(typer.main.get_command(import_module(module, __package__).app))["commands"]
    return found


def sentence_of(error: Any) -> str:
    """Return one sentence that states the mistake in a command line and its correction."""
    parameter, said = getattr(error, "param", None), error.message
    if parameter is not None and said:  # an invalid value
        is_flag = parameter.param_type_name == "option"
        name = " / ".join(parameter.opts) if is_flag else parameter.make_metavar(error.ctx)
        return f"{name}: {_begun_small(said)}"
    if hasattr(error, "possibilities"):
        advice = _advice(error.option_name, error.ctx)
    else:
        said, advice = error.format_message(), getattr(error, "advice", "")
    if not advice and error.ctx is not None:
        advice = f"see '{error.ctx.command_path} --help'"
    return "; ".join(filter(None, (_begun_small(said), advice)))


def _begun_small(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:].rstrip(".")


def _advice(flag: str, ctx: Any) -> str:
    """Return a correction for an unknown flag."""
    from edgeasync.config import find_near, find_tables  # noqa: PLC0415

    key = flag.lstrip("-").replace("-", "_")
    flags = [name for option in ctx.command.params for name in option.opts if name.startswith("--")]
    if named := [one.name for one in getattr(ctx.command, "flags", ()) if one.key.name == key]:
        return f"use {named[0]}"
    tables = []
    if ctx.command.name in _SETTINGS:
        module, settings = _SETTINGS[ctx.command.name]
        tables = find_tables(key, getattr(import_module(f"edgeasync.{module}"), settings))
    if tables:
        places = " or ".join(f"[{table}]" for table in dict.fromkeys(tables) if table)
        return f"'{key}' is {f'a key of {places}' if places else 'a table'} in the settings file"
    others = ctx.parent.command.commands if ctx.command.name in _SETTINGS else {}
    whole = {name: Commands.whole(name, others[name]) for name in _SETTINGS if name in others}
    if having := [name for name, command in whole.items() if any(flag in one.opts for one in command.params)]:
        return "it is a flag of " + " and ".join(f"'edgeasync {name}'" for name in having)
    # All flags have dashes, so dashes do not count as similarity.
    near = find_near(flag.lstrip("-"), [name.lstrip("-") for name in flags])
    return f"did you mean {' or '.join(f'--{name}' for name in near)}?" if near else ""


_SETTINGS = {
    "hub": ("runtime.hub_settings", "HubSettings"),
    "agent": ("runtime.agent_settings", "AgentSettings"),
    "peer": ("runtime.peer_settings", "PeerSettings"),
    "doctor": ("runtime.agent_settings", "AgentSettings"),
}
"""Module and name of each command's settings class.

A module is imported on first use, because a device does not need the hub's modules.
"""
