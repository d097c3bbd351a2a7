"""`install.sh` from a folder of wheels without a network, and an upgrade by the environments that it makes."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edgeasync.ops.service.environments import Environments
from tests.support.size import repetitions

pytestmark = pytest.mark.process

INSTALLER = Path(__file__).parents[2] / "devices/install.sh"


NEEDS = """\
Provides-Extra: hub
Provides-Extra: web
Provides-Extra: gpu
Requires-Dist: onnxruntime ; extra == 'gpu'
Requires-Dist: onnxruntime-gpu ; extra == 'gpu'
"""


def write_wheel(folder, version, needs=NEEDS):
    """Write a wheel that is called edgeasync and tells its version; `needs` are lines of its metadata."""
    code = f"import sys; print('edgeasync {version}', *sys.argv[2:])"
    script = "[console_scripts]\nedgeasync = edgeasync:main\n"
    return write(
        folder, "edgeasync", version, {"edgeasync.py": f"def main():\n    {code}\n"}, needs=needs, script=script
    )


def write(folder, name, version, files, *, needs="", script=""):
    """Write a wheel of these files into a folder; return the folder."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": script,
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in (files | {f"{info}/RECORD": record + f"{info}/RECORD,,\n"}).items():
            wheel.writestr(path, text)
    return folder


def install(home, *arguments):
    """Run the installer, without a network where root may take it away; return what it printed, and its code."""
    apart = ["unshare", "--net"] if os.geteuid() == 0 and shutil.which("unshare") else []
    environment = {"PATH": os.environ["PATH"], "HOME": str(home.parent), "PIP_CONFIG_FILE": "/dev/null"}
    told = subprocess.run(
        [*apart, "sh", str(INSTALLER), *map(str, arguments)], capture_output=True, text=True,
        env=environment, umask=0o077, check=False,
    )  # fmt: skip
    return told.stdout + told.stderr, told.returncode


if repetitions("environments that are installed"):

    def test_wheels_in_a_folder_are_enough_and_a_second_time_changes_nothing(tmp_path, monkeypatch):
        monkeypatch.delenv("PYTHONPATH", raising=False)  # this clone is not what is installed
        home, wheels = tmp_path / "a höme", write_wheel(tmp_path / "a stick", "0.1.0")
        settings = tmp_path / "my board.toml"
        settings.touch()
        arguments = ("--from", wheels, "--home", home, "--python", sys.executable)
        told, code = install(home, *arguments, "agent", settings)
        assert (told.splitlines(), code) == (
            [f"install.sh: edgeasync 0.1.0 is in {home}", f"edgeasync 0.1.0 install agent {settings}"],
            0,
        )
        assert (home / "current").readlink() == Path("env-1")
        before = {path: path.lstat().st_mtime_ns for path in home.rglob("*")}
        told, code = install(home, *arguments)
        assert (told, code) == (
            "install.sh: edgeasync 0.1.0 is already installed; to change it, run 'edgeasync service upgrade'\n",
            0,
        )
        assert {path: path.lstat().st_mtime_ns for path in home.rglob("*")} == before

        environments = Environments(home)
        usual = os.umask(0o077)
        try:
            made = environments.make(str(write_wheel(tmp_path / "newer", "0.3.0")), "hub")
        finally:
            os.umask(usual)
        unreadable = [path for path in (home, *home.rglob("*")) if path.stat().st_mode & 0o044 != 0o044]
        assert not unreadable, "the service's user is another"
        assert environments.current.name == "env-1"
        environments.switch(made)
        command = [str(home / "current/bin/edgeasync"), "--version"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "edgeasync 0.3.0\n"

    def test_onnxruntime_for_a_gpu_takes_the_place_of_the_other(tmp_path, monkeypatch):
        monkeypatch.delenv("PYTHONPATH", raising=False)
        home, wheels = tmp_path / "home", write_wheel(tmp_path / "wheels", "0.1.0")
        write(
            wheels,
            "onnxruntime",
            "1.32.0",
            {"onnxruntime/__init__.py": "computes = 'CPU'\n", "onnxruntime/cpu.py": ""},
        )
        write(wheels, "onnxruntime_gpu", "1.31.1", {"onnxruntime/__init__.py": "computes = 'GPU'\n"})
        told, code = install(home, "--from", wheels, "--home", home, "--python", sys.executable, "--gpu", "agent")
        assert (code, told.splitlines()[-1]) == (0, "edgeasync 0.1.0 install agent")
        upgraded = Environments(home).make(str(wheels), "gpu")
        for environment in (home / "env-1", upgraded):
            program = "import onnxruntime; print(onnxruntime.computes)"
            command = [str(environment / "bin/python"), "-c", program]
            assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "GPU\n"
            assert not list(environment.rglob("onnxruntime/cpu.py"))

    def test_a_failure_leaves_nothing_and_what_does_not_run_is_made_again(tmp_path):
        home, wheels = tmp_path / "home", write_wheel(tmp_path / "wheels", "0.1.0")
        others = write_wheel(tmp_path / "others", "0.1.0", needs="Requires-Dist: not-on-the-stick\n")
        arguments = ("--home", home, "--python", sys.executable)
        told, code = install(home, "--from", others, *arguments)
        assert code == 2
        assert "if no wheel fits Python 3." in told.splitlines()[-1]
        assert list(home.iterdir()) == []
        broken = home / "env-1/bin/edgeasync"
        broken.parent.mkdir(parents=True)
        (home / "current").symlink_to("env-1")
        broken.write_text("")  # as a power cut, or another Python of the system's, leaves it
        broken.chmod(0o755)
        told, code = install(home, "--from", wheels, *arguments)
        assert (told, code) == (f"install.sh: edgeasync 0.1.0 is in {home}\n", 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("agent", "gone.toml"), "gone.toml: no such file; pass the settings file of the agent"),
        (("--from",), "--from needs a value"),
        (("board.toml",), "'board.toml' is not known; pass agent, hub or peer, then a settings file"),
    ],
)
def test_a_mistake_is_told_before_anything_is_installed(tmp_path, arguments, words):
    assert install(tmp_path / "home", *arguments) == (f"install.sh: {words}\n", 2)


