"""The schemas that `edgeasync schema` prints. `support/programs/outputs.py` checks every output by them."""

import json

import jsonschema
import pytest

from edgeasync.cli.output import Printer
from edgeasync.cli.outputs import AgentProgress, EventLine, HubProgress
from edgeasync.cli.schemas import OUTPUTS, output_schema, print_schema, structs_in
from edgeasync.errors import ConfigError
from edgeasync.setting_keys import meanings_of
from tests.support.programs.outputs import check_lines, output_of


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_output_has_a_valid_schema_with_descriptions(name):
    schema = output_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    for struct in structs_in(OUTPUTS[name].objects):
        described = schema["$defs"][struct.__name__]
        properties = described.get("properties") or {item["title"]: item for item in described["prefixItems"]}
        assert set(struct.__struct_fields__) <= set(properties)
        for key, meaning in meanings_of(struct).items():
            assert properties[key]["description"] == meaning


def test_a_schema_is_printed_by_its_name(capsys):
    for name in ("agent.toml", "status"):
        print_schema(name, Printer(json=False))
        assert json.loads(capsys.readouterr().out)["title"] == name
    with pytest.raises(ConfigError, match=r"did you mean agent\.toml"):
        print_schema("agent.tml", Printer(json=False))


def test_figures_of_an_event_are_checked_with_its_name_and_time(capsys):
    printer = Printer(json=True)
    printer.figures("progress", HubProgress(version=1, updates_applied=2, devices_live=3), "")
    printer.event("joined", device="pi-1", detail="")
    said = capsys.readouterr().out
    keys = [*json.loads(said.splitlines()[0])]
    assert keys == ["event", "time", "version", "updates_applied", "devices_live"]
    check_lines(("hub", "--json"), said)
    for wrong in ('{"event": "joined", "time": 1.0, "devices": "pi-1"}', '{"event": "stopped", "version": 1}'):
        with pytest.raises(jsonschema.ValidationError):
            check_lines(("hub", "--json"), wrong)


def test_an_agent_that_never_pinged_has_no_round_trip(capsys):
    counts = AgentProgress(steps=1, updates_answered=0, day_left_bytes=None, round_trip_s=None)
    Printer(json=True).figures("progress", counts, "")
    check_lines(("agent", "--json"), capsys.readouterr().out)


def test_outputs_are_named_after_commands():
    assert output_of("model", "inspect", "a.onnx") == "model-inspect"
    assert output_of("keys", "list") == "keys"
    assert output_of("device", "release", "pi-1") == output_of("wake") == "status"
    assert EventLine in OUTPUTS["peer"].objects
