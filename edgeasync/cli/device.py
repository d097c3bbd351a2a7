"""A device as `edgeasync agent`, with a hub or without, and `edgeasync doctor` find it by settings and flags."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edgeasync.cli.mistakes import check_settings_file
from edgeasync.config import convert, expanded, read_toml, to_table
from edgeasync.durable.identity import default_device_id
from edgeasync.runtime.agent_settings import AgentSection, AgentSettings


def read_settings(config: Path | None, flags: dict[str, Any]) -> AgentSettings:
    """Return the settings of a file, keys of `[agent]`, or both; a flag wins over the file."""
    check_settings_file(config, {".npz": "--data", ".csv": "--data", ".onnx": "--model"})
    settings = AgentSettings() if config is None else read_toml(config, AgentSettings)
    return replace(settings, agent=convert(to_table(settings.agent) | flags, AgentSection, where="flags"))


def state_folder(section: AgentSection) -> Path:
    """Return a device's folder: one of its own under the user's, unless the settings name one."""
    state = section.state or f"~/.local/state/edgeasync/{section.device_id or default_device_id()}"
    return expanded(state)


def hang_of(stalled_s: float, section: AgentSection) -> str:
    """Return what hangs, if something does: the loop runs, as it calls this, so it is the trainer."""
    limit_s = section.progress_s + section.step_s_min
    return f"hangs: no local step for {stalled_s:.0f} s" if stalled_s > limit_s else ""
