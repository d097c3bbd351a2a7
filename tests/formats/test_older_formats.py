"""What an older version of edgeasync wrote is read by this one: every fixture of every format opens as it was.

`tests/support/write_formats.py` has written them, each with the code of its time. Who raises the version of a
format adds the fixtures of the new one; the last test here asks for them.
"""

import asyncio
import json
import shutil
from functools import partial

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from edgeasync.cli.output import Printer
from edgeasync.cli.replay import replay_run
from edgeasync.core.arrays import state_codec
from edgeasync.core.device.day import DayRecord
from edgeasync.core.hub.digests import digest
from edgeasync.core.hub.events import PushArrived, Received
from edgeasync.core.recovery.log import event_of, read_entry
from edgeasync.durable import checkpoint, journal, spool_file
from edgeasync.durable.checkpoint import Manifest
from edgeasync.durable.day_file import DAY_FILE, DAY_FORMAT, DayFile
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.history import FORMAT as HISTORY_FORMAT
from edgeasync.durable.history import HISTORY_FILE, read_history
from edgeasync.durable.identity import DeviceFolder
from edgeasync.durable.journal import read_journal
from edgeasync.durable.local_file import LOCAL_FILE, LOCAL_FORMAT, LocalFile
from edgeasync.durable.recovery import read_rules
from edgeasync.durable.run_replay import RunReplay, Update
from edgeasync.durable.spool_file import SPOOL_FILE, SpoolFile
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import PROTOCOL_VERSION
from edgeasync.runtime.hub import RECORD_FILE
from edgeasync.runtime.hub_settings import RECORD_FORMAT, read_record
from edgeasync.runtime.model_file import MODEL_FILE, load_model
from edgeasync.runtime.runs import list_runs
from tests.support.write_formats import (
    DAY,
    EXPECTED_FILE,
    FOLDER,
    MODEL,
    POLICY,
    fields_of,
    make_held,
    make_local,
    make_spool,
)

RUNS = sorted(path.name for path in FOLDER.glob("run-*"))
DEVICES = sorted(path.name for path in FOLDER.glob("device-*"))
WIRES = sorted(path.name for path in FOLDER.glob("wire-*.json"))


@pytest.fixture(params=RUNS)
def run(request, tmp_path):
    """A copy of a run, under the name `first`."""
    folder = shutil.copytree(FOLDER / request.param, tmp_path / "runs" / "first")
    for path in (folder, *folder.iterdir()):
        path.chmod(0o700 if path.is_dir() else 0o600)  # git keeps no modes
    return folder


def expected_of(run):
    return json.loads((run / EXPECTED_FILE).read_text())


def test_a_run_tells_its_story_to_the_bit(run):
    replay = RunReplay(run)
    lines = []
    try:
        assert replay.tell(lambda line: lines.append(line) or True) == 0
        summary = replay.summary()
    finally:
        replay.close()
    expected = expected_of(run)
    for key in ("version", "lineage", "model_xxh3", "updates_applied", "updates_rejected", "updates_buffered"):
        assert summary[key] == expected[key], key
    assert {device["id"]: device["seq_last"] for device in summary["devices"]} == expected["devices"]
    assert [line.device for line in lines if line.event == "alarm"] == expected["in_quarantine"]
    assert {line.outcome for line in lines if isinstance(line, Update)} >= {"applied", "buffered", "rejected"}


def test_devices_are_known_by_digests_of_what_older_runs_say(run):
    members = {}
    for begin in (None, "latest"):
        replay = RunReplay(run, checkpoint=begin)
        replay.tell(lambda _: True)
        members[begin] = replay.core.members.dump_state()
        replay.close()
    assert known(members["latest"]) == known(members[None])
    version, said = written_in(run / "journal-00000001")
    assert {member.session for member in members[None]} <= {one if version >= 4 else digest(one) for one in said}


def test_nothing_of_a_session_in_clear_is_written_again(run):
    version, said = written_in(run / "journal-00000001")
    hub = read_record(run).make_hub(lambda _: asyncio.get_running_loop().call_soon(hub.request_stop))
    asyncio.run(hub.run())
    newest = max(run.glob("journal-*"))
    found, again = written_in(newest)
    assert newest.name != "journal-00000001"
    assert (found, bool(again)) == (journal._FORMAT, True), "the last batch is written once more"
    assert not [one for one in said if version < 4 and one in newest.read_bytes()]


def written_in(segment):
    """Return a segment's format, and the sessions as they stand in it."""
    alone = segment.parent / "alone"
    alone.mkdir(exist_ok=True)
    content = shutil.copy(segment, alone / "journal-00000001").read_bytes()
    version, first = (int.from_bytes(content[place:][:length], "little") for place, length in ((8, 4), (12, 8)))
    found = set()
    for record in read_journal(FolderDisk(alone), after=first - 1).records():
        event = event_of(read_entry(record.entry, made_by=journal._FORMAT))
        if isinstance(event, Received | PushArrived):
            found.add((event.push if isinstance(event, PushArrived) else event.message).session)
    return version, found - {None}


