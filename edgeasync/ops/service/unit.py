"""The text of a systemd unit. Reads and writes no files.

All lines are valid in systemd 250 and newer, so `systemd-analyze verify` prints nothing on Debian
12.
"""

from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal["agent", "hub", "peer"]

USER = "edgeasync"
"""The user that runs the machine's services."""


class Unit(msgspec.Struct, frozen=True):
    """A systemd unit: the program, its kind, its folder, and the user that runs it.

    Without `user`, the unit belongs to a user's own systemd, which cannot drop privileges. An agent
    is restarted even if it exits normally, because its hub may start another run. A hub or peer
    that exits normally is not restarted.
    """

    kind: Kind
    program: Path
    folder: Path
    user: str | None = USER
    name: str = ""

    @property
    def file(self) -> str:
        """The file name of the unit."""
        return f"{self.name or f'edgeasync-{self.kind}'}.service"

    @property
    def settings(self) -> Path:
        """The path of the settings file. If the unit has a name of its own, the file has the same name."""
        return self.folder / f"{self.name or self.kind}.toml"

    def text(self) -> str:
        """Return the content of the unit file."""
        sections = {"Unit": self._unit(), "Service": self._service(), "Install": [f"WantedBy={self.target}"]}
        return "\n\n".join("\n".join([f"[{name}]", *lines]) for name, lines in sections.items()) + "\n"

    @property
    def target(self) -> str:
        """The systemd target that starts the unit."""
        return "multi-user.target" if self.user else "default.target"

    def _unit(self) -> list[str]:
        online = ["Wants=network-online.target", "After=network-online.target"] if self.user else []
        return [f"Description=edgeasync {self.kind}", *online, "StartLimitIntervalSec=0"]

    def _service(self) -> list[str]:
        waits = self.kind == "agent"
        return [
            "Type=notify",
            *([f"User={self.user}"] if self.user else []),
            *self._state(),
            f"WorkingDirectory={_escaped(self.folder)}",
            f"ExecStart={_quoted(self.program)} {self.kind} {self.settings.name}{_WAITS if waits else ''}",
            f"ExecStopPost={_WAIT}",
            f"Restart={'always' if waits else 'on-failure'}",
            "RestartSec=2",
            f"RestartPreventExitStatus={_INCURABLE[self.kind]}",
            "WatchdogSec=60",
            f"TimeoutStartSec={_START_S[self.kind]}",
            "TimeoutStopSec=60",
            "UMask=0077",
            *(_RIGHTS if self.user else ()),
        ]

    def _state(self) -> list[str]:
        """Return the lines that make systemd create the folder for the user."""
        if self.user is None or self.folder.parent != Path("/var/lib"):
            return [f"ReadWritePaths={_quoted(self.folder)}"] if self.user else []
        return [f"StateDirectory={_quoted(Path(self.folder.name))}", "StateDirectoryMode=0700"]


_WAITS = " --when-finished wait"

_INCURABLE = {"agent": "2 3 5 7 8 10", "hub": "2 3 5 8 10", "peer": "2 3 5 7 8 10"}
"""Exit codes after which a restart would fail in the same way."""

_START_S = {"agent": 300, "hub": 900, "peer": 300}
"""Start timeouts in seconds. A slow board needs time to load its data, and a hub needs time to
replay its journal.
"""

_WAIT = """/bin/sh -c 'case "$$EXIT_STATUS" in 1|4|6|9|11|14) sleep 30;; esac'"""
"""Delays the restart by 30 seconds after errors that a person must fix, such as a full disk."""

_RIGHTS = (
    "CapabilityBoundingSet=",
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "PrivateTmp=yes",
    "ProtectKernelTunables=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "RemoveIPC=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
)
"""Settings that drop privileges of the service.

The service keeps access to device files, which GPUs need, and to writable executable memory.
"""


def _quoted(path: Path) -> str:
    """Return a path quoted for a systemd setting that splits words."""
    text = _escaped(path).replace("$", "$$")
    return f'"{text}"' if any(one.isspace() for one in text) else text


def _escaped(path: Path) -> str:
    """Return a path with percent signs escaped, because they would start a specifier."""
    return str(path).replace("%", "%%")
