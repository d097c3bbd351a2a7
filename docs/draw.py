"""Draws pictures from the code: `python -m docs.draw` writes them to docs/pictures.

`python -m benchmarks plot` draws the measured results.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from docs.svg import BLUE, GREY, INK, RED, box, picture, text
from edgeasync.core.device.device_core import LINK
from edgeasync.core.device.work_cycle import WORK
from edgeasync.core.hub.member import MEMBER
from edgeasync.core.peer.round import ROUND
from edgeasync.policies.staleness import (
    AdaptiveLearningRate,
    ConstantStaleness,
    PolynomialStaleness,
    Staleness,
    StalenessPolicy,
)
from edgeasync.protocol.transfers import TRANSFER
from edgeasync.sdk.lockstep import LOOP_TURN, LOOP_WORKER
from edgeasync.sdk.loop_model import LOOP_MODEL

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"

Point = tuple[float, float]
Table = Mapping[Any, Sequence[Any]]  # from a state to those that may follow

# -- states -----------------------------------------------------------------------------------------------------

BOX_WIDTH, BOX_HEIGHT = 118.0, 38.0


class Layout:
    """The positions of a table's states in a diagram, and the groups of states that share a frame.

    `bends` moves the middle of an arrow to its left, `shifts` the whole arrow. Keys are the pair of states or
    groups at its ends.
    """

    def __init__(
        self,
        size: tuple[int, int],
        places: Mapping[str, Point],
        *,
        groups: Mapping[str, tuple[str, ...]] | None = None,
        bends: Mapping[tuple[str, str], float] | None = None,
        shifts: Mapping[tuple[str, str], Point] | None = None,
    ) -> None:
        self.size = size
        self.places = places
        self.groups = groups or {}
        self.bends = bends or {}
        self.shifts = shifts or {}

    def area(self, name: str) -> tuple[float, float, float, float]:
        """Return centre, half width and half height of a state or group."""
        if name not in self.groups:
            return *self.places[name], BOX_WIDTH / 2, BOX_HEIGHT / 2
        inner = [self.places[state] for state in self.groups[name]]
        left, right = min(x for x, _ in inner), max(x for x, _ in inner)
        top, bottom = min(y for _, y in inner), max(y for _, y in inner)
        return (left + right) / 2, (top + bottom) / 2, (right - left + BOX_WIDTH) / 2 + 22, (bottom - top + 94) / 2


STATES: dict[str, tuple[str, Table, Layout]] = {
    "link": (
        "The link of a device",
        LINK,
        Layout(
            (720, 280),
            {"offline": (130, 110), "handshake": (360, 110), "joined": (590, 110), "over": (360, 225)},
            bends={("joined", "offline"): 75},
        ),
    ),
    "work": (
        "The work of a device",
        WORK,
        Layout(
            (720, 300),
            {
                "idle": (130, 130), "installing": (360, 60), "training": (590, 60), "pushing": (590, 240),
                "fetching_graph": (330, 240),
            },
        ),
    ),
    "member": (
        "A member of the hub",
        MEMBER,
        Layout(
            (720, 380),
            {
                "lost": (80, 120), "training": (270, 80), "paused": (450, 80), "joining": (360, 165),
                "left": (640, 120), "quarantined": (360, 310),
            },
            groups={"live": ("training", "paused", "joining")},
            shifts={
                ("live", "lost"): (0, -12), ("live", "left"): (0, -12), ("live", "quarantined"): (22, 0),
                ("lost", "joining"): (0, 14), ("left", "joining"): (0, 14),
            },
        ),
    ),
    "round": (
        "A round of peers",
        ROUND,
        Layout(
            (720, 250),
            {
                "snapshot": (90, 90), "exchanging": (270, 90), "applying": (450, 90), "serving": (630, 90),
                "over": (360, 205),
            },
        ),
    ),
    "transfer": (
        "A transfer",
        TRANSFER,
        Layout(
            (720, 330),
            {
                "announced": (100, 70), "moving": (360, 70), "suspended": (360, 190), "complete": (620, 70),
                "corrupt": (620, 190), "dropped": (200, 290),
            },
        ),
    ),
    "loop": (
        "A loop of your own",
        LOOP_TURN,
        Layout(
            (720, 280),
            {"training": (130, 110), "handed_over": (360, 110), "waiting": (590, 110), "ended": (360, 225)},
            bends={("training", "waiting"): -75},
        ),
    ),
    "worker": (
        "The worker of a loop",
        LOOP_WORKER,
        Layout(
            (720, 280),
            {"busy": (360, 90), "awaits_step": (120, 150), "awaits_model": (600, 150), "gone": (360, 240)},
        ),
    ),
    "model": (
        "The model of a loop",
        LOOP_MODEL,
        Layout(
            (720, 280),
            {
                "absent": (90, 110), "new": (270, 110), "same": (450, 110), "trained": (630, 110),
                "apart": (450, 230),
            },
            bends={("trained", "new"): 60},
        ),
    ),
}  # fmt: skip


def moves(table: Table, groups: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Yield the arrows of a table. A move of every state of a group becomes one arrow of the group."""
    shared = {
        (group, after)
        for group, states in groups.items()
        for after in table
        if after not in states and all(after in table[state] for state in states)
    }
    yield from sorted(shared)
    for state, following in table.items():
        of = [group for group, states in groups.items() if state in states]
        for after in following:
            if not any((group, after) in shared for group in of):
                yield state, after


