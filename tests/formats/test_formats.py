"""Golden files of every format: this version reads them to the bit, and would write the same bytes.

`tests/support/formats/write_formats.py` writes them. If a test here fails because a format has changed, raise the
format's number, and write them again. A file of another number is refused in one line.
"""

import asyncio
import json
import shutil
import zlib

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from edgeasync.cli.output import Printer
from edgeasync.cli.replay import replay_run
from edgeasync.config import FilePath
from edgeasync.core.arrays import state_codec
from edgeasync.core.arrays.state_codec import decode_state, encode_state
from edgeasync.core.hub.events import HubReceived, PushArrived, Ticked
from edgeasync.core.recovery.log import event_of, read_entry
from edgeasync.core.recovery.state import SCALARS, CoreState, _Scalars
from edgeasync.durable import checkpoint, journal, spool_file
from edgeasync.durable.checkpoint import CheckpointStore, Manifest
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.history import FILE_HEADER, HISTORY_FILE, Row
from edgeasync.durable.history import FORMAT as HISTORY_FORMAT
from edgeasync.durable.identity import DeviceFolder
from edgeasync.durable.journal import JournalReading
from edgeasync.durable.local_file import LOCAL_FILE, LOCAL_FORMAT, LocalFile
from edgeasync.durable.quota_file import QUOTA_FILE, QUOTA_FORMAT, QuotaFile
from edgeasync.durable.recovery import read_rules
from edgeasync.durable.run_events import ReplayedUpdate
from edgeasync.durable.run_folder import MODEL_FILE, RECORD_FILE, RunFolder
from edgeasync.durable.run_replay import RunReplay
from edgeasync.durable.spool_file import HELD_FILE, SPOOL_FILE, SpoolFile
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.graphs.model_file import load_model
from edgeasync.ops.runs import list_runs
from edgeasync.protocol import wire
from edgeasync.runtime.hub_record import RECORD_FORMAT, read_record, record_of
from edgeasync.runtime.hub_start import make_hub
from tests.support.formats.write_formats import (
    DAY,
    EXPECTED_FILE,
    FOLDER,
    MODEL,
    POLICY,
    STATE_ID,
    fields_of,
    make_held,
    make_local,
    make_spool,
    write,
)

RUN, DEVICE = FOLDER / "run", FOLDER / "device"


@pytest.fixture
def run(tmp_path):
    """A copy of the run, under the name `first`."""
    folder = shutil.copytree(RUN, tmp_path / "runs" / "first")
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
        assert getattr(summary, key) == expected[key], key
    assert {device.id: device.seq_last for device in summary.devices} == expected["devices"]
    events = [(line.event, line.device) for line in lines if line.event in ("alarm", "excluded")]
    assert events == [
        *[("alarm", name) for name in expected["alarms"]],
        *[("excluded", name) for name in expected["excluded"]],
    ]
    assert {line.outcome for line in lines if isinstance(line, ReplayedUpdate)} >= {
        "applied",
        "buffered",
        "rejected",
    }


def test_the_history_has_a_row_for_each_update():
    replay = RunReplay(RUN)
    lines = []
    replay.tell(lambda line: lines.append(line) or True)
    replay.close()
    told = [
        (line.entry, line.hub_s, line.device, line.seq, line.reason or line.outcome, line.staleness, line.version)
        for line in lines
        if isinstance(line, ReplayedUpdate)
    ]
    history = RunFolder(RUN).history()
    found = [
        (row.entry, row.time_s, row.device, row.number, row.outcome, row.staleness, row.version)
        for row in history.updates
    ]
    assert not history.trouble
    assert len(found) > 10
    folded = [tuple("applied" if field == "buffered" else field for field in row) for row in told]
    assert found == folded[: len(found)], "the newest rows may have been in memory"


def test_the_story_has_the_losses_that_were_told(capsys):
    replay_run(RUN, None, None, None, Printer(json=True), trust_code=False)
    updates = [line for line in map(json.loads, capsys.readouterr().out.splitlines()) if "seq" in line]
    told = {update["device"]: update["loss"] is not None for update in updates}
    assert told == {"device-0": True, "device-1": False, "device-2": False}, "the last tells NaN"
    replay_run(RUN, None, None, None, Printer(json=False), trust_code=False)
    assert "no loss" in capsys.readouterr().out