def known(members):
    return [(member.device_id, member.state_id, member.session, member.retired) for member in members]


@pytest.mark.parametrize("name", [name for name in RUNS if (FOLDER / name / HISTORY_FILE).exists()])
def test_a_history_has_a_row_for_each_update(name):
    replay = RunReplay(FOLDER / name)
    lines = []
    replay.tell(lambda line: lines.append(line) or True)
    replay.close()
    told = [
        (line.entry, line.hub_s, line.device, line.seq, line.reason or line.outcome, line.staleness, line.version)
        for line in lines
        if isinstance(line, Update)
    ]
    history = read_history(FOLDER / name)
    found = [
        (row.entry, row.time_s, device, row.number, row.outcome, row.staleness, row.version)
        for device, row in zip(history.devices, history.updates, strict=True)
    ]
    assert not history.trouble
    assert len(found) > 10
    assert found == told[: len(found)], "the newest rows may have been in memory"


@pytest.mark.parametrize(("name", "silent"), [("run-1", False), ("run-2", True)])
def test_a_story_has_the_losses_that_were_told(name, silent, capsys):
    replay_run(FOLDER / name, None, None, None, Printer(json=True), trust_code=False)
    updates = [line for line in map(json.loads, capsys.readouterr().out.splitlines()) if "seq" in line]
    told = {update["device"]: update["loss"] is not None for update in updates}
    assert told == {"device-0": True, "device-1": not silent, "device-2": False}, "the last tells NaN"
    replay_run(FOLDER / name, None, None, None, Printer(json=False), trust_code=False)
    assert ("no loss" in capsys.readouterr().out) == silent


def test_rules_that_could_not_be_written_down_are_refused_by_name():
    manifest = Manifest(
        format=1, software="", fingerprint="", lineage="", version=0, journal=0, now_s=0.0, updates_applied=0,
        created_s=0.0, rules={"policy": None},
    )  # fmt: skip
    with pytest.raises(
        StorageError, match=r"checkpoint-1: .* a policy of its own code, .*; choose another run folder"
    ):
        read_rules(manifest, "checkpoint-1")


def test_a_run_is_listed_without_trouble(run):
    (summary,) = list_runs(run.parent)
    assert summary.trouble == []
    assert summary.checkpoints == len(list(run.glob("checkpoint-*.json")))


def test_a_hub_goes_on_from_a_run_by_its_own_settings(run):
    settings = read_record(run)
    assert settings.policy.frequency.period_steps_min == POLICY.frequency.period_steps_min
    reports = []

    def on_report(report):
        reports.append((report.event, report.detail))
        if report.event == "resumed":
            asyncio.get_running_loop().call_soon(hub.request_stop)

    hub = settings.make_hub(on_report)
    assert asyncio.run(hub.run()) == "stopping"
    expected = expected_of(run)
    assert [event for event, _ in reports if event == "warning"] == []
    # The update that waited becomes a last version as the hub ends.
    assert hub.core.version == expected["version"] + 1
    assert hub.core.updates_applied == expected["updates_applied"] + expected["updates_buffered"]
    assert hub.core.updates_rejected == expected["updates_rejected"]
    assert {m.device_id: m.seq_last for m in hub.core.members.members.values()} == expected["devices"]
    assert load_model(run / MODEL_FILE, MODEL.spec)[1] == hub.core.version


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_is_known_again_and_repeats_its_update(name, tmp_path):
    state = shutil.copytree(FOLDER / name, tmp_path / "state")
    folder = DeviceFolder(state)
    identity = folder.open("device-1")
    folder.close()
    assert (identity.state_id, identity.incarnation) == ("5" * 32, 4)
    found, expected = SpoolFile(state, identity.state_id).read(), make_spool()
    push = msgspec.structs.replace(found.push, session=expected.push.session)  # which newer ones do not keep
    assert (found.model, push, bytes(found.payload)) == (expected.model, expected.push, expected.payload)
    np.testing.assert_array_equal(found.residual, expected.residual)
    assert found.trainer.keys() == expected.trainer.keys()
    for key, array in expected.trainer.items():
        np.testing.assert_array_equal(found.trainer[key], array)
    held, expected = SpoolFile(state, identity.state_id).read_model(), make_held()
    assert (held is None) == (name in ("device-1", "device-2", "device-3")), "those kept no model"
    if held is not None:
        assert (held.model, held.version, held.checksum) == (expected.model, expected.version, expected.checksum)
        np.testing.assert_array_equal(held.values, expected.values)
    kept_no_day = name in ("device-1", "device-2", "device-3", "device-4")
    assert DayFile(state).read() == (DayRecord() if kept_no_day else DAY)
    local = LocalFile(state, identity.state_id).read()
    assert {name: array.tolist() for name, array in local.items()} == (
        {} if kept_no_day or name == "device-5" else {name: array.tolist() for name, array in make_local().items()}
    )