def arrow(layout: Layout, start: str, end: str, *, both: bool) -> str:
    """Return an arrow between the borders of two areas."""
    here, there = layout.area(start), layout.area(end)
    x0, y0, x1, y1 = *here[:2], *there[:2]
    if start in layout.groups:  # straight out of a group, towards the state
        x0, y0 = (x1, y0) if abs(x1 - x0) < here[2] else (x0, y1)
    dx, dy = layout.shifts.get((start, end), (0.0, 0.0))
    x0, y0, x1, y1 = x0 + dx, y0 + dy, x1 + dx, y1 + dy
    bend = layout.bends.get((start, end), 0.0)
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    middle = ((x0 + x1) / 2 - bend * 2 * (y0 - y1) / length, (y0 + y1) / 2 + bend * 2 * (x1 - x0) / length)
    a, b = _border((x0, y0), middle, here), _border((x1, y1), middle, there)
    curve = f"Q{middle[0]:.1f} {middle[1]:.1f} " if bend else "L"
    tail = ' marker-start="url(#to)"' if both else ""
    return (
        f'<path d="M{a[0]:.1f} {a[1]:.1f} {curve}{b[0]:.1f} {b[1]:.1f}" fill="none" stroke="{INK}" '
        f'stroke-width="1.3" marker-end="url(#to)"{tail}/>'
    )


def _border(inside: Point, towards: Point, area: tuple[float, float, float, float]) -> Point:
    """Return where the line from a point inside an area crosses the area's border."""
    x, y, half_width, half_height = area
    dx, dy = towards[0] - inside[0], towards[1] - inside[1]
    reach = []
    if dx:
        reach.append(((half_width + 3) * (1 if dx > 0 else -1) - (inside[0] - x)) / dx)
    if dy:
        reach.append(((half_height + 3) * (1 if dy > 0 else -1) - (inside[1] - y)) / dy)
    share = min(reach)
    return inside[0] + share * dx, inside[1] + share * dy


def draw_states(name: str) -> str:
    """Draw the diagram of a table of states."""
    title, table, layout = STATES[name]
    parts = []
    for group in layout.groups:
        x, y, half_width, half_height = layout.area(group)
        parts.append(box(x - half_width, y - half_height, 2 * half_width, 2 * half_height, fill="none", line=GREY))
        parts.append(text(x - half_width + 10, y - half_height + 17, group, "small"))
    arrows = list(moves(table, layout.groups))
    for start, end in arrows:
        if (end, start) not in arrows or start < end:
            parts.append(arrow(layout, start, end, both=(end, start) in arrows))
    x, y = layout.places[next(iter(table))]
    parts.append(f'<circle cx="{x:g}" cy="{y - 55:g}" r="6" fill="{INK}"/>')
    parts.append(
        f'<path d="M{x:g} {y - 47:g} L{x:g} {y - BOX_HEIGHT / 2 - 3:g}" stroke="{INK}" marker-end="url(#to)"/>'
    )
    for state, (x, y) in layout.places.items():
        parts += [box(x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2, BOX_WIDTH, BOX_HEIGHT), text(x, y + 5, state, "mid")]
    return picture(*layout.size, title, parts)


# -- layers -----------------------------------------------------------------------------------------------------

