"""`edgeasync replay`, `runs` and `hub --resume`: what a run's folder tells, and how a hub resumes it."""

import json
import shutil
import signal

import pytest
import safetensors

from edgeasync.durable.direct_file import BLOCK_BYTES
from edgeasync.durable.run_folder import MODEL_FILE
from edgeasync.durable.run_replay import RunReplay
from edgeasync.graphs.model_file import load_model
from edgeasync.protocol.wire import checksum
from tests.support.programs.command_line import CONFIG, FILES, mistake
from tests.support.programs.processes import LIVELINESS, MODEL, Commands, status_when, trained

pytestmark = pytest.mark.process

OFTEN = LIVELINESS + '[evaluation]\nevery = "10 updates"\n'


def story(commands, *arguments):
    """Return the objects that a replay prints."""
    told = commands.run("replay", *arguments, "--json")
    assert (told.returncode, told.stderr) == (0, ""), told.stderr
    return [json.loads(line) for line in told.stdout.splitlines()]


def listed(commands, *arguments):
    told = commands.run("runs", *arguments, "--json")
    assert (told.returncode, told.stderr) == (0, ""), told.stderr
    return {run["name"]: run for run in map(json.loads, told.stdout.splitlines())}


def xxh3(path):
    return f"{checksum(load_model(path, MODEL.spec)[0].data):016x}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that was ended by a person, and what its hub said last."""
    with Commands(tmp_path_factory.mktemp("finished")) as commands:
        hub, address = commands.hub(commands.settings(more=OFTEN))
        for name in ("first", "second"):
            commands.agent(address, name)
        for name in ("first", "second"):
            trained(address, 10, name)
        hub.signal(signal.SIGTERM)
        assert hub.wait() == 0, str(hub)
        yield commands, hub.wait_for("stopped")


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """A run whose hub was killed, resumed with the same settings, and killed again."""
    with Commands(tmp_path_factory.mktemp("crashed")) as commands:
        hub, address = commands.hub(commands.settings(more=OFTEN))
        commands.agent(address, "first")
        trained(address, 10)
        commands.live = (commands.run("replay", "run-hub", "--json"), listed(commands, "."))
        before = trained(address, 1)
        hub.kill()
        commands.begun = commands.folder / "begun"
        shutil.copytree(commands.folder / "run-hub", commands.begun)
        (commands.folder / "hub.toml").unlink()
        hub = commands.start("hub", "--resume", "run-hub", "--bind", address, "--json")
        hub.wait_for("resumed")
        after = status_when(address, lambda status: status["updates_applied"] > before["updates_applied"] + 10)
        hub.kill()
        commands.before, commands.after = before, after
        yield commands


# -- replay ----------------------------------------------------------------------------------------------------


def test_the_story_agrees_with_what_the_hub_said(finished):
    commands, stopped = finished
    beginning, *lines, summary = story(commands, "run-hub")
    assert (beginning["event"], beginning["entry"], beginning["version"]) == ("begins", 0, 0)
    updates = [line for line in lines if line["event"] == "update"]
    counted = [line for line in updates if line["outcome"] in ("applied", "buffered")]
    assert len(counted) == summary["updates_applied"] == stopped["updates_applied"]
    for line in counted:
        assert line["device"] in ("first", "second")
        assert line["base_lineage"] == beginning["lineage"]
        assert line["norm"] > 0
        assert line["version"] - line["base"] >= line["staleness"] >= 0
        assert line["local_steps"] >= 1
    assert [line["outcome"] for line in updates].count("rejected") == stopped["updates_rejected"]
    assert summary["version"] == stopped["version"]
    assert summary["best"] == stopped["best"]
    assert {line["device"] for line in lines if line["event"] == "joined"} == {"first", "second"}
    assert [line["event"] for line in lines].count("stopping") == 1
    assert [line["version"] for line in lines if line["event"] == "evaluated"]
    entries = [line["entry"] for line in lines]
    assert entries == sorted(entries)
    for device in summary["devices"]:
        own = [line["seq"] for line in counted if line["device"] == device["id"]]
        assert own == list(range(1, device["seq_last"] + 1))
        assert device["updates_applied"] == len(own)
    assert summary["model_xxh3"] == xxh3(commands.folder / "run-hub" / MODEL_FILE)


