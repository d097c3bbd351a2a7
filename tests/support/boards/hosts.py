"""Hosts on this machine, for what is done to many boards: each has this system's files, and changes its own copy.

A host has a root folder, processes and a name of its own, and shares the network. It takes root. What it needs of
systemd, `tests/support/boards/systemctl.py` does.
"""

import subprocess
from pathlib import Path

import psutil

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SYSTEMCTL = Path(__file__).with_name("systemctl.py")

MAKE = """
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o lowerdir=/,upperdir="$1/upper",workdir="$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount --rbind /dev dev
for folder in tmp run var/tmp; do mount -t tmpfs tmpfs $folder; done
rm -rf opt var/lib/edgeasync etc/systemd/system/edgeasync*
mkdir opt
cp "$3" usr/local/bin/systemctl
sed -i '1i #!/usr/bin/env python3' usr/local/bin/systemctl
chmod 755 usr/local/bin/systemctl
hostname "$2"
echo made
exec chroot . sleep infinity
"""

SSH = """#!/bin/bash
# Stands in for ssh: ssh [OPTION...] HOST COMMAND
host=${{@: -2:1}}
exec {enter} $(cat {folder}/$host.pid) -- sh -c "${{@: -1}}"
"""
ENTER = f"env -i HOME=/root PATH={PATH} LC_ALL=C.UTF-8 nsenter --mount --uts --pid --root --wd=/ --target"


class Hosts:
    """Hosts with these names, until they are closed."""

    def __init__(self, folder, names):
        self._folder = folder
        folder.mkdir()
        self._processes = []
        self.ssh = folder / "ssh"
        self.ssh.write_text(SSH.format(enter=ENTER, folder=folder))
        self.ssh.chmod(0o755)
        for name in names:
            self._make(name)

    def _make(self, name):
        place = self._folder / name
        place.mkdir()
        process = subprocess.Popen(
            ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child",
             "bash", "-ec", MAKE, "bash", place, name, SYSTEMCTL],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._processes.append(process)
        assert process.stdout.readline() == "made\n"
        (first,) = psutil.Process(process.pid).children()
        (self._folder / f"{name}.pid").write_text(str(first.pid))

    def run(self, name, *command):
        """Run a command on a host to its end; return what it printed."""
        pid = (self._folder / f"{name}.pid").read_text()
        told = subprocess.run([*ENTER.split(), pid, "--", *command], capture_output=True, text=True, check=False)
        assert not told.returncode, told.stdout + told.stderr
        return told.stdout

    def logs(self):
        """Return what the services of all hosts have written."""
        names = [path.stem for path in sorted(self._folder.glob("*.pid"))]
        return "".join(f"{name}:\n" + self.run(name, "sh", "-c", "cat /run/*.log || true") for name in names)

    def close(self):
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdout.close()
