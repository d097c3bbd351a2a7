"""Judges measurements of a machine. This module does not measure anything itself."""

from collections.abc import Mapping, Sequence

from edgeasync.host.readings import Memory, Mount, Power, Processor, Zone
from edgeasync.ops.doctor.finding import Finding, fail, ok, warn

PYTHON_MIN = (3, 11)
MACHINES = ("x86_64", "aarch64")

AGENT_BYTES = 128 << 20
"""Memory that an agent needs to train a small convolutional network."""

DISK_BYTES_MIN = 64 << 20
SYNC_S_SLOW = 0.5
HOT_C, WARM_C = 80.0, 70.0
BATTERY_LOW = 0.2

CLOCK_MIN_S = 1_735_689_600.0
"""The start of 2025. A clock that shows an earlier time has never been set."""

FEATURES = {"aarch64": ("asimd",), "x86_64": ("avx2",)}
"""Instruction sets without which onnxruntime is several times slower."""

ON_MEMORY = ("tmpfs", "ramfs")


def judge_python(version: Sequence[int]) -> Finding:
    """Judge the version of Python."""
    shown = ".".join(map(str, version))
    if tuple(version[:2]) < PYTHON_MIN:
        return fail("python", f"Python {shown}", "install Python 3.11 or newer, then install edgeasync with it")
    return ok("python", f"Python {shown}")


def judge_system(system: str, machine: str, bits: int, board: str) -> Finding:
    """Judge the operating system and the processor architecture."""
    shown = ", ".join(filter(None, (f"{system} {machine}", f"{bits} bits", board)))
    if bits != 64:
        cure = "install a 64-bit system: onnxruntime has no packages for 32 bits"
        return fail("system", shown, cure)
    if system != "Linux" or machine not in MACHINES:
        return warn(
            "system", shown, f"edgeasync is not tested on this system; use Linux on {' or '.join(MACHINES)}"
        )
    return ok("system", shown)


def judge_packages(found: Mapping[str, str | None]) -> Finding:
    """Judge the installed packages. `found` maps names to versions, `None` if the import failed."""
    if missing := [name for name, version in found.items() if version is None]:
        cure = "reinstall edgeasync with 'pip install --force-reinstall edgeasync' or install.sh"
        return fail("packages", f"cannot import {', '.join(missing)}", cure)
    return ok("packages", ", ".join(f"{name} {version}" for name, version in found.items()))


def judge_provider(wanted: str, available: Sequence[str], started: Sequence[str]) -> Finding:
    """Judge which execution providers start. `wanted` is the agent's setting."""
    names = [name.removesuffix("ExecutionProvider") for name in started]
    if not names:
        return fail(
            "provider", "no provider of onnxruntime starts", "run 'pip install --force-reinstall onnxruntime'"
        )
    first, shown = names[0].lower(), f"{names[0]} runs the model"
    if wanted in ("cuda", "tensorrt") and first != wanted:
        has = (
            f"{wanted.upper()} fails to start"
            if f"{wanted}executionprovider" in _lower(available)
            else f"{wanted} is not installed"
        )
        cure = "install onnxruntime-gpu with its driver, CUDA and cuDNN, or set provider = 'cpu'"
        return warn("provider", f"{shown}, {has}", cure)
    if wanted == "auto" and first == "cpu" and "cudaexecutionprovider" in _lower(available):
        cure = "install the driver, CUDA and cuDNN that onnxruntime-gpu needs, or set provider = 'cpu'"
        return warn("provider", f"{shown}, the GPU fails to start", cure)
    return ok("provider", shown)


def _lower(names: Sequence[str]) -> list[str]:
    return [name.lower() for name in names]


def judge_processor(machine: str, cores: int, threads: int, processor: Processor) -> Finding:
    """Judge the processor: its instruction sets, and the number of threads."""
    shown = ", ".join(filter(None, (processor.name, f"{cores} cores")))
    missing = [name for name in FEATURES.get(machine, ()) if processor.features and name not in processor.features]
    if missing:
        return warn(
            "processor", f"{shown}, without {', '.join(missing)}", "expect slow steps, or use a newer board"
        )
    if threads > cores:
        return warn("processor", f"{shown}, threads = {threads}", f"set threads to {cores} or less")
    return ok("processor", shown)


