"""Checkpoints: whole or not there after a crash at any operation, checked on load, the newest and best kept."""

import math

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.durable.checkpoint import FORMAT, CheckpointStore, Manifest
from edgeasync.durable.disk import FolderDisk
from edgeasync.errors import ModelMismatchError, StorageError
from tests.support.parts.failing_disk import FailingDisk
from tests.support.parts.tensors import TENSORS, same

MODEL = "a" * 32


def manifest(journal, version=1, **changes):
    fields = {"software": "0.1.0", "fingerprint": MODEL, "lineage": "b" * 32, "now_s": 1.5, "updates_applied": 4}
    return Manifest(**fields | {"created_s": 2e9, "journal": journal, "version": version} | changes)


def stored(*manifests, keep=10):
    disk = FailingDisk()
    store = CheckpointStore(disk, keep)
    return disk, store, [store.write(each, TENSORS) for each in manifests]


def chosen(disk, recovery="latest"):
    return CheckpointStore(disk, 3).choose(recovery, MODEL)


@pytest.mark.parametrize(("name", "tensor"), [("x", np.zeros(1)), ("__metadata__", np.zeros(1, np.float32))])
def test_other_arrays_are_refused_before_anything_is_written(name, tensor):
    disk = FailingDisk()
    with pytest.raises(ValueError, match="can be stored"):
        CheckpointStore(disk, 1).write(manifest(1), {name: tensor})
    assert not disk.operations


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    store = CheckpointStore(FolderDisk(tmp_path), 2)
    weight = np.random.default_rng(0).random(700_000, np.float32)
    name = store.write(manifest(12, 5, accuracy=1, loss=math.nan), TENSORS | {"large": weight})
    assert name == "checkpoint-0000000012-5"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.json", f"{name}.safetensors"]
    assert same(safetensors.numpy.load_file(tmp_path / f"{name}.safetensors"), TENSORS | {"large": weight})
    found, tensors = store.load(name, MODEL)
    assert (found.journal, found.version, found.accuracy, found.loss, found.format) == (12, 5, 1.0, None, FORMAT)
    assert found.nbytes == (tmp_path / f"{name}.safetensors").stat().st_size
    assert same(tensors, TENSORS | {"large": weight})
    assert store.manifests() == ([(name, found)], [])


def test_there_may_be_none():
    assert chosen(FailingDisk()) is None
    assert chosen(FailingDisk(), "best") is None
    assert CheckpointStore(FailingDisk(), 1).covered(MODEL) == 0
    with pytest.raises(StorageError, match=r'mine: no such checkpoint; choose "latest", "best" or one of: none'):
        chosen(FailingDisk(), "mine")


def test_the_highest_journal_number_is_the_newest_whatever_the_clock_said():
    disk, store, _ = stored(
        manifest(9, 30, created_s=3.0),
        manifest(10_000_000_000, 4, created_s=1.0),
        manifest(100, 31, created_s=2.0),
    )
    assert [found.journal for _, found in store.manifests()[0]] == [10_000_000_000, 100, 9]
    assert chosen(disk).manifest.journal == 10_000_000_000


def test_a_second_checkpoint_of_the_same_moment_has_another_name():
    disk, _, names = stored(manifest(7, 2, now_s=1.0), manifest(7, 2, now_s=2.0), manifest(7, 2, now_s=3.0))
    assert names == ["checkpoint-0000000007-2", "checkpoint-0000000007-2-2", "checkpoint-0000000007-2-3"]
    assert chosen(disk).manifest.now_s == 3.0


def test_the_newest_and_the_best_are_kept():
    disk, store, names = stored(
        manifest(1, accuracy=0.9), manifest(2, accuracy=0.8), manifest(3), manifest(4, loss=0.01), keep=2
    )
    kept = [names[3], names[2], names[0]]
    assert [name for name, _ in store.manifests()[0]] == kept
    assert sorted(disk.files) == sorted(f"{name}.{kind}" for name in kept for kind in ("json", "safetensors"))
    assert chosen(disk, "best").name == names[0]
    assert chosen(disk, names[2]).manifest.journal == 3


