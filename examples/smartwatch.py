"""Recognise exercises from smartwatch data: one person a device, two people held out.

    python smartwatch.py --held-out 9 10 --compare

With --compare, the same network also trains in one place on all windows, for as many passes.
"""

import argparse
import time

from smartwatch_data import PEOPLE, augmented, joined, windows

from edgeasync import SGD, Dataset, OnnxTrainer, Policy, Stop, nn, train
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.policies.aggregation import QuorumAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.schedules import CosineSchedule
from edgeasync.training.plan import LocalTraining

BATCH, LOCAL_STEPS = 32, 2

network = nn.Sequential(
    nn.Conv1d(6, 32, 5, stride=2, padding=2),
    nn.ReLU(),
    nn.Conv1d(32, 32, 5, stride=2, padding=2),
    nn.ReLU(),
    nn.Conv1d(32, 64, 5, stride=2, padding=2),
    nn.ReLU(),
    nn.GlobalAvgPool(),
    nn.Linear(64, 7),
)


def in_one_place(data: Dataset, held_out: Dataset, epochs: int, seed: int) -> float | None:
    """Return the accuracy of a plain loop over all windows. Its learning rate was tuned, too."""
    model = nn.to_onnx(network, data.x.shape[1:], seed=seed)
    built = build_training_graph(model.SerializeToString(), GraphSettings())
    steps = epochs * len(data) // BATCH
    optimizer = SGD(learning_rate=0.01, momentum=0.9), CosineSchedule(updates=steps)
    local = LocalTraining(batch_size=BATCH, optimizer=optimizer)
    trainer = OnnxTrainer(built.model, built.spec, data, local, seed=seed)
    trainer.begin(values := built.initial.copy())
    for _ in range(steps):
        trainer.step()
    return trainer.evaluate(values, held_out).accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description="Recognise exercises by a smartwatch, one person a device.")
    parser.add_argument("--held-out", type=int, nargs="+", default=[9, 10], metavar="PERSON", help="of 1 to 10")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the windows and their copies")
    parser.add_argument("--seed", type=int, default=0, help="of first values, copies and batches")
    parser.add_argument("--compare", action="store_true", help="train in one place, too")
    arguments = parser.parse_args()
    seed, epochs = arguments.seed, arguments.epochs

    devices = [augmented(windows(who), 100 * seed + who) for who in PEOPLE if who not in arguments.held_out]
    held_out = joined([windows(who) for who in arguments.held_out])
    versions = epochs * sum(map(len, devices)) // (BATCH * LOCAL_STEPS * len(devices))
    policy = Policy(
        aggregate=QuorumAggregator(share=1.0, patience=100.0),  # equally fast: each version averages all
        frequency=FixedFrequency(local_steps=LOCAL_STEPS),
        optimizer=(*Policy().optimizer, CosineSchedule(updates=versions)),
        monitor=Monitor(detectors=(), clip=0.0),  # no clipping: unusual movements count fully
    )
    began_s = time.monotonic()
    run = train(
        network,
        devices,
        evaluate=held_out,
        until=Stop(epochs=epochs),
        optimizer=SGD(learning_rate=0.2),
        batch_size=BATCH,
        policy=policy,
        seed=seed,
    )
    sent = sum(device["bytes_up"] + device["bytes_down"] for device in run.devices)
    print(
        f"a fleet of {len(devices)}: accuracy {run.accuracy:.1%} on {len(held_out)} windows of people "
        f"{arguments.held_out}, {sent / 1e6:.0f} MB, {time.monotonic() - began_s:.0f} s"
    )
    if arguments.compare:
        began_s = time.monotonic()
        accuracy = in_one_place(joined(devices), held_out, epochs, seed)
        print(f"in one place: accuracy {accuracy:.1%}, {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