def test_a_part_of_the_story_leads_to_the_model_that_was_there(finished):
    commands, _ = finished
    lines = [line for line in story(commands, "run-hub") if line["event"] == "evaluated"]
    wanted = lines[1]
    *_, summary = story(commands, "run-hub", "--until", wanted["entry"], "--export", "then.safetensors")
    models = {}
    whole = RunReplay(commands.folder / "run-hub")
    try:
        whole.tell(lambda line: models.setdefault(line.entry, checksum(whole.snapshot.vector.data)) is not None)
    finally:
        whole.close()
    exported = commands.folder / "then.safetensors"
    assert xxh3(exported) == summary["model_xxh3"] == f"{models[wanted['entry']]:016x}"
    assert (summary["entry"], load_model(exported, MODEL.spec)[1]) == (wanted["entry"], summary["version"])
    with safetensors.safe_open(exported, framework="numpy") as file:
        assert file.metadata()["loss"] == repr(wanted["loss"])
    assert len(set(models.values())) > 5


def test_what_people_read(finished):
    commands, stopped = finished
    told = commands.run("replay", "run-hub")
    assert (told.returncode, told.stderr) == (0, "")
    first, *_, last = told.stdout.splitlines()
    assert first.startswith("from checkpoint-0000000000-0: entry 0, version 0")
    assert "seq_last" not in last
    assert f"updates: {stopped['updates_applied']} applied" in told.stdout
    for words in ("first seq 1,", "second seq 1,", "joined", "evaluated", "staleness 0", "the best so far"):
        assert words in told.stdout


def test_a_run_is_replayed_while_its_hub_is_at_work(crashed):
    told, runs = crashed.live
    assert (told.returncode, told.stderr) == (0, "")
    summary = json.loads(told.stdout.splitlines()[-1])
    assert 10 <= summary["updates_applied"] <= crashed.before["updates_applied"]
    assert runs["run-hub"]["in_use"]


def test_every_start_is_in_the_story(crashed):
    beginning, *lines, summary = story(crashed, "run-hub")
    assert beginning["entry"] == 0
    (resumed,) = [line for line in lines if line["event"] == "resumed"]
    assert resumed["lineage"] == summary["lineage"] == crashed.after["lineage"] != beginning["lineage"]
    # Who asked saw what was in memory; of each device, at most one update had not reached the disk.
    unwritten = len(crashed.after["devices"])
    assert resumed["version"] + unwritten >= crashed.before["version"]
    assert summary["updates_applied"] + unwritten >= crashed.after["updates_applied"]
    assert summary["updates_applied"] > crashed.before["updates_applied"]
    assert [line["event"] for line in lines].count("update") == summary["updates_applied"] + sum(
        line["event"] == "update" and line["outcome"] not in ("applied", "buffered") for line in lines
    ) + summary["updates_buffered"]  # fmt: skip


