"""Split the handwritten digits among devices: one .npz for each, and one held out for evaluation.

    python make_digits.py --devices 4 --alpha 0.5 --seed 0 --out digits

With a small alpha each device gets few kinds of digits, with a large one all get the same mixture.
"""

import argparse
from pathlib import Path

import numpy as np

from edgeasync.data import dirichlet, load_digits

HELD_OUT = 0.2
"""Share of the digits held out to evaluate the model."""

EXAMPLES_MIN = 32
"""A device needs at least one batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Part the handwritten digits among devices.")
    parser.add_argument("--devices", type=int, default=4, help="how many parts")
    parser.add_argument("--alpha", type=float, default=0.5, help="skew of the labels: small is more unequal")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same parts")
    parser.add_argument("--out", type=Path, default=Path("digits"), help="folder to write to, made if missing")
    arguments = parser.parse_args()

    dataset = load_digits()
    order = np.random.default_rng(arguments.seed).permutation(len(dataset))
    split = round(HELD_OUT * len(dataset))
    rest = dataset.take(order[split:])
    parts = dirichlet(rest, arguments.devices, arguments.alpha, arguments.seed, examples_min=EXAMPLES_MIN)

    arguments.out.mkdir(parents=True, exist_ok=True)
    names = [*(f"device-{number}" for number in range(1, len(parts) + 1)), "held-out"]
    for name, part in zip(names, [*parts, dataset.take(order[:split])], strict=True):
        path = arguments.out / f"{name}.npz"
        np.savez(path, x=part.x, y=part.y)
        counts = " ".join(f"{count:3}" for count in np.bincount(part.y, minlength=10))
        print(f"{path}: {len(part):4} examples; of the digits 0 to 9: {counts}")


if __name__ == "__main__":
    main()
