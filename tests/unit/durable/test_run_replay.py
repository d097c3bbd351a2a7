"""Where the story of a run begins, of folders made by hand; `edgeasync replay` is tested with real runs."""

import numpy as np
import pytest

from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.arrays.published_model import Publisher
from edgeasync.core.hub.events import Resumed
from edgeasync.core.hub.settings import HubCoreSettings, StopCondition
from edgeasync.core.recovery.log import write_entry
from edgeasync.core.recovery.state import capture
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.recovery import Rules
from edgeasync.durable.run_replay import RunReplay
from edgeasync.errors import ConfigError, StorageError
from edgeasync.policies.policy import Policy
from tests.support.parts.runs import RULES, SPEC, open_run


def start(path, rules=RULES):
    """Open a run as a hub does."""
    return open_run(FolderDisk(path), rules, lineage="0" * 16)


def go_on(run, lineages):
    """Journal starts of a hub: events that need no device."""
    writer = run.journal
    for lineage in lineages:
        event = Resumed(lineage)
        run.core.handle(event, 1.0)
        writer.append([(write_entry(event, 1.0, [], run.core.version, b""), None)])
    writer.close()
    return writer.next_number - 1


def told(path, **options):
    """Return the lineages that a story tells of, its remarks and its end."""
    replay, lines = RunReplay(path, **options), []
    try:
        replay.tell(lambda line: lines.append(line) is None)
        return [line.lineage[0] for line in lines], replay.remarks, replay.summary()
    finally:
        replay.close()


def lineages(letters):
    return [letter * 16 for letter in letters]


def test_a_branch_begins_the_story_anew_and_the_earlier_part_can_still_be_told(tmp_path):
    assert go_on(start(tmp_path), lineages("abc")) == 3
    stop = StopCondition(updates=7)
    other = Rules(SPEC, Policy(), HubCoreSettings(stop=stop))
    assert go_on(start(tmp_path, other), lineages("de")) == 6, "number 4 is the branch's checkpoint's"
    found, remarks, summary = told(tmp_path)
    assert (found, summary.entry, summary.lineage) == (["d", "e"], 6, "e" * 16)
    (remark,) = remarks
    assert remark.startswith(
        "use --until 3 to replay an earlier part, from entry 0 on; it ends there: the hub then resumed from "
    )
    found, remarks, summary = told(tmp_path, until=3)
    assert (found, remarks, summary.lineage) == (["a", "b", "c"], [], "c" * 16)
    assert told(tmp_path, until=0)[0] == []
    with pytest.raises(ConfigError, match="the journal ends at entry 6"):
        RunReplay(tmp_path, until=7)


def test_of_one_number_the_journal_follows_the_newest_checkpoint(tmp_path):
    run = start(tmp_path)
    core, model = run.core, HubModel(SPEC, np.ones(3, np.float32), 5, RULES.policy)
    core.policy_engine.state.version = 5
    run.save(capture(core, model, Publisher(SPEC, model, RULES.settings.codec), 0, 2.0), 0.0)
    again = start(tmp_path)
    assert again.core.version == 5
    go_on(again, lineages("a"))
    replay = RunReplay(tmp_path)
    replay.close()
    assert (replay.beginning.entry, replay.beginning.version) == (0, 5)
    assert told(tmp_path)[0] == ["a"]


def test_what_was_dropped_is_gone(tmp_path):
    run = start(tmp_path)
    last = go_on(run, lineages("ab"))
    run.save(capture(run.core, run.model, run.publisher, last, 2.0), 0.0)
    (segment,) = tmp_path.glob("journal-*")
    segment.unlink()
    found, remarks, summary = told(tmp_path)
    assert (found, remarks, summary.entry) == ([], [], 2)
    with pytest.raises(ConfigError, match="no longer contains that entry; use a number from 2 to"):
        RunReplay(tmp_path, until=1)


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    run = start(tmp_path)
    last = go_on(run, lineages("ab"))
    run.save(capture(run.core, run.model, run.publisher, last, 2.0), 0.0)
    first = tmp_path / "checkpoint-0000000000-0.safetensors"
    first.write_bytes(first.read_bytes()[:-1])
    found, remarks, summary = told(tmp_path)
    assert (found, summary.entry) == ([], 2)
    assert "checkpoint-0000000000-0.safetensors: has" in remarks[0]
    with pytest.raises(StorageError, match=r"has \d+ bytes, expected"):
        RunReplay(tmp_path, checkpoint="checkpoint-0000000000-0")


def test_another_end_of_training_is_not_reached_yet(tmp_path):
    """A run that ended by its accuracy continues when a higher one is asked for."""
    run = start(tmp_path)
    run.core.policy_engine.state.evaluations.reached = "accuracy 91% is at least 90%"
    run.save(capture(run.core, run.model, run.publisher, 0, 2.0), 0.0)
    assert start(tmp_path).core.policy_engine.state.evaluations.reached
    more = Rules(SPEC, Policy(), HubCoreSettings(stop=StopCondition(loss=0.1)))
    assert not start(tmp_path, more).core.policy_engine.state.evaluations.reached
