"""The examples a person tries first: run as they are, as processes, with short settings."""

import ast
import io
import json
import re
import signal
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeasync import SGD, Agent, Run
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.data import load
from tests.support.programs.command_line import run_command
from tests.support.programs.processes import free_address, until
from tests.support.size import repetitions

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 60.0
WHOLE_S = 300.0
"""How long an example of its full size may take."""

WHOLE = repetitions("examples at full size")

pytestmark = pytest.mark.process


@pytest.fixture
def start(tmp_path):
    """Start examples in an empty folder; whatever still runs at the end is killed."""
    processes = []

    def start_one(name, *arguments):
        command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
        )
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


def output(process, *, quiet=True, limit_s=TIMEOUT_S):
    """Return what an example prints; unless it is `quiet` it may print warnings to standard error."""
    out, err = process.communicate(timeout=limit_s)
    assert process.returncode == 0, err
    assert not (quiet and err)
    return out


def percents(shown):
    return [float(found) for found in re.findall(r"([\d.]+)%", shown)]


def test_every_example_has_a_row():
    rows = re.findall(r"^\| (.+?) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    told = {name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)}
    there = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"} - {"README.md"}
    there |= {path.name for path in EXAMPLES.glob("async_train/*.py")}
    assert told == there


def test_most_examples_are_short():
    names = [
        str(path.relative_to(EXAMPLES)) for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("async_train/*.py"))
    ]
    lengths = {name: len(lines_of(name)) for name in names}
    assert max(lengths.values()) <= 90, lengths
    assert np.median([*lengths.values()]) <= 40, lengths


def is_valid(path):
    onnx.checker.check_model(path, full_check=True)
    return True


def errors(shown):
    """Return how far each learnt array is from the truth it is shown beside."""
    pairs = re.findall(r"\[(.+)\], the truth is \[(.+)\]", shown)
    assert len(pairs) == 2
    return [
        np.abs(np.array(learnt.split(), float) - np.array(truth.split(","), float)).max()
        for learnt, truth in pairs
    ]


def test_digits_are_parted_among_devices(start, tmp_path):
    arguments = ["--devices", 3, "--alpha", 0.3, "--seed", 7, "--out", "parts"]
    shown = output(start("make_digits.py", *arguments)).splitlines()
    names = ["device-1", "device-2", "device-3", "held-out"]
    parts = [load(tmp_path / "parts" / f"{name}.npz") for name in names]
    assert [line.split(":")[0] for line in shown] == [f"parts/{name}.npz" for name in names]
    assert sum(map(len, parts)) == 1797
    assert all(len(part) >= 32 and part.x.shape[1:] == (64,) and part.x.max() <= 1 for part in parts)
    again = [*arguments[:-1], "again"]
    output(start("make_digits.py", *again))
    assert all(
        np.array_equal(load(tmp_path / "again" / f"{name}.npz").x, part.x)
        for name, part in zip(names, parts, strict=True)
    )


def test_a_model_is_written_without_torch(start, tmp_path):
    output(start("digits_cnn.py", "model.onnx"))
    assert is_valid(tmp_path / "model.onnx")


def make_language_model(start, **sizes):
    flags = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", size)]
    output(start("small_lm/make_model.py", "lm.onnx", *flags))


def test_a_small_language_model_can_be_trained(start, tmp_path):
    make_language_model(
        start, layers=2, hidden=16, intermediate=24, heads=4, key_value_heads=2, vocabulary=32, tokens=8
    )
    assert is_valid(tmp_path / "lm.onnx")
    graph = build_training_graph((tmp_path / "lm.onnx").read_bytes(), GraphSettings())
    attention, feed_forward, norms = 2 * 16 * 16 + 2 * 16 * 8, 3 * 16 * 24, 2 * 16
    assert graph.spec.length == 32 * 16 + 2 * (attention + feed_forward + norms) + 16
    assert graph.warnings == ()