@pytest.mark.parametrize("name", WIRES)
def test_a_message_says_what_it_said(name):
    for line in json.loads((FOLDER / name).read_text()):
        message = wire.decode(bytes.fromhex(line["header"]))
        assert type(message).__name__ == line["message"]
        assert said(fields_of(message), line["fields"]) == line["fields"]


def said(found, expected):
    """Return what was found without the fields at the end of each array that there were not yet."""
    if isinstance(expected, list):
        return [said(*pair) for pair in zip(found, expected, strict=False)]
    return found


# -- what is newer, or older than can be read ------------------------------------------------------------------


def test_a_journal_of_a_newer_version_is_refused_by_name(run):
    path = run / "journal-00000001"
    content = bytearray(path.read_bytes())
    content[8:12] = (99).to_bytes(4, "little")
    content[20:28] = wire.checksum(bytes(content[:20])).to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"journal format 99, .* start the version of edgeasync that wrote it"):
        asyncio.run(read_record(run).make_hub().run())


def test_a_checkpoint_of_a_newer_version_is_refused_by_name(run):
    for path in run.glob("checkpoint-*.json"):
        path.write_bytes(path.read_bytes().replace(b'{"format":', b'{"format":99'))
    with pytest.raises(
        StorageError, match=r"checkpoint format 99., .* start the version of edgeasync that wrote it"
    ):
        asyncio.run(read_record(run).make_hub().run())


def test_an_update_that_a_newer_version_kept_is_put_aside_by_name(tmp_path):
    file = SpoolFile(tmp_path, "5" * 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "encode", partial(wire.encode, version=99))
        file.write(make_spool())
    with pytest.raises(ProtocolError, match="protocol version 99 is not 1 or 2"):
        file.read()


# -- the rule --------------------------------------------------------------------------------------------------


def _note_versions(path, found):
    """Note the versions of what is in a file of a run."""
    if path.name.startswith("journal-"):
        found["journal"].add(int.from_bytes(path.read_bytes()[8:12], "little"))
    elif path.name.startswith("checkpoint-") and path.suffix == ".json":
        found["checkpoint"].add(json.loads(path.read_bytes())["format"])
    elif path.name == HISTORY_FILE:
        found["history"].add(int.from_bytes(path.read_bytes()[8:12], "little"))
    elif path.name == RECORD_FILE:
        found["record"].add(json.loads(path.read_bytes()).get("format", 1))
    elif path.name.startswith("checkpoint-"):
        scalars = safetensors.numpy.load_file(path)["scalars"].tobytes()
        found["state"].add(int.from_bytes(scalars[:2], "big"))


def kept_versions(name):
    """Return the versions of a kind of file that devices keep arrays in."""
    found = set()
    for path in FOLDER.glob(f"device-*/{name}"):
        with safetensors.safe_open(path, framework="numpy") as file:
            found.add(int(file.metadata()["format"].rpartition("-")[2]))
    return found


def versions():
    """Return the versions of every format that there are fixtures of."""
    found = {name: set() for name in ("journal", "checkpoint", "state", "record", "history", "wire")}
    for run in RUNS:
        for path in (FOLDER / run).iterdir():
            _note_versions(path, found)
    found["day"] = {json.loads(path.read_bytes())["format"] for path in FOLDER.glob(f"device-*/{DAY_FILE}")}
    found["spool"], found["local"] = kept_versions(SPOOL_FILE), kept_versions(LOCAL_FILE)
    for name in WIRES:
        found["wire"] |= {bytes.fromhex(line["header"])[1] for line in json.loads((FOLDER / name).read_text())}
    return found


def test_there_is_a_fixture_of_every_version_up_to_the_one_that_is_written():
    newest = {
        "journal": journal._FORMAT,
        "checkpoint": checkpoint.FORMAT,
        "state": state_codec.FORMAT,
        "record": RECORD_FORMAT,
        "history": HISTORY_FORMAT,
        "day": DAY_FORMAT,
        "local": int(LOCAL_FORMAT.rpartition("-")[2]),
        "spool": int(spool_file.SPOOL_FORMAT.rpartition("-")[2]),
        "wire": PROTOCOL_VERSION,
    }
    assert versions() == {name: set(range(1, version + 1)) for name, version in newest.items()}
