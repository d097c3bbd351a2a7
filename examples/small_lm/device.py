"""Train a language model's adapters on one device's text, and measure it on the device's later text.

Run as `python examples/small_lm/device.py reference tcp://127.0.0.1:5555 texts`, beside the hub of
`fleet.py`. Prints one line of JSON at the end.
"""

import argparse
import json
import math
import resource
from pathlib import Path

from edgeasync import Agent
from edgeasync.callbacks import Event, ExchangeEvent


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

    agent = Agent(
        arguments.hub, texts / f"{name}.npz", name=name, state=arguments.state, threads=1, callbacks=[collect]
    )
    with agent:
        agent.wait_until_joined()
        before = agent.evaluate(later)
        agent.wait()
        after = agent.evaluate(later)
    found = {
        "device": name,
        "perplexity_before": math.exp(before.loss),
        "perplexity_after": math.exp(after.loss),
        "step_s": exchanges[-1].time_s / sum(event.local_steps for event in exchanges),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "exchange_bytes": sum(event.bytes_up + event.bytes_down for event in exchanges[1:]) / len(exchanges[1:]),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
