"""A folder that looks like the root of a board: parts of `/sys`, `/proc`, `/run` and `/etc`."""

BOARD = {
    "sys/firmware/devicetree/base/model": "Raspberry Pi 4 Model B Rev 1.4\0",
    "sys/firmware/devicetree/base/serial-number": "10000000abcdef01\0",
    "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
    "sys/class/thermal/thermal_zone0/temp": "52000\n",
    "sys/devices/platform/soc/soc:firmware/get_throttled": "0\n",
    "proc/meminfo": "MemTotal:        3884000 kB\nMemAvailable:    3100000 kB\n",
    "proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd avx2 crc32\nCPU part\t: 0xd08\n",
    "proc/self/mounts": "/dev/mmcblk0p2 / ext4 rw,noatime 0 0\n",
    "run/systemd/timesync/synchronized": "",
}
"""A healthy Raspberry Pi 4."""


def write(root, files):
    """Write files below a folder; return it."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root