@pytest.mark.parametrize("kind", ["agent", "hub"])
@pytest.mark.parametrize("has_all", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_hub_beside_an_agent_gets_what_its_environment_lacks(tmp_path, kind, has_all, fails):
    home, wheels = tmp_path / "home", write_wheel(tmp_path / "wheels", "0.1.0")
    told_file = tmp_path / "told"
    packages = "onnx, prometheus_client, starlette, uvicorn"
    python = [f'if [ "$2" = "import {packages}" ]; then exit {int(not has_all)}; fi', f'echo "$*" >>{told_file}']
    scripts = {"edgeasync": "echo edgeasync 0.1.0", "python": "\n".join([*python, f"exit {int(fails)}"])}
    for name, script in scripts.items():
        file = home / "current/bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    told, code = install(home, "--from", wheels, "--home", home, "--python", sys.executable, kind)
    wanted = kind == "hub" and not has_all
    ran = told_file.read_text() if told_file.exists() else ""
    install_all = "-m pip install --quiet onnx prometheus-client starlette uvicorn"
    assert ran == (f"{install_all} --no-index --find-links {wheels}\n" if wanted else "")
    assert code == (2 if wanted and fails else 0), told
    assert ("a hub needs onnx" in told) == (wanted and fails)


def test_an_installer_that_lies_alone_takes_no_name_from_an_index(tmp_path):
    alone = shutil.copy(INSTALLER, tmp_path / "install.sh")
    told = subprocess.run(
        ["sh", alone, "--home", tmp_path / "home", "--python", sys.executable, "agent"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (told.returncode, told.stderr.count("pass --from")) == (2, 1)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("echo 32", "this system has 32 bits, for which onnxruntime has no packages; install the 64-bit system"),
        ("exit 127", "install python3 and python3-venv"),
        (
            'case "$2" in *struct*) echo 64;; *sys*) exit 1;; *) echo Python 3.9.2;; esac',
            "Python 3.9.2 is too old",
        ),
    ],
    ids=["32 bits", "no Python", "an old Python"],
)
def test_a_system_that_cannot_do_is_told_in_one_sentence(tmp_path, python, words):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{python}\n")
    fake.chmod(0o755)
    told, code = install(tmp_path / "home", "--home", tmp_path / "home", "--python", fake)
    assert code == 2
    assert words in told
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "home").exists()
