"""Runs all checks of the doctor, and yields each finding as soon as it is known."""

import importlib
import importlib.metadata
import os
import platform
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from edgeasync.data.dataset import Dataset
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import default_device_id
from edgeasync.durable.keys import Token
from edgeasync.errors import ConfigError, EdgeAsyncError
from edgeasync.host.host_info import memory_limit_bytes
from edgeasync.host.readings import Readings
from edgeasync.host.wall_clock import written
from edgeasync.net.address import DEFAULT_ADDRESS
from edgeasync.ops.doctor.data import examine_data
from edgeasync.ops.doctor.finding import Finding, StepFinding, fail, told, warn
from edgeasync.ops.doctor.host import (
    judge_clock,
    judge_disk,
    judge_memory,
    judge_packages,
    judge_power,
    judge_processor,
    judge_provider,
    judge_python,
    judge_system,
    judge_temperature,
)
from edgeasync.ops.doctor.hub import examine_hub, judge_bandwidth, judge_traffic
from edgeasync.ops.doctor.state import closed, examine_state, is_seen, time_sync
from edgeasync.runtime.agent_settings import AgentSection, AgentSettings
from edgeasync.runtime.device import find_device
from edgeasync.training.numpy_models import Model

PACKAGES = ("msgpack", "msgspec", "numpy", "onnxruntime", "safetensors", "xxhash", "pyzmq")
MODULES = {"pyzmq": "zmq"}
INSTEAD = {"onnxruntime": "onnxruntime-gpu"}
"""Maps a package to one that provides the same module and may be installed instead."""


def examine(
    settings: AgentSettings, state: Path, model: Model | Path | None, root: Path = Path("/")
) -> Iterator[Finding]:
    """Yield the findings about a device with these agent settings. Changes nothing.

    `state` is its state folder. `model` is a model from its settings, or the path of a training
    graph. Measurements of the machine are read from files below `root`.
    """
    section, readings = settings.agent, Readings(root)
    yield from _examine_machine(section, readings, state, root)
    token, unread = None, None
    if section.enrol is not None:
        try:
            token = Token.read(section.enrol)
        except ConfigError as error:
            unread, section = told("key", error), replace(section, enrol=None)
    try:
        device_id, keys, addresses = _find(section, token)
    except EdgeAsyncError as error:
        device_id, keys, addresses = section.device_id or default_device_id(), None, section.hubs
        yield told("state", error)
    except PermissionError:
        device_id, keys, addresses = section.device_id or default_device_id(), None, section.hubs
        yield closed(state, "cannot be read by this user")
    else:
        yield examine_state(state, device_id, readings.mark())
    knocks = section.hub_key is not None
    reached = examine_hub(
        addresses or (DEFAULT_ADDRESS,), keys, token=token, insecure=section.insecure, knocks=knocks
    )
    yield from [finding for finding in reached.findings if unread is None or finding.name != unread.name]
    if unread is not None:
        yield unread
    dataset, finding = examine_data(None if section.data is None else Path(section.data))
    yield finding
    step = _examine_step(section, state, dataset, model)
    yield step.finding
    yield judge_bandwidth(reached.status, device_id)
    yield judge_traffic(reached.status, device_id, step.model_bytes, settings.limits.bytes_per_day_max)


def _find(section: AgentSection, token: Token | None) -> tuple[str, DeviceKeys | None, tuple[str, ...]]:
    """Return the device's name, its keys if it is enrolled, and the known addresses of its hub."""
    # With hub_key, `find_device` would create a key for a device that has none.
    device = find_device(replace(section, hub_key=None))
    if device.keys is not None and device.keys.knows_hub(token):
        return device.device_id, device.keys, section.hubs or device.keys.hub().addresses
    return device.device_id, None, section.hubs or (() if token is None else token.addresses)


def _examine_machine(section: AgentSection, readings: Readings, state: Path, root: Path) -> Iterator[Finding]:
    yield judge_python(sys.version_info[:3])
    machine = platform.machine()
    yield judge_system(platform.system(), machine, 8 * struct.calcsize("P"), readings.board())
    yield judge_packages({name: find_version(name) for name in PACKAGES})
    yield _examine_provider(section)
    cores = len(os.sched_getaffinity(0))
    yield judge_processor(machine, cores, section.cores_used, readings.processor())
    yield judge_memory(readings.memory(), memory_limit_bytes(root))
    existing = next(path for path in (state, *state.parents) if is_seen(path))
    free_bytes = shutil.disk_usage(existing).free
    yield judge_disk(free_bytes, readings.mount(existing.resolve()), time_sync(state))
    throttled = readings.throttled()
    yield judge_temperature(readings.zones(), throttled)
    yield judge_power(readings.power(), throttled)
    now_s = time.time()
    yield judge_clock(now_s, written(now_s), synchronized=readings.clock_synchronized())


def _examine_provider(section: AgentSection) -> Finding:
    try:
        import onnxruntime  # noqa: PLC0415 - if the import fails, the other checks still run

        from edgeasync.training.onnx_session import providers_that_start  # noqa: PLC0415
    except Exception as error:  # noqa: BLE001 - a broken library may raise anything
        return fail("provider", f"cannot import onnxruntime ({error})", "reinstall onnxruntime")
    started = providers_that_start(section.provider, section.cores_used)
    return judge_provider(section.provider, onnxruntime.get_available_providers(), started)


def _examine_step(
    section: AgentSection, state: Path, dataset: Dataset | None, model: Model | Path | None
) -> StepFinding:
    try:
        from edgeasync.ops.doctor.training import examine_step, find_graph  # noqa: PLC0415
    except Exception:  # noqa: BLE001 - a broken library may raise anything
        return StepFinding(
            warn("step", "not measured: cannot import onnxruntime", "fix the problem in the line 'provider'"), 0
        )
    return examine_step(dataset, model or find_graph(state), section.provider, section.cores_used)


def find_version(name: str) -> str | None:
    """Return the version of a package, or `None` if it cannot be imported."""
    try:
        importlib.import_module(MODULES.get(name, name))
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return importlib.metadata.version(INSTEAD[name])
    except Exception:  # noqa: BLE001 - a wheel of another platform may raise anything
        return None