def damage(commands, name):
    """Copy the run, with a bit flipped in the middle of its first segment's records; return the copy."""
    copy = commands.folder / name
    shutil.copytree(commands.folder / "run-hub", copy)
    path = min(copy.glob("journal-*"))
    content = bytearray(path.read_bytes())
    # Zeros fill up the last block: the middle of the file may be in the last record, whose damage
    # would look like a torn write.
    records_end = len(content.rstrip(b"\0"))
    content[records_end // 2] ^= 1
    path.write_bytes(content)
    return copy


def test_a_damaged_journal_is_told_up_to_there(crashed):
    copy = damage(crashed, "damaged")
    whole = story(crashed, "run-hub")
    told = crashed.run("replay", copy, "--from", "checkpoint-0000000000-0", "--json")
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert 5 < len(lines) < len(whole)
    assert lines == whole[: len(lines)]
    assert told.returncode == FILES
    (line,) = told.stderr.splitlines()
    assert "is damaged at byte" in line

    # By itself it begins behind that, where a checkpoint bridges it.
    beginning, *_, summary = story(crashed, copy)
    assert beginning["entry"] > 0
    assert "is damaged at byte" in beginning["remarks"][0]
    assert summary == whole[-1]
    *_, summary = story(crashed, copy, "--until", "5")
    assert summary["entry"] == 5


def test_an_unfinished_write_is_normal(crashed):
    copy = crashed.folder / "torn"
    shutil.copytree(crashed.folder / "run-hub", copy)
    last = max(copy.glob("journal-*"))
    content = last.read_bytes()
    last.write_bytes(content + bytes(7))
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    *_, summary = story(crashed, copy)
    padding = summary["unfinished_bytes"] - 7  # of the last block, which a kill leaves
    assert 0 <= padding < BLOCK_BYTES
    assert content.endswith(bytes(padding))
    assert "unfinished write" in crashed.run("replay", copy).stdout
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


def test_replays_that_cannot_be(finished):
    commands, _ = finished
    (commands.folder / "empty").mkdir(exist_ok=True)
    mistake(commands, FILES, "nowhere", "no such folder", arguments=["replay", "nowhere"])
    mistake(commands, FILES, "empty", "no checkpoint; pass the folder", arguments=["replay", "empty"])
    arguments = ["replay", "run-hub", "--from", "checkpoint-0000000007-3"]
    mistake(commands, FILES, "no such checkpoint", "checkpoint-0000000000-0", arguments=arguments)
    mistake(
        commands,
        CONFIG,
        "--until 99999",
        "the journal ends at entry",
        arguments=["replay", "run-hub", "--until", "99999"],
    )
    newest = max((commands.folder / "run-hub").glob("checkpoint-*.json")).stem
    arguments = ["replay", "run-hub", "--until", "3", "--from", newest]
    mistake(commands, CONFIG, "--until 3", "choose an older checkpoint", arguments=arguments)
    (commands.folder / "file").write_text("")
    arguments = ["replay", "run-hub", "--export", "file/model.safetensors"]
    mistake(commands, FILES, "cannot be written", arguments=arguments)


# -- runs ------------------------------------------------------------------------------------------------------


def test_runs_are_listed(finished):
    commands, stopped = finished
    run = listed(commands, ".")["run-hub"]
    assert (run["version"], run["updates_applied"]) == (stopped["version"], stopped["updates_applied"])
    assert run["checkpoints"] == 2
    assert run["journal_bytes"] > 0
    assert run["best"]["loss"] <= run["newest"]["loss"]
    assert (run["in_use"], run["trouble"]) == (False, [])
    told = commands.run("runs", ".")
    assert (told.returncode, told.stderr) == (0, "")
    header, line = told.stdout.splitlines()
    assert header.split()[:4] == ["run", "version", "updates", "lineage"]
    assert line.startswith("run-hub")


def test_the_checkpoints_of_a_run_are_listed_by_name(finished):
    commands, _ = finished
    run = commands.folder / "run-hub"
    told = commands.run("runs", run, "--json")
    assert (told.returncode, told.stderr) == (0, "")
    found = [json.loads(line) for line in told.stdout.splitlines()]
    names = sorted((path.stem for path in run.glob("checkpoint-*.json")), reverse=True)
    assert [one["checkpoint"] for one in found] == names
    newest = listed(commands, commands.folder)["run-hub"]["newest"]
    assert newest.items() <= found[0].items()
    assert not any(one["trouble"] for one in found)
    header, *lines = commands.run("runs", run).stdout.splitlines()
    assert header.split()[0] == "checkpoint"
    assert [line.split()[0] for line in lines] == names


def test_a_run_is_listed_as_what_its_journal_leads_to(crashed):
    """A copy made at work has no checkpoint but that of version 0; a killed hub has left its newest one behind."""
    for folder in (crashed.begun, crashed.folder / "run-hub"):
        run = listed(crashed, crashed.folder)[folder.name]
        *_, summary = story(crashed, folder)
        names = ("version", "updates_applied", "lineage")
        assert [run[name] for name in names] == [summary[name] for name in names]
        assert run["trouble"] == []
    begun = listed(crashed, crashed.folder)["begun"]
    assert begun["version"] > begun["newest"]["version"] == 0


def test_what_is_wrong_with_runs_is_listed(crashed):
    folder = crashed.folder / "sick"
    for name in ("no-arrays", "cut", "no-checkpoint", "no-manifest"):
        shutil.copytree(crashed.folder / "run-hub", folder / name)
    (folder / "no run").mkdir()
    newest = max((crashed.folder / "run-hub").glob("checkpoint-*.json")).stem
    (folder / "no-arrays" / f"{newest}.safetensors").unlink()
    (folder / "cut" / f"{newest}.safetensors").write_bytes(b"x")
    for path in (folder / "no-checkpoint").glob("checkpoint-*"):
        path.unlink()
    (folder / "no-manifest" / f"{newest}.json").write_bytes(b"{}")
    found = listed(crashed, folder)
    assert set(found) == {"no-arrays", "cut", "no-checkpoint", "no-manifest"}
    assert "arrays are missing" in found["no-arrays"]["trouble"][0]
    assert "has 1 bytes" in found["cut"]["trouble"][0]
    assert "no checkpoint" in found["no-checkpoint"]["trouble"][0]
    assert "damaged" in found["no-manifest"]["trouble"][0]
    assert f"cut: {newest}" in crashed.run("runs", folder).stdout
    (one,) = [
        line for line in crashed.run("runs", folder / "no-manifest").stdout.splitlines() if "damaged" in line
    ]
    assert one.startswith("checkpoint-")
    assert crashed.run("runs", folder / "no run").stdout.startswith("no runs in ")
    mistake(crashed, FILES, "nowhere", "no such folder", arguments=["runs", "nowhere"])


# -- resume ----------------------------------------------------------------------------------------------------


def test_a_run_that_was_moved_is_gone_on_with(crashed):
    """From elsewhere, and from the best checkpoint, without a settings file."""
    moved = crashed.folder / "moved" / "away"
    shutil.copytree(crashed.begun, moved)
    newest, version = max(moved.glob("checkpoint-*.json")).stem, 0
    flags = ["--resume", moved, "--bind", "tcp://127.0.0.1:*", "--json"]
    hub = crashed.start("hub", *flags, "--recovery", newest, "--durability", "checkpoint")
    assert f"version {version}, from {newest}" in hub.wait_for("resumed")["detail"]
    address = hub.wait_for("listening")["detail"]
    status = status_when(address, lambda status: status["durability"] == "checkpoint")
    assert status["model_file"] == str(moved / MODEL_FILE)
    hub.signal(signal.SIGTERM)
    assert hub.wait() == 0, str(hub)
    kept = json.loads((moved / "hub.json").read_text())
    assert kept["hub"]["run"] == str(moved)
    assert kept["checkpoint"]["recovery"] == "latest"


def test_a_replay_exports_into_no_file_of_the_run_that_it_reads(crashed):
    run = crashed.folder / "run-hub"
    before = {path: path.read_bytes() for path in run.iterdir()}
    for name in ("new.safetensors", MODEL_FILE, next(run.glob("checkpoint-*.safetensors")).name):
        place = f"run-hub/{name}"
        arguments = ["replay", "run-hub", "--until", 5, "--export", place]
        mistake(crashed, CONFIG, f"--export {place}: is inside the input folder run-hub", arguments=arguments)
    arguments = ["replay", "run-hub", "--export", "then.onnx"]
    mistake(crashed, CONFIG, "--export then.onnx: the file name must end in .safetensors", arguments=arguments)
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_runs_that_cannot_be_gone_on_with(crashed):
    empty = crashed.folder / "nothing"
    empty.mkdir(exist_ok=True)
    unknown = crashed.folder / "unknown"
    shutil.copytree(crashed.begun, unknown)
    (unknown / "hub.json").unlink()
    run, settings = crashed.begun, crashed.settings(name="other")
    mistake(crashed, FILES, "nowhere", "no such folder", arguments=["hub", "--resume", "nowhere"])
    mistake(
        crashed,
        FILES,
        "no checkpoint to resume from",
        "edgeasync hub CONFIG",
        arguments=["hub", "--resume", empty],
    )
    mistake(crashed, FILES, "hub.json", "no such file", arguments=["hub", "--resume", unknown])
    for more, removed in (
        ([settings], "the settings file"),
        (["--model", "m.onnx", "--run", "elsewhere"], "--model, --run"),
        (["--lora", "4", "--base", "int4"], "--lora, --base"),
    ):
        mistake(crashed, CONFIG, "--resume", f"remove {removed}.", arguments=["hub", "--resume", run, *more])
    arguments = ["hub", "--resume", run, "--bind", "tcp://127.0.0.1:*", "--recovery", "yesterday"]
    mistake(crashed, FILES, "yesterday", "no such checkpoint", arguments=arguments)
    arguments = ["hub", "--resume", run, "--durability", "wishful"]
    mistake(crashed, CONFIG, "durability", "wishful", arguments=arguments)