def test_devices_fine_tune_a_language_model_on_their_own_texts(start, tmp_path):
    make_language_model(
        start, layers=1, hidden=32, intermediate=64, heads=2, key_value_heads=1, vocabulary=300, tokens=32
    )
    output(start("small_lm/texts.py", "texts", "--tokens", 32, "--vocabulary", 300, "--characters", 20_000))
    for kind in ([], ["--personal", "--base", "float32"]):
        flags = ["--run", f"run{len(kind)}", "--updates", 300, "--learning-rate", 0.01, "--kill", *kind]
        flags += ["--bind", free_address()]
        shown = output(start("small_lm/fleet.py", "lm.onnx", "texts", *flags), quiet=False, limit_s=WHOLE_S)
        rows = re.findall(r"^(characters|docstrings|reference|source-code) +(\d+) +(\d+) ", shown, re.MULTILINE)
        assert len(rows) == 4
        assert all(f"{name}: killed and started again" in shown for name in ("characters", "hub"))
        for name, before, after in rows:
            assert int(after) < int(before), name


@pytest.mark.parametrize("flags", [[], ["--kill"]], ids=["plain", "with kills"])
def test_devices_end_with_a_hub_that_fails_at_its_start(start, tmp_path, flags):
    (tmp_path / "lm.onnx").write_bytes(b"no model")
    (tmp_path / "texts").mkdir()
    np.savez(tmp_path / "texts/characters-later.npz", x=np.zeros((2, 4), np.int64), y=np.zeros((2, 4), np.int64))
    np.savez(tmp_path / "texts/characters.npz", x=np.zeros((2, 4), np.int64), y=np.zeros((2, 4), np.int64))
    fleet = start("small_lm/fleet.py", "lm.onnx", "texts", "--bind", free_address(), *flags)
    told = fleet.communicate(timeout=WHOLE_S)[1]
    assert fleet.returncode == 1
    assert "lm.onnx: not a readable ONNX model" in told
    assert told.splitlines()[-1] == "the hub failed with exit code 1; its message is above"


def test_a_table_shows_on_which_boards_a_graph_fits(start, tmp_path):
    make_language_model(
        start, layers=1, hidden=16, intermediate=24, heads=4, key_value_heads=2, vocabulary=32, tokens=8
    )
    assert run_command(tmp_path, "model", "build", "lm.onnx", "--out", "graph.onnx").returncode == 0
    *_, row = output(start("small_lm/fits.py", "graph.onnx", "--batch-size", 1)).splitlines()
    assert re.fullmatch(r"\| `graph\.onnx` \| 1 \| \d\d\d? (\| yes ){5}\|", row), row


def lines_of(name):
    """Return the lines of an example that a person writes: neither blank ones, nor what it says about itself."""
    text = (EXAMPLES / name).read_text()
    spans = [slice(node.lineno - 1, node.end_lineno) for node in ast.parse(text).body[1:]]
    return [line for span in spans for line in text.splitlines()[span] if line.strip()]


def test_digits_in_five_lines_and_a_model_of_ones_own_in_fifteen(start, tmp_path):
    output(start("digits.py"))
    assert is_valid(tmp_path / "digits.onnx")
    shown = output(start("own_model.py"))
    weight = re.search(r"'weight': array\(\[(.+?)\]", shown)[1]
    assert np.allclose(np.array(weight.split(","), float), [1.0, -2.0, 0.5], atol=0.01)
    assert len(lines_of("digits.py")) <= 5
    assert len(lines_of("own_model.py")) <= 15


def test_a_fleet_of_three_kinds(start):
    pytest.importorskip("torch")
    shown = output(start("mixed_fleet.py"), quiet=False, limit_s=WHOLE_S)
    assert re.match(r"{'torch': [1-9]\d*, 'onnx': [1-9]\d*, 'numpy': [1-9]\d*} updates", shown)
    assert percents(shown)[0] > 85


def test_a_pipeline_of_scikit_learn(start):
    assert min(percents(output(start("sklearn_pipeline.py")))) > 90


def test_digits_by_jax(start):
    pytest.importorskip("jax")
    assert percents(output(start("jax_digits.py")))[0] > 85


