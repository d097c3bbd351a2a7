"""Arrays that stay on a device: in the model while the trainer runs, on disk between two starts."""

import numpy as np
import pytest

from edgeasync.durable.local_file import LOCAL_FILE, LocalFile
from edgeasync.errors import ConfigError, ProtocolError, StorageError
from edgeasync.host.disk_watch import DiskWatch
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.training.local_parameters import LocalParameters, choose_local, hubs_patterns

SPEC = ParameterSpec((Parameter("body", (4,)), Parameter("head.w", (2, 2)), Parameter("head.b", (2,))))
STATE_ID = "5" * 32
HUBS = {"model": {"local": ["head.*"]}}
OWN = {"head.w": np.arange(4, dtype=np.float32).reshape(2, 2), "head.b": np.array([7.0, -7.0], np.float32)}


@pytest.fixture
def file(tmp_path):
    return LocalFile(tmp_path, STATE_ID)


def begun(file, settings=HUBS, spec=SPEC, patterns=()):
    """Return local parameters that have begun, and what they warned of."""
    told = []
    local = LocalParameters(patterns, None if file is None else lambda: file)
    local.begin(spec, settings, told.append)
    return local, told


def train(local, parameters, **values):
    with local.in_place(parameters):
        before = {name: array.copy() for name, array in SPEC.views(parameters).items()}
        for name, value in values.items():
            SPEC.views(parameters)[name.replace("_", ".")][:] = value
    return before


def test_the_hubs_values_are_there_but_while_the_trainer_runs(file):
    local, told = begun(file)
    parameters = np.ones(10, np.float32)
    assert (train(local, parameters, body=2.0, head_w=3.0, head_b=4.0)["head.w"] == 1.0).all()
    assert parameters.tolist() == [2.0] * 4 + [1.0] * 6
    parameters[:] = 9.0
    before = train(local, parameters, body=5.0)
    assert (before["head.w"] == 3.0).all()
    assert (before["head.b"] == 4.0).all()
    assert parameters.tolist() == [5.0] * 4 + [9.0] * 6
    copy = np.zeros(10, np.float32)
    local.overlay(copy)
    assert copy.tolist() == [0.0] * 4 + [3.0] * 4 + [4.0] * 2
    local.keep()
    again, _ = begun(file)
    assert (train(again, parameters)["head.b"] == 4.0).all()
    assert told == []


def test_values_that_are_not_finite_are_not_kept():
    local, _ = begun(None)
    parameters = np.ones(10, np.float32)
    train(local, parameters, head_w=3.0)
    train(local, parameters, head_w=np.nan)
    assert (train(local, parameters)["head.w"] == 3.0).all()
    assert np.isfinite(parameters).all()


def test_a_trainer_that_fails_leaves_the_hubs_values():
    local, _ = begun(None)
    parameters = np.ones(10, np.float32)

    def fail():
        with local.in_place(parameters):
            parameters[:] = 3.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert parameters[4:].tolist() == [1.0] * 6


def test_without_patterns_nothing_is_touched(tmp_path):
    def never():
        raise AssertionError("no file is opened")

    local = LocalParameters((), never)
    local.begin(SPEC, {}, never)
    parameters = np.ones(10, np.float32)
    assert (train(local, parameters, body=2.0, head_w=3.0)["head.w"] == 1.0).all()
    local.keep()
    assert parameters.tolist() == [2.0] * 4 + [3.0] * 4 + [1.0] * 2


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (
            {**OWN, "head.w": np.zeros((3, 3), np.float32)},
            "contains arrays that do not match the local parameters",
        ),
        ({"head.b": OWN["head.b"]}, "contains arrays that do not match the local parameters"),
        ({**OWN, "body": np.zeros(4, np.float32)}, "contains arrays that do not match the local parameters"),
        ({**OWN, "head.w": np.zeros((2, 2))}, "by another version"),
    ],
    ids=["another shape", "fewer", "more", "another dtype"],
)
def test_what_fits_is_taken_and_the_file_put_aside(file, tmp_path, content, hint):
    file.write(content)
    local, (told,) = begun(file)
    assert hint in told
    assert [path.name for path in tmp_path.iterdir()] == [f"{LOCAL_FILE}.damaged"]
    before = train(local, np.ones(10, np.float32))
    assert before["head.b"].tolist() == ([1.0, 1.0] if "version" in hint else OWN["head.b"].tolist())
    assert (before["body"] == 1.0).all()


def test_another_devices_file_is_put_aside(tmp_path):
    LocalFile(tmp_path, "6" * 32).write(OWN)
    with pytest.raises(ProtocolError, match="written by another device"):
        LocalFile(tmp_path, STATE_ID).read()


class FailingFile:
    """A file on a disk that fails."""

    def read(self):
        raise StorageError("local.safetensors: cannot be read")

    def write(self, _):
        raise StorageError("local.safetensors: cannot be written")


def test_a_disk_that_fails_is_told_of_once_and_training_continues():
    local, told = begun(FailingFile())
    disk = DiskWatch(told.append, "a restart loses the training of the local parameters")
    parameters = np.ones(10, np.float32)
    for _ in range(3):
        train(local, parameters, head_w=3.0)
        disk.write(local.keep)
    assert [("start with the hub's values" in one, "a restart loses" in one) for one in told] == [
        (True, False),
        (False, True),
    ]
    assert (train(local, parameters)["head.w"] == 3.0).all()


def test_patterns_of_device_and_hub_count_together():
    local, _ = begun(None, {"model": {"kind": "mlp", "local": ["head.b"]}}, patterns=["*.w"])
    parameters = np.ones(10, np.float32)
    train(local, parameters, head_w=3.0, head_b=4.0)
    assert parameters.tolist() == [1.0] * 10
    local.begin(SPEC, {}, print)  # the hub has other settings after its restart
    before = train(local, parameters)
    assert (before["head.w"] == 3.0).all()
    assert (before["head.b"] == 1.0).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"model": {"local": "head.*"}},
        {"model": {"local": ["a"] * 65}},
        {"model": {"local": [""]}},
    ],
    ids=["text", "too many", "empty"],
)
def test_a_hub_that_names_nonsense_is_refused(settings):
    with pytest.raises(ConfigError, match=r"the hub's settings: model\.local"):
        hubs_patterns(settings)
    assert hubs_patterns({"model": 5}) == hubs_patterns({"local": ["body"]}) == ()


def test_something_must_be_left_to_share():
    assert choose_local(SPEC, ["head.*", "head.b"]) == ("head.w", "head.b")
    with pytest.raises(ConfigError, match="match all arrays"):
        choose_local(SPEC, ["head.*", "b*"])
    with pytest.raises(ConfigError, match=r"no array matches 'tail'; the arrays are body, head\.w, head\.b"):
        choose_local(SPEC, ["tail"])