def judge_memory(memory: Memory | None, limit_bytes: int) -> Finding:
    """Judge the memory. `limit_bytes` is the limit of the cgroup, 0 if unknown."""
    if memory is None:
        return warn("memory", "not reported by the system", "check that at least 128 MiB are free for an agent")
    available = min(memory.available_bytes, limit_bytes or memory.available_bytes)
    shown = f"{_mebibytes(available)} of {_mebibytes(memory.total_bytes)} free"
    if available < AGENT_BYTES // 2:
        return fail("memory", shown, "stop other programs, add swap (zram), or raise the unit's memory limit")
    if available < AGENT_BYTES:
        return warn("memory", shown, "train a small model, set micro_batch_size = 'auto', or stop other programs")
    return ok("memory", shown)


def judge_disk(free_bytes: int, mount: Mount | None, sync_s: float | None) -> Finding:
    """Judge the disk of the state folder.

    `sync_s` is the number of seconds that syncing a small file takes, or None if unknown.
    """
    kind = "" if mount is None else f" on {mount.kind}"
    shown = f"{_mebibytes(free_bytes)} free{kind}"
    if mount is not None and mount.read_only:
        return fail(
            "disk", f"{mount.point} is mounted read-only", "check the card, then 'sudo mount -o remount,rw /'"
        )
    if free_bytes < DISK_BYTES_MIN:
        return fail("disk", shown, "free disk space, or move the state to another disk (--state)")
    if sync_s is None:
        return ok("disk", shown)
    shown = f"{shown}, a sync takes {1000 * sync_s:.0f} ms"
    if sync_s > SYNC_S_SLOW:
        return warn("disk", shown, "use spool = 'identity', or replace the card, which may be worn out")
    if mount is not None and mount.kind in ON_MEMORY:
        cure = "move the state to a disk (--state): the device loses its identity at a reboot"
        return warn("disk", f"{shown}; stored in memory", cure)
    return ok("disk", shown)


def judge_temperature(zones: Sequence[Zone], throttled: Sequence[str] | None) -> Finding:
    """Judge the temperature, and whether a Raspberry Pi throttles."""
    hottest = max(zones, key=lambda zone: zone.celsius, default=None)
    slowed = [reason for reason in throttled or () if "voltage" not in reason]
    if hottest is None:
        return ok("temperature", "no sensor")
    shown = f"{hottest.celsius:.0f} C ({hottest.name})" + (f", {', '.join(slowed)}" if slowed else "")
    if hottest.celsius >= HOT_C:
        return warn("temperature", shown, "cool the board, or set step_s_min: heat slows and ages a board")
    if hottest.celsius >= WARM_C or slowed:
        return warn("temperature", shown, "cool the board: long training will heat it further")
    return ok("temperature", shown)


def judge_power(power: Power | None, throttled: Sequence[str] | None) -> Finding:
    """Judge the power supply."""
    weak = [reason for reason in throttled or () if "voltage" in reason]
    if weak:
        return warn("power", ", ".join(weak), "use the board's own power supply and a short, thick cable")
    if power is None:
        return ok("power", "no battery")
    battery = "" if power.battery is None else f"battery at {power.battery:.0%}"
    if power.mains or not power.discharging:
        return ok("power", ", ".join(filter(None, ("on mains" if power.mains else "", battery))) or "no battery")
    if power.battery is not None and power.battery < BATTERY_LOW:
        return warn("power", f"{battery}, not on mains", "connect the charger: training drains it within hours")
    return ok("power", f"{battery}, not on mains")


def judge_clock(now_s: float, shown: str, *, synchronized: bool | None) -> Finding:
    """Judge the clock. Logs and tokens need a correct time; training does not."""
    if now_s < CLOCK_MIN_S:
        return warn("clock", f"{shown}, never set", "enable systemd-timesyncd: 'sudo timedatectl set-ntp true'")
    if synchronized is False:
        return warn(
            "clock", f"{shown}, not synchronized", "run 'sudo timedatectl set-ntp true', and open UDP port 123"
        )
    return ok("clock", shown)


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