def test_faults_are_found_in_streams_of_sensors(start):
    epochs = 30 if WHOLE else 3
    shown = output(start("sensor_anomalies.py", "--epochs", epochs), quiet=False, limit_s=WHOLE_S)
    found = [set(re.findall(r"\d+", alarms)) for alarms in re.findall(r"in windows \[(.*?)\]", shown)]
    assert len(found) == 3
    assert all(alarms <= {"300", "600", "900"} for alarms in found), "no false alarms"
    if WHOLE:
        assert all(found)


def test_personal_heads(start):
    shown = output(start("personal_heads.py", "--passes", 30 if WHOLE else 2), quiet=False, limit_s=WHOLE_S)
    shared, _, heads, _ = percents(shown)
    assert min(shared, heads) > 40
    if WHOLE:
        assert heads > shared


def test_a_hub_is_killed_and_resumes(start):
    kills = 5 if WHOLE else 1
    shown = output(start("kill_and_resume.py", "--kills", kills), quiet=False, limit_s=WHOLE_S)
    answered, *counts = map(int, re.findall(r"\d+", shown.splitlines()[-1]))
    assert counts == [answered, answered], "no update is lost, none counts twice"
    told = re.findall(r"answered (\d+) updates; started again, it knows of (\d+)", shown)
    assert len(told) == kills
    assert all(int(known) >= int(before) for before, known in told)


def test_a_smartwatch(start):
    shown = output(
        start("smartwatch.py", "--epochs", 12 if WHOLE else 1, "--compare"), quiet=False, limit_s=WHOLE_S
    )
    fleet, alone = percents(shown)
    assert re.search(r"\d+ MB, \d+ s", shown)
    assert min(fleet, alone) > 40
    if WHOLE:
        assert fleet > alone - 5, "one run of each; examples/README.md says how they scatter"


