"""A device as `edgeasync agent`, `edgeasync peer` and `edgeasync doctor` find it by settings and flags."""

from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from edgeasync.cli.mistakes import check_settings_file
from edgeasync.cli.settings_flags import Flags, apply_flags
from edgeasync.config import Section, expanded, read_toml
from edgeasync.durable.identity import default_device_id
from edgeasync.runtime.device_settings import DeviceSection

Settings = TypeVar("Settings", bound=Section)


def read_settings(config: Path | None, kind: type[Settings], said: Flags) -> Settings:
    """Return the settings of a file, what flags say of its tables, or both; a flag wins over the file."""
    check_settings_file(config, {".npz": "--data", ".csv": "--data", ".onnx": "--model"})
    settings = kind() if config is None else read_toml(config, kind)
    tables = {path: apply_flags(getattr(settings, path), keys) for path, keys in said.items() if path != "model"}
    return replace(settings, **tables)


def state_folder(section: DeviceSection) -> Path:
    """Return a device's folder: one of its own under the user's, unless the settings name one."""
    state = section.state or f"~/.local/state/edgeasync/{section.device_id or default_device_id()}"
    return expanded(state)


def hang_of(stalled_s: float, section: DeviceSection) -> str:
    """Return what hangs, if something does: the loop runs, as it calls this, so it is the trainer."""
    limit_s = section.progress_s + section.step_s_min
    return f"hangs: no local step for {stalled_s:.0f} s" if stalled_s > limit_s else ""
