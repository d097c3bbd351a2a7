"""Systems of 64-bit ARM in folders, run by emulation: for tests at size `nightly`, as root."""

import re
import shutil
import subprocess
from pathlib import Path

from tests.support.boards.machine import BOARD, write

ENTER = Path(__file__).with_name("enter_arm.sh")
BINFMT = Path("/proc/sys/fs/binfmt_misc")
EDGEASYNC = "/opt/edgeasync/current/bin/edgeasync"

PYTHON = "/opt/edgeasync/current/bin/python"
SUPPORT = "/root/support"
"""Where the board has this folder, for scripts that need no test packages."""

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PACKAGES = "python3,python3-venv,libstdc++6,libgomp1,bash,dash,coreutils,base-passwd,base-files"
CORES = 4


class ArmSystem:
    """A Debian in a folder, its packages unpacked and not configured: enough for Python."""

    def __init__(self, folder, cpu="cortex-a53"):
        self.root, self.machine, self.cpu = folder / "root", folder / "machine", cpu

    def make(self, suite):
        """Unpack Debian's packages, and write what the board's sensors tell."""
        if not (BINFMT / "status").exists():
            subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(BINFMT)], check=True)
        subprocess.run(["update-binfmts", "--enable", "qemu-aarch64"], check=True)
        self.root.parent.mkdir()
        subprocess.run(
            ["mmdebstrap", "--quiet", "--arch=arm64", "--variant=extract", f"--include={PACKAGES}",
             '--aptopt=Acquire::Check-Valid-Until "false"', '--aptopt=Acquire::Check-Date "false"',
             suite, str(self.root), mirror()],
            check=True,
        )  # fmt: skip
        for name in ("passwd", "group"):
            (self.root / "etc" / name).write_text((self.root / f"usr/share/base-passwd/{name}.master").read_text())
        if not (self.root / "bin/sh").exists():
            (self.root / "bin/sh").symlink_to("dash")
        for name in ("proc", "sys", "dev", "tmp", "root"):
            (self.root / name).mkdir(exist_ok=True)
        # Configuring its package would make this file, without which Debian 13's pip does not start.
        self.at(CERTIFICATES).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CERTIFICATES, self.at(CERTIFICATES))
        shutil.copytree(Path(__file__).parent, self.at(SUPPORT))
        features = "Features\t: fp asimd evtstrm crc32 cpuid\nCPU implementer\t: 0x41\nCPU part\t: 0xd03\n\n"
        cores = "".join(f"processor\t: {number}\n{features}" for number in range(CORES))
        # onnxruntime counts cores here, and does not survive the host's.
        online = {
            f"sys/devices/system/cpu/{name}": f"0-{CORES - 1}\n" for name in ("online", "possible", "present")
        }
        write(self.machine, BOARD | online | {"proc/cpuinfo": cores})

    def at(self, path):
        """Return where a path of the board lies on this machine."""
        return self.root / path.lstrip("/")

    def enter(self):
        """Return the command under which another runs in this system."""
        return ("bash", str(ENTER), str(self.root), self.cpu, str(self.machine))

    def run(self, *command, network=True):
        """Run a command to its end; return what it printed."""
        apart = () if network else ("unshare", "--net")
        told = subprocess.run([*apart, *self.enter(), *command], capture_output=True, text=True, check=False)
        assert not told.returncode, told.stdout + told.stderr
        return told.stdout


def mirror():
    """Return where this machine's packages come from."""
    files = [Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")]
    text = "\n".join(file.read_text("utf-8") for file in files if file.is_file())
    found = re.search(r"^URIs: (\S+)", text, re.MULTILINE) or re.search(
        r"^deb (?:\[.*?\] )?(\S+)", text, re.MULTILINE
    )
    return found[1]
