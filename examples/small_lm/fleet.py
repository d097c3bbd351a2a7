"""Fine-tune a language model on four devices with different texts, by LoRA adapters on a frozen base.

Run as `python examples/small_lm/fleet.py lm.onnx texts`, after `make_model.py` and `texts.py`. Every
device is a process of its own. With `--personal`, each device keeps its own matrices B. The same
command continues a run that was interrupted.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from edgeasync import Adam, Hub, Stop
from edgeasync.callbacks import Progress
from edgeasync.lora import LoRA

DEVICE = Path(__file__).with_name("device.py")
KILLED = "characters"
"""The device that `--kill` ends and starts again."""


def start(name: str, hub: Hub, texts: Path, run: Path) -> subprocess.Popen[str]:
    """Start the process of a device."""
    command = [sys.executable, str(DEVICE), name, hub.address, str(texts), "--state", str(run / f"device-{name}")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603


def train(arguments: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Run the hub and its devices, and return what the devices measured."""
    run: Path = arguments.run
    hub = Hub(
        arguments.model,
        run=run / "hub",
        bind="tcp://127.0.0.1:*",
        base=arguments.base,
        lora=LoRA(rank=arguments.rank, targets=arguments.targets),
        train=["*norm.weight"],
        recompute=True,
        local=["*lora_B*"] if arguments.personal else [],
        batch_size=1,
        optimizer=Adam(learning_rate=arguments.learning_rate),
        keep_optimizer_state=True,
        until=Stop(updates=arguments.updates),
        callbacks=[Progress()],
    )
    with hub:
        devices = {name: start(name, hub, arguments.texts, run) for name in names}
        if arguments.kill:
            hub.wait_for(len(names))
            while not hub.status()["updates_applied"]:
                time.sleep(0.1)
            devices[KILLED].kill()
            devices[KILLED].communicate()
            print(f"{KILLED}: killed and started again", flush=True)
            devices[KILLED] = start(KILLED, hub, arguments.texts, run)
        printed = {name: process.communicate()[0] for name, process in devices.items()}
    if failed := [name for name, process in devices.items() if process.returncode]:
        sys.exit(f"{', '.join(failed)} failed; the messages are above")
    return [json.loads(lines) for lines in printed.values()]


def main() -> None:
    """Train, and print the perplexity of each device's later text before and after."""
    parser = argparse.ArgumentParser(description="Fine-tune a language model on four devices.")
    parser.add_argument("model", type=Path, help="ONNX file that make_model.py has written")
    parser.add_argument("texts", type=Path, help="folder that texts.py has written")
    parser.add_argument("--run", type=Path, default=Path("runs/small-lm"))
    parser.add_argument("--base", default="int4", choices=["float32", "int8", "int4"])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="*.q_proj,*.v_proj", help="layers that get adapters")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--updates", type=int, default=80, help="of all devices together")
    parser.add_argument("--personal", action="store_true", help="each device keeps its own matrices B")
    parser.add_argument("--kill", action="store_true", help="kill a device on the way, and start it again")
    arguments = parser.parse_args()
    names = sorted(path.stem.removesuffix("-later") for path in arguments.texts.glob("*-later.npz"))
    measured = train(arguments, names)
    print(f"{'device':<12} {'before':>8} {'after':>8} {'s a step':>9} {'peak MiB':>9} {'kB an exchange':>15}")
    for found in measured:
        print(
            f"{found['device']:<12} {found['perplexity_before']:>8.0f} {found['perplexity_after']:>8.0f} "
            f"{found['step_s']:>9.2f} {found['peak_mib']:>9.0f} {found['exchange_bytes'] / 1e3:>15.0f}"
        )


if __name__ == "__main__":
    main()
