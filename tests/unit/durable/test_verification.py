"""A run's folder is verified: its journal leads to its checkpoints, and the counts of updates agree."""

import shutil

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from edgeasync.core.arrays.state_codec import decode_state, encode_state
from edgeasync.core.recovery.state import SCALARS, CoreState, _Scalars
from edgeasync.durable.checkpoint import CheckpointStore, Manifest
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.run_replay import RunReplay
from edgeasync.durable.verification import verify_run
from edgeasync.errors import StorageError
from tests.support.formats.write_formats import FOLDER

FIRST, SECOND = [path.stem for path in sorted((FOLDER / "run").glob("checkpoint-*.json"))]
ENTRY = int(SECOND.split("-")[1])
"""The entry of the journal that the second covers."""


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(FOLDER / "run", tmp_path / "run")


def rewrite(run, name, change):
    """Change the arrays of a checkpoint, so that it is whole in itself."""
    manifest, tensors = (run / f"{name}{suffix}" for suffix in (".json", ".safetensors"))
    arrays = safetensors.numpy.load_file(tensors)
    change(arrays)
    described = msgspec.json.decode(manifest.read_bytes(), type=Manifest)
    for path in (manifest, tensors):
        path.unlink()
    assert CheckpointStore(FolderDisk(run), keep=9).write(described, arrays) == name


def in_core(change):
    """Return what changes the state of the core in the arrays."""

    def changed(arrays):
        scalars = decode_state(arrays[SCALARS].tobytes(), _Scalars)
        core = decode_state(scalars.core, CoreState)
        change(core)
        arrays[SCALARS] = np.frombuffer(
            encode_state(msgspec.structs.replace(scalars, core=encode_state(core))), np.uint8
        )

    return changed


def test_a_whole_run_is_verified(run):
    found, replay = verify_run(run), RunReplay(run)
    replay.tell(lambda _: True)
    replay.close()
    assert (found.compared, found.read) == ([SECOND], [FIRST])
    assert (found.entries, found.updates_applied) == (replay.last, replay.core.updates_applied)
    assert (found.version, found.unfinished_bytes) == (replay.core.version, 0)


def add_device(core):
    del core.members[-1]


def count_device(core):
    core.members[0].updates_applied += 1


def save(core):
    core.lifecycle.saved_updates += 1


def reject(core):
    core.policy_engine.updates_rejected += 1


CHANGES = {
    "core.members is": in_core(add_device),
    "core.members[0].updates_applied is": in_core(count_device),
    "core.lifecycle.saved_updates is": in_core(save),
    "core.policy_engine.updates_rejected is": in_core(reject),
    "array layer0.weight": lambda arrays: arrays["layer0.weight"].__setitem__(0, 7.0),
    "array published": lambda arrays: arrays["published"].__setitem__(0, 7.0),
    "array optimizer/0": lambda arrays: arrays["optimizer/0"].__setitem__(0, 7.0),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_checkpoint_with_another_state_is_named_with_the_first_difference(run, words):
    rewrite(run, SECOND, CHANGES[words])
    with pytest.raises(StorageError) as found:
        verify_run(run)
    assert f"{SECOND}: the journal leads to another state at entry {ENTRY}: {words}" in str(found.value)


def test_numbers_that_were_rounded_differently_are_the_same(run):
    def nudge(core):
        core.members[0].seen_s *= 1 + 1e-12

    rewrite(run, SECOND, in_core(nudge))
    assert verify_run(run).compared == [SECOND]


def test_counts_that_contradict_one_another_are_found(run):
    def answer(core):
        core.pushes.answered += 1

    rewrite(run, FIRST, in_core(answer))
    (run / f"{SECOND}.json").unlink()
    with pytest.raises(StorageError, match=r"inconsistent counts at entry \d+: .* pushes were answered, but"):
        verify_run(run)


@pytest.mark.parametrize("name", [FIRST, SECOND])
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_damaged_checkpoint_is_found_wherever_it_is(run, name, suffix):
    content = bytearray((run / f"{name}{suffix}").read_bytes())
    content[len(content) // 2] ^= 1
    (run / f"{name}{suffix}").write_bytes(content)
    with pytest.raises(StorageError, match=name):
        verify_run(run)


def test_a_damaged_journal_is_found(run):
    content = bytearray((run / "journal-00000001").read_bytes())
    content[len(content) // 2] ^= 1
    (run / "journal-00000001").write_bytes(content)
    with pytest.raises(StorageError, match="journal-00000001: damaged at byte"):
        verify_run(run)
