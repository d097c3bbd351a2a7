"""The text of a unit for systemd. Nothing is read or written here.

Each line is known to systemd 250 and newer, so that `systemd-analyze verify` prints nothing on Debian 12 either.
"""

from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal["agent", "hub", "peer"]

USER = "edgeasync"
"""The user of the machine's services."""


class Unit(msgspec.Struct, frozen=True):
    """What a unit says: which program runs as what, in which folder, by which settings file there.

    Without a `user` it is a unit of somebody's own systemd, which may not take rights away from itself. An agent
    waits for its hub's next run, so only a person ends it. A hub or a peer that has ended in order stays down.
    """

    kind: Kind
    program: Path
    folder: Path
    user: str | None = USER
    name: str = ""

    @property
    def file(self) -> str:
        """The unit's name, with its suffix."""
        return f"{self.name or f'edgeasync-{self.kind}'}.service"

    @property
    def settings(self) -> Path:
        """The settings file; each unit of a name of its own has one of that name."""
        return self.folder / f"{self.name or self.kind}.toml"

    def text(self) -> str:
        """Return the content of the unit's file."""
        sections = {"Unit": self._unit(), "Service": self._service(), "Install": [f"WantedBy={self.target}"]}
        return "\n\n".join("\n".join([f"[{name}]", *lines]) for name, lines in sections.items()) + "\n"

    @property
    def target(self) -> str:
        """What starts the unit."""
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
        """Return the lines by which systemd makes the folder and gives it to the user."""
        if self.user is None or self.folder.parent != Path("/var/lib"):
            return [f"ReadWritePaths={_quoted(self.folder)}"] if self.user else []
        return [f"StateDirectory={_quoted(Path(self.folder.name))}", "StateDirectoryMode=0700"]


_WAITS = " --when-finished wait"

_INCURABLE = {"agent": "2 3 5 7 8 10", "hub": "2 3 5 8 10", "peer": "2 3 5 7 8 10"}
"""Exit codes after which another start would end in the same way."""

_START_S = {"agent": 300, "hub": 900, "peer": 300}
"""How long a slow board may read its data, and a hub a long journal."""

_WAIT = """/bin/sh -c 'case "$$EXIT_STATUS" in 1|4|6|9|11|14) sleep 30;; esac'"""
"""What died is started at once; what a person has to cure, such as a full disk or a key, every half minute."""

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
"""What the service gives up. It keeps the devices, for a GPU, and memory that is written and then executed."""


def _quoted(path: Path) -> str:
    """Return a path as systemd reads it where several words may stand."""
    text = _escaped(path).replace("$", "$$")
    return f'"{text}"' if any(one.isspace() for one in text) else text


def _escaped(path: Path) -> str:
    """Return a path in which no percent sign begins a specifier."""
    return str(path).replace("%", "%%")
