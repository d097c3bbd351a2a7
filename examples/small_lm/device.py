"""Train a language model's adapters on one device's text, and measure it on the device's later text.

Run as `python examples/small_lm/device.py reference tcp://127.0.0.1:5555 texts`, beside `hub.py`.
Prints one line of JSON at the end.
"""

import argparse
import json
import math
import resource
from pathlib import Path

from edgeasync import Agent
from edgeasync.callbacks import Event, ExchangeEvent

TIMEOUT_S = 900.0
"""Time without an answer of the hub after which the device ends. A hub that builds a large model
needs minutes before its first answer.
"""


def main() -> None:
    """Train until the hub ends the run."""
    parser = argparse.ArgumentParser(description="Train on the text of one device.")
    parser.add_argument("name", help="of the device, and of its files in the folder")
    parser.add_argument("hub", help="address of the hub")
    parser.add_argument("texts", type=Path, help="folder that texts.py has written")
    parser.add_argument("--state", type=Path, help="folder for the device's state")
    arguments = parser.parse_args()
    name, texts = arguments.name, arguments.texts
    later, exchanges = texts / f"{name}-later.npz", list[ExchangeEvent]()

    def collect(event: Event) -> None:
        if isinstance(event, ExchangeEvent):
            exchanges.append(event)

    own = {"name": name, "state": arguments.state, "threads": 1, "timeout_s": TIMEOUT_S}
    with Agent(arguments.hub, texts / f"{name}.npz", callbacks=[collect], **own) as agent:
        agent.wait_until_joined()
        before = agent.evaluate(later)
        agent.wait()
        after = agent.evaluate(later)
    steps, later_ones = sum(event.local_steps for event in exchanges), exchanges[1:]  # the first one has the model
    found = {
        "device": name,
        "perplexity_before": math.exp(before.loss),
        "perplexity_after": math.exp(after.loss),
        "step_s": exchanges[-1].time_s / steps if steps else math.nan,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "exchange_bytes": sum(event.bytes_up + event.bytes_down for event in later_ones) / max(1, len(later_ones)),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
