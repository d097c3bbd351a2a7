"""A fleet of honest devices that differ, on real processes."""

from collections import Counter

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from benchmarks.fairness_data import MAKERS
from benchmarks.fairness_fleets import FLEETS, STEP_S, Outcome, kind_of, means, train_alone, weight_of
from benchmarks.real_fleet import Member, busy_loops, run_fleet
from benchmarks.simulated import accuracy_of

HARDEST = ("one class each", "one mirrored", "smartwatch by person, two slow")


def measure_fleet(name: str, seed: int, seconds: float, loops: int) -> Outcome:
    """Train a fleet beside some busy loops, then one machine with all data and as many examples."""
    fleet = FLEETS[name]
    data = MAKERS[fleet.data](seed)
    members = [
        Member(part.training, fleet.slow.get(number, 1.0) * STEP_S) for number, part in enumerate(data.parts)
    ]
    with busy_loops(loops), run_fleet(data.model, data.learning_rate, members) as real:
        story = real.train(seconds)
    with threadpool_limits(1):
        return Outcome(
            accuracies=means(
                [[accuracy_of(data.model, model, part.held_out) for part in data.parts] for model in story.models]
            ),
            alone=train_alone(data, story.steps, seed),
            weights=[weight_of(device) for device in story.devices],
            refused=sum(sum(device["updates_rejected"].values()) for device in story.devices),
            warned=Counter(kind_of(alarm.device, alarm.figures) for alarm in story.alarms),
        )
