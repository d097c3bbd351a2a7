"""A fresh Raspberry Pi OS of this machine's processor, as near as packages of Debian come: for tests, as root.

Debian 13 with its cloud-init, which looks at the boot partition as Raspberry Pi OS's does. What it needs of
systemd, `tests/support/boards/systemctl.py` does.
"""

import subprocess

from tests.support.boards.arm import mirror
from tests.support.boards.hosts import PATH, SYSTEMCTL

PACKAGES = "python3-venv,cloud-init,systemd"
CLOUD_CONFIG = """\
datasource_list: [NoCloud, None]
datasource:
  NoCloud:
    seedfrom: file:///boot/firmware
"""
USER_DATA = """\
#cloud-config
manage_resolv_conf: false

hostname: greenhouse-1
ssh_pwauth: false

runcmd:
  - [ sh, -c, "echo done > /root/of-imager" ]
"""
"""As Raspberry Pi Imager 2 writes it."""

ENTER = """
cd "$1"
shift
mount -t proc proc proc
mount --rbind /dev dev
for folder in run tmp; do mount -t tmpfs tmpfs $folder; done
exec chroot . env -i HOME=/root PATH=%s LC_ALL=C.UTF-8 "$@"
"""
BOOT = """
cloud-init schema --config-file /boot/firmware/user-data
cloud-init init --local && cloud-init init
cloud-init modules --mode=config && cloud-init modules --mode=final
hostname
"""


def write_boot(folder):
    """Write what Imager leaves on a card's first partition; return it."""
    folder.mkdir(parents=True)
    (folder / "cmdline.txt").write_text("console=tty1 root=PARTUUID=1 rootfstype=ext4 rootwait\n")
    (folder / "meta-data").write_text("instance-id: rpi-imager-1795440000000\n")
    (folder / "user-data").write_text(USER_DATA)
    return folder


class Card:
    """A card in a folder."""

    def __init__(self, folder):
        self.root = folder / "card"
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=essential", f"--include={PACKAGES}",
             '--aptopt=Acquire::Check-Valid-Until "false"', '--aptopt=Acquire::Check-Date "false"',
             "trixie", str(self.root), mirror()],
            check=True,
        )  # fmt: skip
        (self.root / "etc/cloud/cloud.cfg.d/99-raspberry-pi.cfg").write_text(CLOUD_CONFIG)
        systemctl = self.root / "usr/local/bin/systemctl"
        systemctl.write_text(f"#!/usr/bin/env python3\n{SYSTEMCTL.read_text()}")
        systemctl.chmod(0o755)
        self.boot = write_boot(self.root / "boot/firmware")

    def enter(self, *, network):
        """Return the command under which another runs in this system; when it ends, so does all it has started."""
        apart = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", *([] if network else ["--net"])]
        return [*apart, "bash", "-ec", ENTER % PATH, "bash", str(self.root)]

    def first_boot(self):
        """Do what cloud-init does at the first boot, without a network; return what it printed."""
        told = subprocess.run(
            [*self.enter(network=False), "sh", "-ec", BOOT], capture_output=True, text=True, check=False
        )
        return told.stdout + told.stderr
