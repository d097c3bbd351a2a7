"""The record by which a run is resumed."""

from pathlib import Path

import msgspec
import pytest

from edgeasync.config import convert, read_toml
from edgeasync.durable.run_folder import FORWARD_FILE, RECORD_FILE, TRAINING_FILE
from edgeasync.errors import ConfigError, PluginError, StorageError
from edgeasync.graphs.source import with_forward
from edgeasync.host.host_info import half_of_memory_bytes
from edgeasync.runtime.hub_record import RECORD_FORMAT, own_model, read_record, record_of
from edgeasync.runtime.hub_settings import HubSettings
from edgeasync.training.numpy_models import SoftmaxModel

EXAMPLE = Path(__file__).parents[3] / "examples" / "hub.toml"
ONNX = {"model": {"kind": "onnx", "file": "m.onnx"}, "evaluation": {"data": "held-out.npz"}, "hub": {"run": "r"}}


def run_folder(path, settings, *, checkpoint=True):
    path.mkdir(parents=True)
    (path / RECORD_FILE).write_bytes(record_of(settings))
    if checkpoint:
        (path / "checkpoint-0000000000-0.json").write_bytes(b"{}")  # whether it is whole, the hub will see
    return path


def test_a_record_has_every_setting_with_whole_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = convert(ONNX | {"checkpoint": {"keep": 5, "recovery": "best"}}, HubSettings, where="test")
    table = msgspec.json.decode(record_of(settings))
    assert table.pop("format") == RECORD_FORMAT
    found = convert(table, HubSettings, where="test")
    assert found.model.file == str(tmp_path / "m.onnx")
    assert found.evaluation.data == str(tmp_path / "held-out.npz")
    assert found.hub.run == str(tmp_path / "r")
    assert (found.checkpoint.keep, found.checkpoint.recovery) == (5, "latest"), "one goes back once"
    assert found.policy == settings.policy


def test_the_settings_of_the_example_outlive_it(tmp_path):
    settings = read_toml(EXAMPLE, HubSettings)
    found = read_record(run_folder(tmp_path / "run", settings))
    assert (found.policy, found.local, found.hub.stop) == (settings.policy, settings.local, settings.hub.stop)
    assert found.hub.run == str(tmp_path / "run")


def test_the_model_comes_with_the_folder(tmp_path):
    run = run_folder(tmp_path / "run", convert(ONNX, HubSettings, where="test"))
    model = read_record(run).model
    assert own_model(model, run) == model
    (run / FORWARD_FILE).write_bytes(b"")
    assert own_model(model, run).file == str(run / FORWARD_FILE)
    assert read_record(run).model.file == str(Path("m.onnx").absolute()), "the file that the user passed"
    (run / TRAINING_FILE).write_bytes(with_forward(b"", b"whole"))
    with pytest.raises(StorageError, match=rf"{FORWARD_FILE}: damaged .* without --resume"):
        own_model(model, run)


def test_a_folder_names_no_code_and_raises_no_limit(tmp_path):
    custom = convert({"model": {"kind": "custom", "factory": "pytest:main"}}, HubSettings, where="test")
    run = run_folder(tmp_path / "custom", custom)
    with pytest.raises(
        PluginError, match=r"hub.json: \[model\] factory pytest:main: only the run's folder names this code"
    ):
        read_record(run)
    assert read_record(run, trust_code=True).model.factory == "pytest:main"

    model = ONNX["model"] | {"build_s_max": 5000.0, "build_memory_bytes_max": "4000 GiB"}
    run = run_folder(tmp_path / "large", convert(ONNX | {"model": model}, HubSettings, where="test"))
    found, trusted = read_record(run).model, read_record(run, trust_code=True).model
    assert (found.build_s_max, trusted.build_s_max) == (900.0, 5000.0)
    assert found.build_memory_bytes_max == half_of_memory_bytes() < trusted.build_memory_bytes_max
    model = ONNX["model"] | {"build_s_max": 5.0, "build_memory_bytes_max": "1 MiB"}
    run = run_folder(tmp_path / "small", convert(ONNX | {"model": model}, HubSettings, where="test"))
    assert read_record(run).model == read_record(run, trust_code=True).model, "lower limits stay"


def test_what_cannot_be_gone_on_with(tmp_path):
    settings = convert(ONNX, HubSettings, where="test")
    with pytest.raises(StorageError, match="no checkpoint to resume from; start the run with a settings file"):
        read_record(run_folder(tmp_path / "new", settings, checkpoint=False))
    run = run_folder(tmp_path / "old", settings)
    (run / RECORD_FILE).write_bytes(b"{")
    with pytest.raises(StorageError, match="damaged"):
        read_record(run)
    (run / RECORD_FILE).write_bytes(msgspec.json.encode({"format": RECORD_FORMAT, "hub": {"colour": "red"}}))
    with pytest.raises(ConfigError, match="colour"):
        read_record(run)
    for written in (RECORD_FORMAT + 1, RECORD_FORMAT - 1, 0):
        (run / RECORD_FILE).write_bytes(msgspec.json.encode({"format": written}))
        with pytest.raises(StorageError, match=f"has format {written}, .* use the version of edgeasync that"):
            read_record(run)


@pytest.mark.parametrize("policy", [{}, {"combine": {"kind": "mean"}}, {"trust": "admitted"}])
def test_a_run_that_is_resumed_trusts_as_before(tmp_path, policy):
    table = ONNX | {"policy": policy, "hub": {"bind": "tcp://0.0.0.0:5555", "insecure": True}}
    settings = convert(table, HubSettings, where="test")
    assert read_record(run_folder(tmp_path / "run", settings)).policy == settings.policy


@pytest.mark.parametrize("content", ["{}", '{"format": null}', '{"format": "6"}', '{"hub": {}}'])
def test_a_record_without_a_format_is_damaged(tmp_path, content):
    """Red before: it was said to be of format None."""
    run = run_folder(tmp_path / "run", HubSettings(model=SoftmaxModel(inputs=2, classes=2)))
    (run / RECORD_FILE).write_text(content)
    with pytest.raises(
        StorageError,
        match=r"hub\.json: missing key 'format', so the file is damaged or not written by edgeasync; ",
    ):
        read_record(run)