def test_a_notebook(tmp_path, monkeypatch):
    for name, value in {"PYTHONPATH": str(EXAMPLES.parent), "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    nbclient, nbformat = (pytest.importorskip(name) for name in ("nbclient", "nbformat"))
    notebook = nbformat.read(EXAMPLES / "digits.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    nbclient.NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = {cell.id: "".join(each.get("text", "") for each in cell.get("outputs", ())) for cell in notebook.cells}
    assert len(percents(said["train"])) >= 3, "told while the cell runs"
    assert percents(said["again"])[0] > 85
    assert is_valid(tmp_path / "digits.onnx")


def test_a_trainer_of_ones_own(start, tmp_path):
    shown = output(start("own_trainer.py", "--updates", 300, "--run", "run"))
    assert max(errors(shown)) < 0.2
    assert (tmp_path / "run" / "model.safetensors").is_file()


# -- a service -------------------------------------------------------------------------------------------------


def ask(url, **options):
    return urllib.request.urlopen(urllib.request.Request(url, **options), timeout=TIMEOUT_S)


def told(stream):
    """Yield the events of a stream, with their names."""
    for line in stream:
        if line.startswith(b"event: "):
            yield line.split()[1].decode(), json.loads(next(stream).removeprefix(b"data: "))


def test_a_service_holds_two_hubs(start, tmp_path):
    url = free_address().replace("tcp", "http")
    service = start("service.py", "--port", url.rpartition(":")[2], "--run", "run", "--loss", "0.5")
    assert url in service.stdout.readline()
    hubs = json.load(ask(f"{url}/hubs"))
    generator = np.random.default_rng(0)
    y = generator.integers(0, 10, 1000)
    easy, hard = (np.eye(64)[y], y), (generator.normal(size=(1000, 64)), y)
    streams = {name: told(ask(f"{url}/hubs/{name}/events")) for name in hubs}
    with (
        Agent(hubs["small"]["address"], easy, optimizer=SGD(learning_rate=1.0)),
        Agent(hubs["large"]["address"], hard),
    ):
        kinds = [kind for kind, _ in streams["small"]]
        assert (kinds[0], kinds[-1]) == ("join", "end"), "the service's own rule has ended it"
        until(lambda: "ended" in json.load(ask(f"{url}/hubs"))["small"], "the end, which the event announced")
        seen = next(
            event["version"] for kind, event in streams["large"] if kind == "version" and event["version"] >= 3
        )
        model = np.load(io.BytesIO(ask(f"{url}/hubs/large/model").read()))
        assert {name: model[name].shape for name in model.files}["layer0.weight"] == (64, 64)
        service.send_signal(signal.SIGTERM)
        assert [*streams["large"]][-1][0] == "end"
        assert service.wait(TIMEOUT_S) == 0
    for name, version in {"small": 1, "large": seen}.items():
        assert Run.open(tmp_path / "run" / name).version >= version


# -- a wake word -----------------------------------------------------------------------------------------------


def pretend_homes(folder, random):
    """Write recordings in which the wake word and a name have one pattern in common, and a detector for it."""
    word, name = random.normal(size=(2, 16, 96)) / np.sqrt(16 * 96)
    for home in range(10):
        arrays = {}
        for part in ("", "later_"):
            talk, calls = random.normal(0.0, 0.1, (2, 200, 96)), random.normal(0.0, 0.1, (12, 40, 96))
            for begin in (20, 70, 120, 170):
                talk[:, begin : begin + 16] += 8 * (word + name)
            calls[:, 20:36] += 8 * word
            arrays |= {f"{part}talk": talk.astype(np.float32), f"{part}calls": calls.astype(np.float32)}
        np.savez(folder / f"home-{home}.npz", **arrays)
    values = {
        "model.1.weight": np.stack([word.ravel(), name.ravel()]), "model.1.bias": np.zeros(2),
        "model.7.weight": np.array([[2.0, 0.0]]), "model.7.bias": np.array([-8.0]),
    }  # fmt: skip
    node, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [
            node("Flatten", ["x"], ["flat"]),
            node("Gemm", ["flat", "model.1.weight", "model.1.bias"], ["hidden"], transB=1),
            node("Relu", ["hidden"], ["kept"]),
            node("Gemm", ["kept", "model.7.weight", "model.7.bias"], ["raw"], transB=1),
            node("Sigmoid", ["raw"], ["score"]),
        ],
        "detector",
        [value("x", onnx.TensorProto.FLOAT, [1, 16, 96])],
        [value("score", onnx.TensorProto.FLOAT, [1, 1])],
        [onnx.numpy_helper.from_array(array.astype(np.float32), key) for key, array in values.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "detector.onnx")


def found_by(shown):
    """Return false alarms an hour and the percentage of missed calls of each measurement that is shown."""
    return [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) false alarms .+?([\d.]+)% missed", shown)]


def test_homes_teach_a_detector_the_names_that_they_call(start, tmp_path):
    pretend_homes(tmp_path, np.random.default_rng(5))
    shown = output(
        start("wake_word/wake_word.py", ".", "--model", "detector.onnx", "--learning-rate", 0.2),
        quiet=False,
        limit_s=WHOLE_S,
    )
    found = found_by(shown)
    assert found[:4] == [(240.0, 0.0)] * 4, "four a minute, which are all the names"
    assert found[4:] == [(0.0, 0.0)] * 3


if all(map(find_spec, ("openwakeword", "espeakng_loader"))):  # examples/wake_word/requirements.txt

    def test_a_published_wake_word(start):
        sizes = ["--homes", 9, "--minutes", 2, 4, "--calls", 8, 8]
        names = output(start("wake_word/record.py", "homes", *sizes), limit_s=WHOLE_S)
        assert len(set(re.findall(r"[A-Z]\w+", names))) == 18, "no two homes call the same name"
        shown = output(start("wake_word/wake_word.py", "homes"), quiet=False, limit_s=WHOLE_S)
        (before, missed), *_, (shared, shared_missed), _, (personal, personal_missed) = found_by(shown)
        assert before > 10
        assert max(shared, personal) < before
        assert max(shared_missed, personal_missed) <= missed < 30, "it recognizes synthesized voices"
