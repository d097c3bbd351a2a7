"""`edgeasync schema`: JSON schemas of settings files, and of the objects that `--json` prints."""

from typing import Any, NamedTuple

import msgspec

from edgeasync.cli.output import Printer
from edgeasync.cli.outputs import (
    AgentProgress,
    BuiltGraph,
    Bundle,
    CheckedModel,
    DemoResult,
    EffectiveSetting,
    EventLine,
    ExportedModel,
    HubCheck,
    HubProgress,
    HubTotals,
    KeyLine,
    PeerProgress,
    ServiceLine,
)
from edgeasync.cli.settings import FILES, schema_of
from edgeasync.config import suggest
from edgeasync.durable.run_alarms import RunAlarm
from edgeasync.durable.run_events import ReplayedEvaluation, ReplayedUpdate, RunEvent
from edgeasync.durable.run_replay import Beginning, ReplaySummary
from edgeasync.durable.verification import Verified
from edgeasync.errors import ConfigError
from edgeasync.ops.doctor.finding import Finding
from edgeasync.ops.inspection import Inspection
from edgeasync.ops.runs import CheckpointSummary, RunSummary
from edgeasync.policies.catalogue import Kind
from edgeasync.protocol.feed import DeviceDetails, FeedUpdate
from edgeasync.protocol.status import HubStatus, RecentEvent
from edgeasync.setting_keys import meanings_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class CommandOutput(NamedTuple):
    """What a command prints with `--json`.

    Each printed object is one of `objects`. If `is_array` is true, the command prints one array of
    them instead.
    """

    objects: tuple[type[msgspec.Struct], ...]
    is_array: bool = False


OUTPUTS = {
    "agent": CommandOutput((EventLine, AgentProgress)),
    "bundle": CommandOutput((Bundle,)),
    "demo": CommandOutput((EventLine, DemoResult)),
    "doctor": CommandOutput((Finding,)),
    "events": CommandOutput((RecentEvent,)),
    "export": CommandOutput((ExportedModel,)),
    "feed": CommandOutput((FeedUpdate,)),
    "feed-device": CommandOutput((DeviceDetails,)),
    "hub": CommandOutput((EventLine, HubProgress, HubTotals, HubCheck)),
    "keys": CommandOutput((KeyLine,)),
    "model-build": CommandOutput((BuiltGraph,)),
    "model-check": CommandOutput((CheckedModel,)),
    "model-inspect": CommandOutput((Inspection,)),
    "peer": CommandOutput((EventLine, PeerProgress)),
    "policies": CommandOutput((Kind,), is_array=True),
    "replay": CommandOutput((Beginning, ReplayedUpdate, ReplayedEvaluation, RunEvent, ReplaySummary, Verified)),
    "replay-alarms": CommandOutput((RunAlarm,)),
    "runs": CommandOutput((RunSummary, CheckpointSummary)),
    "service": CommandOutput((ServiceLine,)),
    "settings": CommandOutput((EffectiveSetting,), is_array=True),
    "status": CommandOutput((HubStatus,)),
}
"""The outputs by name. `wake` and `device` print the same object as `status`. The hub's page sends
`feed` and `feed-device`."""

_EVENTS: dict[type[msgspec.Struct], tuple[str, ...]] = {
    AgentProgress: ("progress", "stopped"),
    HubProgress: ("progress",),
    HubTotals: ("stopped",),
    PeerProgress: ("progress", "stopped"),
}
"""The events of figures. Such an object also has the keys `event` and `time`."""


def print_schema(name: str, printer: Printer) -> None:
    """Print a JSON schema. Raises `ConfigError` if there is none of that name."""
    names = [*FILES, *OUTPUTS]
    if name not in names:
        advice = suggest(name, names) or f"choose from {', '.join(names)}"
        raise ConfigError(f"no schema for {name!r}; {advice}")
    schema = schema_of(FILES[name], name) if name in FILES else output_schema(name)
    text = msgspec.json.format(msgspec.json.encode(schema), indent=2).decode()
    for line in text.splitlines():
        printer.line(line)


def output_schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of an output: of each line or, if it is an array, of the whole."""
    output = OUTPUTS[name]
    _, parts = msgspec.json.schema_components(output.objects, ref_template="#/$defs/{name}")
    for struct in structs_in(output.objects):
        _describe(parts[struct.__name__], struct)
    objects = [{"$ref": f"#/$defs/{struct.__name__}"} for struct in output.objects]
    one: dict[str, Any] = objects[0] if len(objects) == 1 else {"anyOf": objects}
    whole = {"type": "array", "items": one} if output.is_array else one
    return {"$schema": DIALECT, "title": name, **whole, "$defs": parts}


def structs_in(objects: tuple[type[msgspec.Struct], ...]) -> list[type[msgspec.Struct]]:
    """Return these structs and all that their fields contain, each once."""
    found: dict[type[msgspec.Struct], None] = {}

    def visit(kind: msgspec.inspect.Type) -> None:
        if isinstance(kind, msgspec.inspect.StructType) and kind.cls not in found:
            found[kind.cls] = None
            for field in kind.fields:
                visit(field.type)
        for inner in getattr(kind, "types", ()):
            visit(inner)
        for name in ("item_type", "value_type", "type"):
            if (below := getattr(kind, name, None)) is not None:
                visit(below)

    for kind in msgspec.inspect.multi_type_info(objects):
        visit(kind)
    return [*found]


def _describe(schema: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    """Add descriptions of the keys to a struct's schema, and the keys that every event has."""
    if "properties" not in schema:  # the struct is sent as an array
        meanings = meanings_of(struct)
        named = zip(struct.__struct_fields__, schema["prefixItems"], strict=True)
        schema["prefixItems"] = [{"title": name, **item, "description": meanings[name]} for name, item in named]
        return
    properties = schema["properties"]
    for key, meaning in meanings_of(struct).items():
        properties[key] = {**properties[key], "description": meaning}
    if (names := _EVENTS.get(struct)) is not None:
        schema["properties"] = {"event": {"enum": list(names)}, "time": {"type": "number"}, **properties}
        schema["required"] = ["event", "time", *schema["required"]]
