"""Settings and state folder of a device, for the commands `agent`, `peer` and `doctor`."""

import sys
from pathlib import Path
from typing import TextIO, TypeVar

from msgspec.structs import replace

from edgeasync.cli.mistakes import check_settings_file
from edgeasync.cli.settings_flags import Flags, apply_flags
from edgeasync.config import Section, expanded, read_toml
from edgeasync.durable.identity import default_device_id
from edgeasync.errors import ConfigError
from edgeasync.runtime.device_settings import DeviceSection

Settings = TypeVar("Settings", bound=Section)


TOKEN_CHARACTERS_MAX = 65_536
"""The longest line that is read from standard input."""


def read_settings(config: Path | None, kind: type[Settings], said: Flags) -> Settings:
    """Return the settings of a file, flags, or both. Flags override the file."""
    for keys in said.values():
        if keys.get("enrol") == "-":
            keys["enrol"] = _read_token(sys.stdin)
    check_settings_file(config, {".npz": "--data", ".csv": "--data", ".onnx": "--model"})
    settings = kind() if config is None else read_toml(config, kind)
    tables = {path: apply_flags(getattr(settings, path), keys) for path, keys in said.items() if path != "model"}
    return replace(settings, **tables)


def _read_token(file: TextIO) -> str:
    """Return the token in the first line of standard input. Raises `ConfigError` if it is empty."""
    try:
        token = file.readline(TOKEN_CHARACTERS_MAX).strip()
    except (OSError, ValueError):
        token = ""
    if not token:
        raise ConfigError("--enrol -: standard input has no token; run edgeasync agent --enrol - < TOKEN_FILE")
    return token


def state_folder(section: DeviceSection) -> Path:
    """Return the device's state folder, by default a folder in the user's home with the device's name."""
    state = section.state or f"~/.local/state/edgeasync/{section.device_id or default_device_id()}"
    return expanded(state)


def hang_of(stalled_s: float, section: DeviceSection) -> str:
    """Return a status line if the trainer hangs, or "".

    The event loop calls this function, so a call proves that the loop itself does not hang.
    """
    limit_s = section.progress_s + section.step_s_min
    return f"hangs: no local step for {stalled_s:.0f} s" if stalled_s > limit_s else ""
