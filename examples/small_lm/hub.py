"""Serve a language model whose LoRA adapters devices train. `fleet.py` starts this program.

Run as `python examples/small_lm/hub.py lm.onnx`. The same command continues a run that was
interrupted.
"""

import argparse
from pathlib import Path

from edgeasync import Adam, Hub, Stop
from edgeasync.callbacks import Progress
from edgeasync.lora import LoRA


def main() -> None:
    """Serve the model until the devices have sent all updates."""
    parser = argparse.ArgumentParser(description="Fine-tune a language model by LoRA on a frozen base.")
    parser.add_argument("model", type=Path, help="ONNX file that make_model.py has written")
    parser.add_argument("--run", type=Path, default=Path("runs/small-lm"))
    parser.add_argument("--bind", default="tcp://127.0.0.1:5555", metavar="ADDRESS", help="of the hub")
    parser.add_argument("--base", default="int4", choices=["float32", "int8", "int4"])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="*.q_proj,*.v_proj", help="layers that get adapters")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--updates", type=int, default=80, help="of all devices together")
    parser.add_argument("--personal", action="store_true", help="each device keeps its own matrices B")
    arguments = parser.parse_args()
    hub = Hub(
        arguments.model,
        run=arguments.run / "hub",
        bind=arguments.bind,
        base=None if arguments.base == "float32" else arguments.base,
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
        hub.wait()


if __name__ == "__main__":
    main()
