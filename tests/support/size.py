"""One table of how many random examples, seeds and kills the tests draw at each size.

`pytest --size quick | gate | nightly` chooses the column. A count of 0 leaves a test out at that size.
"""

from typing import NamedTuple


class Repetitions(NamedTuple):
    """How often something is repeated at each size."""

    quick: int
    gate: int
    nightly: int


REPETITIONS = {
    "examples of a property": Repetitions(20, 60, 1000),
    "random networks of cores": Repetitions(12, 40, 2000),
    "steps of a random network": Repetitions(60, 60, 100),
    "networks that heal": Repetitions(4, 8, 360),
    "directions of a gradient": Repetitions(1, 2, 10),
    "points at which gradients are checked": Repetitions(1, 1, 5),
    "random modules with stops": Repetitions(3, 12, 300),
    "seeds of faults": Repetitions(30, 100, 3000),
    "seeds of peers": Repetitions(10, 20, 2000),
    "seeds of hostile peers": Repetitions(6, 24, 2000),
    "seeds of the demo": Repetitions(1, 1, 10),
    "seeds that are run twice": Repetitions(5, 10, 200),
    "keys that are revoked": Repetitions(5, 10, 20),
    "cases of a reader of bytes": Repetitions(200, 400, 20_000),
    "kills of a hub": Repetitions(2, 3, 50),
    "calls to a disk at which a hub is killed": Repetitions(5, 8, 11),
    "peers that average": Repetitions(3, 8, 8),
    "draws of digits": Repetitions(2, 5, 5),
    "kills of a trainer": Repetitions(1, 2, 10),
    "times that a tenth of a crowd is killed": Repetitions(1, 1, 20),
    "clusters of Ray": Repetitions(0, 0, 1),
    "trainers of other libraries": Repetitions(0, 0, 1),
    "examples at full size": Repetitions(0, 0, 1),
    "toolbox programs at full size": Repetitions(0, 0, 1),
    "language models at full size": Repetitions(0, 0, 1),
    "ends of a program": Repetitions(1, 1, 3),
    "cuts of a link": Repetitions(0, 1, 3),
    "networks at full size": Repetitions(0, 0, 1),
    "seconds without a write": Repetitions(2, 3, 600),
    "environments that are installed": Repetitions(0, 1, 1),
    "systems of ARM": Repetitions(0, 0, 1),
    "fleets that Ansible installs": Repetitions(0, 0, 1),
    "cards that start for the first time": Repetitions(0, 0, 1),
    "devices that join at once": Repetitions(200, 300, 2000),
    "thousands of updates of a converged fleet": Repetitions(1, 3, 20),
    "hubs that are put back": Repetitions(1, 3, 20),
    "fleets with faults": Repetitions(0, 0, 3),
    "fleets that stay calm": Repetitions(1, 1, 10),
}

_chosen = ["quick"]


def choose(size):
    """Choose the size, once, before any test module is imported."""
    _chosen[:] = [size]


def repetitions(what):
    """Return how often to repeat something at the chosen size."""
    return getattr(REPETITIONS[what], _chosen[0])


def never_at(size):
    """Return the names of what is not done at all at a size, but is at the size `nightly`."""
    return [what for what, counts in REPETITIONS.items() if counts.nightly and not getattr(counts, size)]
