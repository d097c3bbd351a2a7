"""Fine-tune a language model on four devices with different texts, by LoRA adapters on a frozen base.

Run as `python examples/small_lm/fleet.py lm.onnx texts`, after `make_model.py` and `texts.py`. The hub
and every device are processes of their own. Further arguments are those of `hub.py`, such as
`--personal`, with which each device keeps its own matrices B. The same command continues a run that
was interrupted.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from edgeasync import fetch_status
from edgeasync.errors import HubUnreachableError

KILLED = "characters"
"""The device that `--kill` ends and starts again."""

Process = subprocess.Popen[str]


def start(program: str, *arguments: object) -> Process:
    """Start a program of this folder."""
    command = [sys.executable, str(Path(__file__).with_name(program)), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603


def end_if_failed(hub: Process, devices: Iterable[Process]) -> None:
    """End the devices if the hub has failed. They would wait for it for minutes."""
    if hub.poll():
        for device in devices:
            device.kill()
        sys.exit(f"the hub failed with exit code {hub.returncode}; its message is above")


def wait_for_update(number: int, hub: Process, devices: Collection[Process], address: str) -> None:
    """Wait until the hub has applied this number of updates, or has ended."""
    while hub.poll() is None:
        try:
            if fetch_status(address)["updates_applied"] >= number:
                return
        except HubUnreachableError:
            pass  # it builds the model
        time.sleep(0.1)
    end_if_failed(hub, devices)


def kill(process: Process, name: str) -> None:
    """End a process as a power cut does."""
    process.kill()
    process.communicate()
    print(f"{name}: killed and started again", flush=True)


def train(arguments: argparse.Namespace, for_hub: list[str]) -> list[dict[str, Any]]:
    """Run the hub and its devices, and return what the devices measured."""
    run, texts, address = arguments.run, arguments.texts, arguments.bind

    def start_hub() -> Process:
        return start("hub.py", arguments.model, "--run", run, "--bind", address, *for_hub)

    def start_device(name: str) -> Process:
        return start("device.py", name, address, texts, "--state", run / f"device-{name}")

    hub = start_hub()
    names = sorted(path.stem.removesuffix("-later") for path in texts.glob("*-later.npz"))
    devices = {name: start_device(name) for name in names}
    if arguments.kill:
        wait_for_update(1, hub, devices.values(), address)
        kill(devices[KILLED], KILLED)
        devices[KILLED] = start_device(KILLED)
        wait_for_update(5, hub, devices.values(), address)
        kill(hub, "hub")
        hub = start_hub()
    while any(process.poll() is None for process in devices.values()):
        end_if_failed(hub, devices.values())
        time.sleep(0.1)
    printed = {name: process.communicate()[0] for name, process in devices.items()}
    hub.wait()
    if failed := [name for name, process in {"hub": hub, **devices}.items() if process.returncode]:
        sys.exit(f"{', '.join(failed)} failed; the messages are above")
    return [json.loads(lines) for lines in printed.values()]


def main() -> None:
    """Train, and print the perplexity of each device's later text before and after."""
    parser = argparse.ArgumentParser(description="Fine-tune a language model on four devices.")
    parser.add_argument("model", type=Path, help="ONNX file that make_model.py has written")
    parser.add_argument("texts", type=Path, help="folder that texts.py has written")
    parser.add_argument("--run", type=Path, default=Path("runs/small-lm"))
    parser.add_argument("--bind", default="tcp://127.0.0.1:5555", metavar="ADDRESS", help="of the hub")
    parser.add_argument("--kill", action="store_true", help="kill a device and the hub, and start them again")
    measured = train(*parser.parse_known_args())
    print(f"{'device':<12} {'before':>8} {'after':>8} {'s a step':>9} {'peak MiB':>9} {'kB an exchange':>15}")
    for found in measured:
        print(
            f"{found['device']:<12} {found['perplexity_before']:>8.0f} {found['perplexity_after']:>8.0f} "
            f"{found['step_s']:>9.2f} {found['peak_mib']:>9.0f} {found['exchange_bytes'] / 1e3:>15.0f}"
        )


if __name__ == "__main__":
    main()
