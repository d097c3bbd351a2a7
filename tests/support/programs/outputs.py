"""Checks what commands print with `--json` against the schemas of `edgeasync schema`."""

import contextlib
import functools
import json

import jsonschema

from edgeasync.cli.main import GROUPS
from edgeasync.cli.schemas import OUTPUTS, output_schema

SAME = {"wake": "status", "device": "status"}


def check_lines(arguments, stdout):
    """Raise `ValidationError` if a command printed a JSON object that does not fit its schema.

    Lines that are not JSON, such as the last one of a killed process, are skipped.
    """
    if "--json" not in arguments:
        return
    for line in stdout.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            validator(output_of(*map(str, arguments))).validate(json.loads(line))


def output_of(command, *arguments):
    """Return the name of the output of a command."""
    if command == "replay" and "--alarms" in arguments:
        return "replay-alarms"
    nested = f"{command}-{arguments[0]}" if command in GROUPS and arguments else ""
    return nested if nested in OUTPUTS else SAME.get(command, command)


@functools.cache
def validator(name):
    """Return a validator that refuses unknown keys, too."""
    schema = output_schema(name)
    for part in schema["$defs"].values():
        if part.get("type") == "object":
            part["additionalProperties"] = False
    return jsonschema.Draft202012Validator(schema)
