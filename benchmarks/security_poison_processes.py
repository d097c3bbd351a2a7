"""A fleet of real processes in which some devices are hostile and say the truth of what they send."""

import statistics
from functools import partial

from benchmarks.real_fleet import Member, busy_loops, run_fleet
from benchmarks.security_poison_fleet import ATTACKS, BAD, KEYS, LEARNING_RATE, HostileTrainer, Outcome
from benchmarks.simulated import DIGITS, accuracy_of, split_digits
from edgeasync.data.partition import iid
from edgeasync.training.trainer import Trainer

HARDEST = ("x7", "grows")
STEP_S = 0.01


def measure_attack(attack: str, seed: int, seconds: float, loops: int) -> Outcome:
    """Train a fleet beside some busy loops; without an attack all devices are honest."""
    training, held_out = split_digits()
    bad = BAD if attack else 0
    members = [
        Member(part, STEP_S, partial(_make_hostile, attack, seed + number) if number < bad else None)
        for number, part in enumerate(iid(training, KEYS, seed))
    ]
    with busy_loops(loops), run_fleet(DIGITS, LEARNING_RATE, members) as fleet:
        story = fleet.train(seconds)
    hostile = [f"device-{number + 1}" for number in range(bad)]
    honest = [device for device in story.devices if device["id"] not in hostile]
    lost = sum(sum(device["updates_rejected"].values()) for device in honest)
    applied = sum(device["updates_applied"] for device in honest)
    return Outcome.of(
        statistics.fmean([accuracy_of(DIGITS, model, held_out) for model in story.models]),
        lost / max(1, lost + applied),
        story.rollbacks,
        story.warned,
        hostile,
    )


def _make_hostile(attack: str, seed: int, trainer: Trainer) -> HostileTrainer:
    return HostileTrainer(trainer, ATTACKS[attack], seed)