def test_without_an_accuracy_the_lowest_loss_is_the_best():
    disk, _, names = stored(
        manifest(1, loss=0.5), manifest(2, loss=0.2), manifest(3, loss=0.3), manifest(4), keep=1
    )
    assert chosen(disk, "best").name == names[1]
    assert chosen(disk, "best").skipped == []


def test_where_none_was_evaluated_the_latest_is_the_best():
    disk, _, names = stored(manifest(1), manifest(2))
    found = chosen(disk, "best")
    assert found.name == names[1]
    assert found.skipped == [
        f"{names[1]}: no usable checkpoint was evaluated, so the latest is used instead of the best"
    ]


def test_the_journal_is_needed_from_the_newest_checkpoint_but_one():
    disk, store, _ = stored(manifest(10), keep=2)
    assert store.covered(MODEL) == 0
    store.write(manifest(20), TENSORS)
    store.write(manifest(30), TENSORS)
    assert store.covered(MODEL) == 20
    assert CheckpointStore(disk, 1).covered(MODEL) == 30
    assert store.covered("c" * 32) == 0


def test_one_known_to_be_damaged_does_not_count_as_kept():
    disk, store, names = stored(manifest(10), manifest(20), keep=2)
    disk.files[f"{names[1]}.safetensors"].live[-1] ^= 1
    assert store.choose("latest", MODEL).name == names[0]
    store.write(manifest(30), TENSORS)
    assert store.covered(MODEL) == 10
    assert names[0] in dict(store.manifests()[0])
    store.write(manifest(40), TENSORS)
    assert [found.journal for _, found in store.manifests()[0]] == [40, 30]