def test_rules_that_could_not_be_written_down_are_refused_by_name():
    manifest = Manifest(
        software="", fingerprint="", lineage="", version=0, journal=0, now_s=0.0, updates_applied=0,
        created_s=0.0, rules={"policy": None},
    )  # fmt: skip
    with pytest.raises(
        StorageError, match=r"checkpoint-1: .* used policy objects from a program, .*; choose another run folder"
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

    hub = make_hub(settings, on_report)
    assert asyncio.run(hub.run()) == "stopping"
    expected = expected_of(run)
    assert [event for event, _ in reports if event == "warning"] == []
    # The update that waited becomes a last version as the hub ends.
    assert hub.core.version == expected["version"] + 1
    assert hub.core.updates_applied == expected["updates_applied"] + expected["updates_buffered"]
    assert hub.core.updates_rejected == expected["updates_rejected"]
    assert {m.device_id: m.seq_last for m in hub.core.members.members.values()} == expected["devices"]
    assert load_model(run / MODEL_FILE, MODEL.spec)[1] == hub.core.version


def test_a_device_is_known_again_and_repeats_its_update(tmp_path):
    state = shutil.copytree(DEVICE, tmp_path / "state")
    folder = DeviceFolder(state)
    identity = folder.open("device-1")
    folder.close()
    assert (identity.state_id, identity.incarnation) == (STATE_ID, 4)
    found, expected = SpoolFile(state, STATE_ID).read(), make_spool()
    push = msgspec.structs.replace(expected.push, session=bytes(16))  # which is not kept
    assert (found.model, found.push, bytes(found.payload)) == (expected.model, push, expected.payload)
    np.testing.assert_array_equal(found.residual, expected.residual)
    assert found.trainer.keys() == expected.trainer.keys()
    for key, array in expected.trainer.items():
        np.testing.assert_array_equal(found.trainer[key], array)
    held, expected = SpoolFile(state, STATE_ID).read_model(), make_held()
    assert (held.model, held.version, held.checksum) == (expected.model, expected.version, expected.checksum)
    np.testing.assert_array_equal(held.values, expected.values)
    assert QuotaFile(state).read() == DAY
    local = LocalFile(state, STATE_ID).read()
    assert {name: array.tolist() for name, array in local.items()} == {
        name: array.tolist() for name, array in make_local().items()
    }


def test_a_message_says_what_it_said():
    for line in json.loads((FOLDER / "wire.json").read_text()):
        message = wire.decode(bytes.fromhex(line["header"]))
        assert type(message).__name__ == line["message"]
        assert fields_of(message) == line["fields"]


# -- another number ---------------------------------------------------------------------------------------------


def with_journal_format(run, number):
    path = run / "journal-00000001"
    content = bytearray(path.read_bytes())
    content[8:12] = number.to_bytes(4, "little")
    content[20:28] = wire.checksum(bytes(content[:20])).to_bytes(8, "little")
    path.write_bytes(content)


def with_checkpoint_format(run, number):
    for path in run.glob("checkpoint-*.json"):
        path.write_bytes(path.read_bytes().replace(b'{"format":%d' % checkpoint.FORMAT, b'{"format":%d' % number))


def with_state_format(run, number):
    for path in run.glob("checkpoint-*.json"):
        tensors = safetensors.numpy.load_file(path.with_suffix(".safetensors"))
        tensors[SCALARS][:2] = list(number.to_bytes(2, "big"))
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        for old in path, path.with_suffix(".safetensors"):
            old.unlink()
        CheckpointStore(FolderDisk(run), keep=9).write(manifest, tensors)


def with_record_format(run, number):
    table = json.loads((run / RECORD_FILE).read_bytes())
    (run / RECORD_FILE).write_text(json.dumps(table | {"format": number}))


NUMBERS = {
    "journal format": (with_journal_format, journal._FORMAT),
    "checkpoint format": (with_checkpoint_format, checkpoint.FORMAT),
    "state has format": (with_state_format, state_codec.FORMAT),
    "hub.json: has format": (with_record_format, RECORD_FORMAT),
}


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("what", NUMBERS)
def test_another_number_is_refused_in_a_line_with_both_numbers_and_a_remedy(run, what, step):
    change, number = NUMBERS[what]
    change(run, number + step)
    words = rf"{what} {number + step}, but this edgeasync reads format {number}[;:] use the version of edgeasync"
    with pytest.raises(StorageError, match=words) as refused:
        asyncio.run(make_hub(read_record(run)).run())
    assert "\n" not in str(refused.value)


def test_an_update_that_another_version_kept_is_put_aside_by_name(tmp_path):
    file = SpoolFile(tmp_path, STATE_ID)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PROTOCOL_VERSION", 99)
        file.write(make_spool())
    with pytest.raises(ProtocolError, match=r"another version of edgeasync wrote it \(got protocol version 99"):
        file.read()


# -- the rule --------------------------------------------------------------------------------------------------


def kept_version(path):
    """Return the number of a file that devices keep arrays in."""
    with safetensors.safe_open(path, framework="numpy") as file:
        return int(file.metadata()["format"].rpartition("-")[2])


def number_at(path):
    return int.from_bytes(path.read_bytes()[8:12], "little")


CHECKPOINTS = sorted(RUN.glob("checkpoint-*.safetensors"))


def scalars_of(path):
    return safetensors.numpy.load_file(path)[SCALARS].tobytes()


def test_the_files_have_the_numbers_that_are_written():
    assert number_at(RUN / "journal-00000001") == journal._FORMAT
    assert number_at(RUN / HISTORY_FILE) == HISTORY_FORMAT
    assert json.loads((RUN / RECORD_FILE).read_bytes())["format"] == RECORD_FORMAT
    assert json.loads((DEVICE / QUOTA_FILE).read_bytes())["format"] == QUOTA_FORMAT
    assert kept_version(DEVICE / SPOOL_FILE) == int(spool_file.SPOOL_FORMAT.rpartition("-")[2])
    assert kept_version(DEVICE / HELD_FILE) == int(spool_file.HELD_FORMAT.rpartition("-")[2])
    assert kept_version(DEVICE / LOCAL_FILE) == int(LOCAL_FORMAT.rpartition("-")[2])
    for path in CHECKPOINTS:
        assert json.loads(path.with_suffix(".json").read_bytes())["format"] == checkpoint.FORMAT
        assert int.from_bytes(scalars_of(path)[:2], "big") == state_codec.FORMAT


def test_a_state_is_written_as_it_was():
    assert CHECKPOINTS
    for path in CHECKPOINTS:
        scalars = decode_state(scalars_of(path), _Scalars)
        assert encode_state(scalars) == scalars_of(path)
        assert encode_state(decode_state(scalars.core, CoreState)) == scalars.core


def test_a_manifest_is_written_as_it_was():
    for path in CHECKPOINTS:
        content = path.with_suffix(".json").read_bytes()
        manifest = msgspec.json.decode(content, type=Manifest)
        assert msgspec.json.encode(manifest) == content
        assert json.loads(msgspec.json.encode(read_rules(manifest, path.stem).table())) == manifest.rules


def test_entries_are_written_as_they_were():
    found = set()
    for record in JournalReading(FolderDisk(RUN)).records():
        entry = read_entry(record.entry)
        assert msgspec.msgpack.encode(entry) == bytes(record.entry)
        found.add(type(event_of(entry)))
    assert found >= {HubReceived, PushArrived, Ticked}


def test_rows_of_the_history_are_written_as_they_were():
    content, place = (RUN / HISTORY_FILE).read_bytes(), len(FILE_HEADER)
    assert content[:place] == FILE_HEADER
    while place < len(content):
        end = place + 28 + int.from_bytes(content[place + 4 : place + 8], "little")
        body = zlib.decompress(content[place + 28 : end])
        assert msgspec.msgpack.encode(msgspec.msgpack.decode(body, type=list[Row])) == body
        place = end


def test_a_record_is_written_as_it_was(run):
    record = read_record(run)
    named = msgspec.structs.replace(record, hub=msgspec.structs.replace(record.hub, run=FilePath("/runs/first")))
    assert record_of(named) == (run / RECORD_FILE).read_bytes()


def test_the_examples_are_written_as_they_were(tmp_path):
    """A run twice the same; what a device keeps, and messages, as they are here."""
    written = []
    for folder in (tmp_path / "one", tmp_path / "other"):
        write(folder)
        files = (path for path in folder.rglob("*") if path.is_file())
        written.append({path.relative_to(folder): path.read_bytes() for path in files})
    assert written[0] == written[1]
    for path in (*DEVICE.iterdir(), FOLDER / "wire.json"):
        assert written[0][path.relative_to(FOLDER)] == path.read_bytes()
