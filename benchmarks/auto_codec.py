"""Whether `push = "auto"` chooses the same codec for equal devices, and keeps it, on a busy machine.

Run as `python -m benchmarks.auto_codec`. Eight real agents learn digits on loopback for ten minutes, beside a busy
process on each core. All must have one codec in the end, and change it twice at most.
"""

import os
import time
from collections import Counter

from benchmarks.real_fleet import Member, RealFleet, busy_loops, run_fleet
from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results
from benchmarks.simulated import split_digits
from edgeasync.data.partition import iid
from edgeasync.training.numpy_models import MlpModel

DEVICES = 8
MODEL = MlpModel(inputs=64, hidden=(1024,), classes=10)
LEARNING_RATE = 0.1
STEP_S = 0.05
POLL_S = 0.5
CHANGES_MAX = 2
SECONDS = {Form.FULL: 600.0, Form.SHORT: 90.0, Form.QUICK: 2.0}


def watch(fleet: RealFleet, seconds: float) -> tuple[dict[str, int], Counter[str]]:
    """Return how often each device's codec changed, and how many devices have which codec in the end."""
    codecs: dict[str, str] = {}
    changes: dict[str, int] = {}
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(POLL_S)
        for device in fleet.devices:
            name, codec = device["id"], device["push_codec"]
            if device["updates_applied"] and codecs.setdefault(name, codec) != codec:
                codecs[name] = codec
                changes[name] = changes.get(name, 0) + 1
                show_progress(f"{name} has {codec} now")
    return changes, Counter(codecs.values())


def main() -> None:
    """Watch the fleet for the time of the form."""
    arguments = make_parser("Whether equal devices have one codec, and keep it.").parse_args()
    results, seconds = Results(), SECONDS[arguments.form]
    parts = iid(split_digits()[0], DEVICES, 0)
    members = [Member(part, STEP_S) for part in parts]
    with busy_loops(os.cpu_count() or 1), run_fleet(MODEL, LEARNING_RATE, members) as fleet:
        changes, codecs = watch(fleet, seconds)
    most = max(changes.values(), default=0)
    results.add("auto", f"{DEVICES} devices, {seconds:.0f} s", {"codecs": len(codecs), "changes at most": most})
    for codec, devices in codecs.items():
        results.add("devices with a codec", codec, {"devices": devices})
    results.bound("codecs of equal devices", max(1, len(codecs)), 1)
    results.bound("changes of a device's codec", max(0.01, most), CHANGES_MAX)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