@given(
    st.sampled_from(["json", "safetensors"]), st.sampled_from(["truncate", "flip", "zero", "remove"]), st.data()
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(kind, how, data):
    disk, _, (old, new) = stored(manifest(1), manifest(2, 7, accuracy=0.5, loss=1.25))
    file_name = f"{new}.{kind}"
    content = disk.files[file_name].live
    position = data.draw(st.integers(0, len(content) - 1))
    if how == "truncate":
        del content[position:]
    elif how == "flip":
        content[position] ^= data.draw(st.integers(1, 255))
    elif how == "zero":
        before = bytes(content)
        content[position:] = bytes(len(content) - position)
        if content == before:
            return
    else:
        del disk.files[file_name]
    found = chosen(disk)
    assert found.name == old
    assert same(found.tensors, TENSORS)
    if (kind, how) != ("json", "remove"):  # a crash looks the same
        assert len(found.skipped) == 1
        assert found.skipped[0].startswith(new)
        with pytest.raises(StorageError, match=new):
            chosen(disk, new)


def test_wreckage_is_not_taken_for_an_empty_folder():
    disk, _, (name,) = stored(manifest(1))
    disk.files[f"{name}.json"].live[:] = b"[" * 10_000
    with pytest.raises(StorageError, match=f"no checkpoint can be used: {name}.json: damaged"):
        chosen(disk)


def test_another_models_checkpoint_is_named_and_left_alone():
    disk, store, names = stored(manifest(1), keep=1)
    other = CheckpointStore(disk, 1)
    with pytest.raises(ModelMismatchError, match=f"{names[0]}: belongs to another model"):
        other.choose("latest", "c" * 32)
    with pytest.raises(ModelMismatchError, match=f"{names[0]}: belongs to another model"):
        other.choose(names[0], "c" * 32)
    name = other.write(manifest(2, fingerprint="c" * 32), TENSORS)
    assert [found for found, _ in store.manifests()[0]] == [name, names[0]]
    assert chosen(disk).skipped[0].startswith(f"{name}: belongs to another model (cccc")


def test_a_run_of_another_model_is_refused_in_one_sentence():
    _, store, names = stored(manifest(1), manifest(2), manifest(3), keep=3)
    told = (
        rf"^{names[-1]}: belongs to another model \(\w+, not c{{32}}\); use the run's original model and the same"
    )
    with pytest.raises(ModelMismatchError, match=told) as caught:
        store.choose("latest", "c" * 32)
    assert str(caught.value).count("belongs to another model") == 1


def test_a_manifest_under_anothers_name_is_damaged():
    disk, _, (old, new) = stored(manifest(1), manifest(2))
    disk.files[f"{new}.json"] = disk.files[f"{old}.json"]
    assert chosen(disk).name == old


def operations_of_a_write():
    disk, store, _ = stored(manifest(1, accuracy=0.9), manifest(2), keep=1)
    before = disk.operations
    store.write(manifest(3), TENSORS)
    return disk.operations - before


@pytest.mark.parametrize("operation", range(operations_of_a_write()))
@pytest.mark.parametrize(
    "crash",
    [
        {"power_cut": False},
        *(
            {"power_cut": True, "torn": torn, "names_kept": names_kept}
            for torn in (0, 50, 10**6)
            for names_kept in (None, "", ".json", ".safetensors")
        ),
    ],
)
@pytest.mark.parametrize("same_moment", [True, False])
def test_a_crash_at_any_operation_leaves_the_old_or_the_new_one(operation, crash, same_moment):
    disk, store, (best, old) = stored(manifest(1, accuracy=0.9), manifest(2, now_s=1.0), keep=1)
    after = {name: tensor + 1 for name, tensor in TENSORS.items()}
    disk.fail(operation, for_good=True)
    with pytest.raises(OSError, match="Input/output"):
        store.write(manifest(2 if same_moment else 3, now_s=2.0), after)
    found_disk = disk.after_crash(**crash)
    found = chosen(found_disk)
    assert same(found.tensors, TENSORS if found.name == old else after)
    assert found.manifest.now_s == (1.0 if found.name == old else 2.0)
    assert found.skipped == []
    assert chosen(found_disk, "best").name == best
    next_store = CheckpointStore(found_disk, 1)
    last = next_store.write(manifest(4), TENSORS)
    kept = sorted(f"{name}.{kind}" for name in (best, last) for kind in ("json", "safetensors"))
    assert sorted(found_disk.files) == kept


@pytest.mark.parametrize("names_kept", [None, "", ".json", ".safetensors"])
def test_a_written_checkpoint_outlives_a_power_cut_and_no_removed_one_does_by_half(names_kept):
    disk, _, names = stored(manifest(1), manifest(2), manifest(3), keep=1)
    found = disk.after_crash(power_cut=True, names_kept=names_kept)
    assert chosen(found).name == names[-1]
    for name, _ in CheckpointStore(found, 1).manifests()[0]:
        assert chosen(found, name).skipped == []


@pytest.mark.parametrize("operation", range(operations_of_a_write()))
def test_a_failed_write_leaves_no_halves_on_a_full_disk(operation):
    disk, store, _ = stored(manifest(1), manifest(2), keep=2)
    disk.fail(operation)
    try:
        store.write(manifest(3), TENSORS)
    except OSError:
        whole = {name.removesuffix(".json") for name in disk.files if name.endswith(".json")}
        assert len(disk.files) in {2 * len(whole), 2 * len(whole) + 1}
    disk.fail_at = None
    assert chosen(disk).skipped == []
    store.write(manifest(4), TENSORS)
    assert len(disk.files) == 4


@pytest.mark.parametrize("operation", range(3))
def test_a_disk_that_cannot_be_read_is_a_storage_error(operation):
    disk, _, _ = stored(manifest(1))
    disk.fail(operation)
    with pytest.raises(StorageError, match="cannot be read"):
        chosen(disk)
