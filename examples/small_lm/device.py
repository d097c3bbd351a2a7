"""Train a language model's adapters on one device's text, and measure it on the device's later text.

Run as `python examples/small_lm/device.py reference tcp://127.0.0.1:5555 texts`, beside the hub of
`fleet.py`. Prints one line of JSON at the end.
"""

import argparse
import json
import math
import resource
import time
from pathlib import Path

from edgeasync import Agent


def main() -> None:
    """Train until the hub ends the run."""
    parser = argparse.ArgumentParser(description="Train on the text of one device.")
    parser.add_argument("name", help="of the device, and of its files in the folder")
    parser.add_argument("hub", help="address of the hub")
    parser.add_argument("texts", type=Path, help="folder that texts.py has written")
    parser.add_argument("--state", type=Path, help="folder for the device's state")
    arguments = parser.parse_args()
    name, texts = arguments.name, arguments.texts
    later = texts / f"{name}-later.npz"
    began = time.monotonic()
    with Agent(arguments.hub, texts / f"{name}.npz", name=name, state=arguments.state) as agent:
        agent.wait_until_joined()
        before = agent.evaluate(later)
        print(f"{name}: perplexity {math.exp(before.loss):.0f} on later text", flush=True)
        agent.wait()
        after = agent.evaluate(later)
    found = {
        "device": name,
        "perplexity_before": math.exp(before.loss),
        "perplexity_after": math.exp(after.loss),
        "updates": agent.updates_answered,
        "seconds": time.monotonic() - began,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
