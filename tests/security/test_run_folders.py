"""A run's folder from a stranger: whatever it names, no code of it runs, and nothing outside of it changes.

Every command and every call that takes such a folder is tried on folders with all that a stranger could write into
them. An audit hook notes what is run, written and listened on.
"""

import json
import shutil
import sys

import msgspec
import numpy as np
import pytest

from edgeasync import Policy, Stop, nn, train
from edgeasync.config import to_table
from edgeasync.durable.checkpoint import Manifest, _seal
from edgeasync.durable.keys import HubKeys
from tests.support.security.audited import AUDIT, ROOT, audited

CODE = """
import pathlib
pathlib.Path("executed").touch()
from edgeasync.policies import Plugin

class Evil(Plugin, frozen=True):
    def __call__(self, staleness):
        return 1.0

class Coded:
    needs_feedback = False

def make():
    return {"w": [1.0]}
"""

DATA = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
EVIL = {"kind": "evil:Evil"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that was trained by honest code."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train(
        nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),
        DATA,
        run=run,
        until=Stop(updates=40),
        settings={"checkpoint": {"every": "15 updates", "keep": 50}},
    )
    return run


def rewrite(run, *, policy=None, codec=None, **record):
    """Let the checkpoints of a run name a policy and a codec, and its record what a stranger writes there."""
    for path in run.glob("checkpoint-*.json"):
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        rules = manifest.rules | {} if policy is None else manifest.rules | {"policy": policy}
        if codec is not None:
            rules["settings"] = rules["settings"] | {"codec": codec}
        manifest = msgspec.structs.replace(manifest, rules=rules, seal="")
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, seal=_seal(manifest))))
    table = json.loads((run / "hub.json").read_bytes())
    table["hub"]["stop"] = {"minutes": 0.001}
    for section, keys in record.items():
        table[section] = keys if section == "model" else table[section] | keys
    if policy is not None:
        table["policy"] = policy
    (run / "hub.json").write_text(json.dumps(table))


def naming(staleness):
    return to_table(Policy()) | {"staleness": staleness}


def plugin(run, outside):
    rewrite(run, policy=naming(EVIL))


def plugin_by_its_path(run, outside):
    rewrite(run, policy=naming({"kind": "runs.x.evil:Evil"}))


def plugin_of_a_package_in_the_folder(run, outside):
    info = run / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[edgeasync.policies]\nevil = evil:Evil\n[edgeasync.codecs]\nevil_codec = evil:Coded\n"
    )
    rewrite(run, policy=naming({"kind": "evil"}), codec={"push": "evil_codec"})


def many_plugins(run, outside):
    detectors = [EVIL]
    warm_up = {"updates": 3, "aggregate": EVIL, "frequency": EVIL}
    stages = [EVIL, EVIL]
    monitor = {"detectors": detectors}
    table = naming(EVIL) | {"optimizer": stages, "monitor": monitor, "warm_up": warm_up, "combine": EVIL}
    rewrite(run, policy=table)


def factory_of_an_installed_module(run, outside):
    (run / "conftest.py").write_text(CODE)
    rewrite(run, model={"kind": "custom", "factory": "pytest:main"})


def factory_in_the_folder(run, outside):
    rewrite(run, model={"kind": "custom", "factory": "evil:make"})


def address_of_all_networks(run, outside):
    rewrite(run, hub={"bind": "tcp://0.0.0.0:*", "insecure": True})


def address_that_is_a_file(run, outside):
    rewrite(run, hub={"bind": f"ipc://{outside / 'precious'}"})


def keys_of_a_stranger(run, outside):
    rewrite(run, hub={"bind": "tcp://0.0.0.0:*", "keys": str(outside / "keys"), "knocking": True})


def keys_of_the_user(run, outside):
    keys = HubKeys.init(outside / "keys")
    keys.issue_token("pi-1", ("tcp://127.0.0.1:1",), 0.0)
    rewrite(run, hub={"bind": "tcp://127.0.0.1:*", "keys": str(outside / "keys"), "knocking": True})


def files_elsewhere(run, outside):
    with (outside / "data.npz").open("wb") as file:
        np.savez(file, x=np.array([Evil()]), y=np.zeros(1))
    (run / "forward.onnx").rename(outside / "model.onnx")
    model = {"kind": "onnx", "file": str(outside / "model.onnx"), "loss": "cross_entropy", "build_s_max": 86_400.0}
    rewrite(run, model=model, evaluation={"data": str(outside / "data.npz")}, hub={"run": str(outside / "run")})


def a_text_in_place_of_a_model(run, outside):
    (run / "forward.onnx").unlink()
    rewrite(run, model={"kind": "onnx", "file": str(outside / "precious"), "loss": "cross_entropy"})


def data_elsewhere(run, outside):
    np.savez(outside / "data.npz", x=DATA[0], y=DATA[1])
    rewrite(run, evaluation={"data": str(outside / "data.npz"), "every": "1 updates"})


def links(run, outside):
    for name in ("hub.json", "model.safetensors", "history", "best.safetensors.part", "last-events.txt", "lock"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / "precious")
    for path in run.glob("journal-*"):
        path.unlink()
        path.symlink_to(outside / "precious")


class Evil:
    def __reduce__(self):
        return eval, ("open('executed', 'w')",)


NOT_TRUSTED = "only the run's folder names this code"