HOLDS = {
    "async_train": "a toolbox over the public names",
    "cli": "the commands",
    "callbacks": "ready callbacks",
    "jax": "trees of JAX",
    "networks": "loops without torch",
    "sklearn": "estimators",
    "torch": "modules of torch",
    "sdk": "the Python API",
    "ops": "doctor, services, runs",
    "web": "page, metrics",
    "runtime": "hub, agent, peer",
    "graphs": "model files",
    "net": "all of ZeroMQ",
    "host": "threads, clocks, sensors",
    "durable": "journal, checkpoints, spool",
    "training": "local steps",
    "autodiff": "training graphs",
    "nn": "models without torch",
    "data": "a device's examples",
    "lora": "adapters",
    "losses": "loss objects",
    "metrics": "metric objects",
    "scores": "raw or bounded",
    "core": "decisions, arrays, recovery, engines",
    "protocol": "messages, codecs",
    "measurements": "what the hub measured",
    "policies": "how the hub decides",
    "plugins": "external code, by name",
    "parameters": "flat vectors",
    "config": "settings from TOML",
    "setting_keys": "what each setting means",
    "states": "state tables",
    "errors": "the error tree",
    "temporary": "temporary folders",
    "file_lock": "locks on files",
    "regular_file": "safe opening",
    "structs": "shared types",
    "version": "the version",
}


def layers() -> list[list[str]]:
    """Return the layers of the import contract, highest first. Layers of one row do not import one another."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contract = project["tool"]["importlinter"]["contracts"][0]
    rows = [[name.strip() for name in row.split("|")] for row in contract["layers"]]
    return [row for row in rows if row != ["__main__"]]


def draw_layers() -> str:
    """Draw the layers as a stack of boxes."""
    parts = []
    width, height, gap = 720.0, 46.0, 8.0
    rows = layers()
    for number, row in enumerate(rows):
        y = 16 + number * (height + gap)
        each = (width - 32 - gap * (len(row) - 1)) / len(row)
        for place, name in enumerate(row):
            x = 16 + place * (each + gap)
            parts.append(box(x, y, each, height))
            parts.append(
                text(x + each / 2, y + 19, f"{name}/" if name not in FILES else f"{name}.py", "mid title")
            )
            parts.append(text(x + each / 2, y + 36, HOLDS[name], "mid small"))
    size = 16 + len(rows) * (height + gap) + 24
    parts.append(text(width / 2, size - 12, "Imports point down only.", "mid small"))
    return picture(int(width), int(size), "The layers of edgeasync", parts)


FILES = (
    "networks",
    "lora",
    "losses",
    "metrics",
    "scores",
    "plugins",
    "parameters",
    "setting_keys",
    "config",
    "states",
    "temporary",
    "errors",
    "file_lock",
    "regular_file",
    "structs",
    "version",
)


# -- staleness --------------------------------------------------------------------------------------------------

BOUND = 10.0
"""`staleness_max` in the plot of `constant`, which has no limit by default."""

SHOWN: dict[str, StalenessPolicy] = {
    "constant": ConstantStaleness(staleness_max=BOUND),
    "adaptive_lr": AdaptiveLearningRate(),
    "polynomial": PolynomialStaleness(),
}
"""Every kind."""


def draw_staleness(kind: str) -> str:
    """Draw an update's weight by its staleness, 0 to 20 versions, with a cross where it is rejected."""
    policy = SHOWN[kind]
    left, top, width, height, most = 46.0, 18.0, 300.0, 110.0, 20
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = top + height * (1 - share)
        parts.append(f'<path d="M{left} {y:g} H{left + width}" stroke="{GREY}" stroke-width="0.6"/>')
        parts.append(text(left - 8, y + 4, f"{share:g}", "small end"))
    for versions in range(0, most + 1, 5):
        x = left + width * versions / most
        parts.append(text(x, top + height + 18, f"{versions}", "small mid"))
    parts.append(text(left + width / 2, top + height + 36, "versions since the update's base", "small mid"))
    for versions in range(most + 1):
        weight = policy(Staleness(versions))
        x = left + width * versions / most
        y = top + height * (1 - (weight or 0.0))
        if weight is None:
            parts.append(
                f'<path d="M{x - 4:.1f} {y - 4:.1f} l8 8 m0 -8 l-8 8" stroke="{RED}" stroke-width="1.6"/>'
            )
        else:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{BLUE}"/>')
    return picture(364, 174, f"Weight under {kind} by staleness", parts)


# -- all --------------------------------------------------------------------------------------------------------


def drawings() -> dict[str, Callable[[], str]]:
    """Return file name -> function that draws it, for docs/pictures."""
    found: dict[str, Callable[[], str]] = {
        "layers.svg": draw_layers,
    }
    found |= {f"states-{name}.svg": partial(draw_states, name) for name in STATES}
    found |= {f"staleness-{kind}.svg": partial(draw_staleness, kind) for kind in SHOWN}
    return found


if __name__ == "__main__":
    for name, draw in drawings().items():
        (PICTURES / name).write_text(draw(), encoding="utf-8")
