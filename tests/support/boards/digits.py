"""The digits as files: an equal part for each device, and one to evaluate with that no device gets."""

import numpy as np

from edgeasync.data import Dataset, iid, load_digits

HELD_OUT = 360
"""A fifth of them."""


def write_digits(folder, devices, *, enlarged=False):
    """Write `held-out.npz` and `0.npz`, `1.npz` and so on: images of 8 x 8 pixels or, enlarged, of 28 x 28."""
    digits = load_digits()
    images = digits.x.reshape(-1, 1, 8, 8)
    if enlarged:
        images = np.pad(images.repeat(3, axis=2).repeat(3, axis=3), ((0, 0), (0, 0), (2, 2), (2, 2)))
    dataset = Dataset.of(images, digits.y)
    order = np.random.default_rng(0).permutation(len(dataset))
    parts = iid(dataset.take(order[HELD_OUT:]), devices, 0)
    files = {"held-out": dataset.take(order[:HELD_OUT])} | dict(enumerate(parts))
    for name, part in files.items():
        np.savez(folder / f"{name}.npz", x=part.x, y=part.y)
