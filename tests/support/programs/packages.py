"""Another package, installed by pip: offline, without a build backend, in an environment of its own."""

import base64
import hashlib
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]


def make_wheel(source, folder):
    """Write the wheel of a package whose folder has a pyproject.toml and modules, as its backend would."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    name, version = project["name"].replace("-", "_"), project["version"]
    info = f"{name}-{version}.dist-info"
    points = [
        f"[{group}]\n" + "".join(f"{point} = {value}\n" for point, value in named.items())
        for group, named in project.get("entry-points", {}).items()
    ]
    files = {str(path.relative_to(source)): path.read_bytes() for path in sorted(source.rglob("*.py"))} | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "\n".join(points).encode(),
    }
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        record = ""
        for path, content in files.items():
            file.writestr(path, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(content)}\n"
        file.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return wheel


class Environment:
    """A virtual environment that sees this one's packages, and has more of its own."""

    def __init__(self, folder):
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = folder / "bin" / "python"
        site = next((folder / "lib").glob("python3*")) / "site-packages"
        (site / "below.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")

    def pip(self, *arguments):
        command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", str(self.python)]
        done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def install(self, wheel):
        self.pip("install", "--no-index", "--no-deps", "--no-compile", wheel)

    def uninstall(self, name):
        self.pip("uninstall", "-y", name)

    def run(self, folder, *arguments):
        """Run edgeasync there, and return how it ended."""
        command = [str(self.python), "-m", "edgeasync", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