FOLDERS = {
    plugin: (2, NOT_TRUSTED),
    plugin_by_its_path: (2, NOT_TRUSTED),
    plugin_of_a_package_in_the_folder: (2, "is in the folder of a run, from which code is never imported"),
    many_plugins: (2, NOT_TRUSTED),
    factory_of_an_installed_module: (2, NOT_TRUSTED),
    factory_in_the_folder: (2, NOT_TRUSTED),
    address_of_all_networks: (8, "to confirm them, add --bind tcp://0.0.0.0:* --insecure\n"),
    address_that_is_a_file: (8, "to confirm them, add --bind ipc:///"),
    keys_of_a_stranger: (8, "to confirm them, add --bind tcp://0.0.0.0:* --keys /"),
    keys_of_the_user: (8, "to confirm them, add --keys /"),
    files_elsewhere: (3, "evaluation.data"),
    a_text_in_place_of_a_model: (10, "not a readable ONNX model"),
    data_elsewhere: (0, "stopped"),
    links: (9, "hub.json: damaged"),
}
"""What a stranger does, and how `hub --resume` ends then: its exit code, and words that it says."""


def steps(run, place):
    """Return every command and call that takes the folder of a run."""
    config = place / "own.toml"
    config.write_text(
        f'[hub]\nrun = "{run}"\nbind = "tcp://127.0.0.1:*"\nstop = {{ minutes = 0.001 }}\n'
        f'[model]\nkind = "onnx"\nfile = "{run / "forward.onnx"}"\n'
    )
    out = place / "out"
    opened = (
        "from pathlib import Path\nfrom edgeasync import Hub, Run, Stop, nn, train\n"
        f"from edgeasync.sdk.history import History\nrun = {str(run)!r}\n"
    )
    model = "nn.Sequential(nn.Flatten(), nn.Linear(4, 2))"
    data = "([[1.0, 0, 0, 0], [0, 1.0, 0, 0]], [0, 1])"
    hub = f"Hub({model}, run=run, bind='tcp://127.0.0.1:*', input_shape=(4,), until=Stop(minutes=0.001))"
    return [
        ("runs", run),
        ("runs", run.parent),
        ("replay", run),
        ("replay", run, "--until", 1),
        ("replay", run, "--export", out / "replayed.safetensors"),
        ("export", run, "--out", out / "newest.onnx"),
        ("export", run, "--best", "--out", out / "best.onnx"),
        ("hub", "--resume", run, "--check"),
        ("hub", config, "--check"),
        ("demo", "--run", run),
        ("python", opened + "found = Run.open(run); found.history; found.model; found.devices; found.events"),
        ("python", opened + "Run.open(run, best=True)"),
        ("python", opened + f"Run.open(run).export({str(out / 'opened.onnx')!r})"),
        ("python", opened + "History.read(Path(run))"),
        ("python", opened + f"with {hub} as hub: hub.wait()"),
        ("python", opened + f"train({model}, {data}, run=run, until=Stop(minutes=0.001), workers=1)"),
        ("hub", "--resume", run),
        ("hub", config),
    ]


def content(folder):
    return {
        path: path.read_bytes() if path.is_file() else path.readlink() if path.is_symlink() else b""
        for path in folder.rglob("*")
    }


@pytest.mark.process
@pytest.mark.parametrize("spoil", FOLDERS, ids=[spoil.__name__ for spoil in FOLDERS])
def test_a_folder_of_a_stranger_runs_no_code_and_opens_nothing(spoil, trained, tmp_path):
    run, outside, place = tmp_path / "runs" / "x", tmp_path / "outside", tmp_path / "place"
    for folder in (outside, place, place / "out"):
        folder.mkdir()
    (outside / "precious").write_text("the user's own")
    shutil.copytree(trained, run)
    (run / "evil.py").write_text(CODE)
    spoil(run, outside)
    before = content(outside)

    results, noted = audited(steps(run, place), place, run, tmp_path, fresh=run)
    for step, (_, printed) in zip(steps(run, place), results, strict=True):
        assert "Traceback" not in printed, f"{step}: {printed}"
    (code, printed), (wanted, words) = results[-2], FOLDERS[spoil]
    assert (code, words in printed) == (wanted, True), printed
    installation = (sys.prefix, sys.base_prefix, str(ROOT / "edgeasync"), str(ROOT / "tests" / "support"), "<")
    executed = {value for what, value in noted if what == "exec"}
    assert not [name for name in executed if not name.startswith((*installation, str(AUDIT)))]
    assert not [*tmp_path.rglob("executed")]
    allowed = (str(run), *(str(place / name) for name in ("out", "tmp", "results.json")), "/dev/null", "/proc/")
    written = {value for what, value in noted if what == "write"} - {str(run.parent)}  # which is there already
    assert not [name for name in written if not name.startswith(allowed)]
    bound = [value for what, value in noted if what == "bind"]
    assert not [address for address in bound if "127.0.0.1" not in address and not address.startswith("inproc:")]
    assert content(outside) == before


def test_the_hook_of_these_tests_sees_what_they_look_for(tmp_path):
    """A trusted folder shows that the hook is there."""
    (tmp_path / "evil.py").write_text(CODE)
    code = "import evil, zmq; zmq.Context().socket(zmq.REP).bind('tcp://127.0.0.1:*')"
    _, noted = audited([("python", code)], tmp_path, tmp_path)
    assert ["exec", str(tmp_path / "evil.py")] in noted
    assert ["bind", "tcp://127.0.0.1:*"] in noted
    assert ["write", str(tmp_path / "executed")] in noted
