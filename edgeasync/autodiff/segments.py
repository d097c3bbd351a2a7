"""Computes segments of the forward pass again when their gradients are due.

A step then keeps only the tensors at the cuts between segments, such as the layers of a
transformer, and the results of one segment at a time (Chen et al. 2016, arXiv:1604.06174).
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import numpy as np
import onnx

from edgeasync.autodiff.graph import FLOAT, RANDOM_OPERATORS, Node, free_inputs
from edgeasync.autodiff.rules import TrainingGraphBuilder
from edgeasync.autodiff.ties import tie

SAVED_MIN = 0.5
"""Smallest share of the kept bytes for which segments pay. They make a step up to a third longer.
"""

PLACES_MAX = 300
"""Maximum number of places to consider for cuts."""

LIMITS = tuple([0.8**power for power in range(1, 28)])
"""Sizes of the largest segment to try, as shares of all kept bytes."""

_TIED = (FLOAT, np.dtype(np.int32), np.dtype(np.int64))


class Reversed(NamedTuple):
    """An operator of the forward pass whose gradient the backward pass computes."""

    end: int
    """Index after the last node of the operator."""
    start: int
    """Index of the first node of its gradient."""
    arrived: str
    """A gradient at an output of the operator."""


def recompute_segments(
    graph: TrainingGraphBuilder, start: int, ends: Sequence[int], operators: Sequence[Reversed]
) -> bool:
    """Compute segments of the forward pass again, and return whether that saves memory.

    The forward pass may be cut at the indices `ends`. The backward pass begins at the node with
    index `start`, and computes the gradients of `operators` in this order.
    """
    if not operators:
        return False
    read = {name for node in graph.nodes[start:] for name in free_inputs(node)}
    forward = _Forward(graph, ends, read)
    cuts = forward.cuts()
    if not cuts:
        return False
    backward = graph.nodes[start:]
    del graph.nodes[start:]
    kept = {name for cut in cuts for name in forward.alive[cut]}
    for segment, group in groupby(operators, lambda operator: bisect_left(cuts, operator.end)):
        members = [*group]
        stop = min([each.start for each in operators if each.start > members[-1].start], default=None)
        nodes = backward[members[0].start - start : None if stop is None else stop - start]
        if segment < len(cuts):  # the last segment has only just been computed
            span = slice(cuts[segment - 1] if segment else 0, cuts[segment])
            again = _Again(graph, forward, kept, members[0].arrived)
            copies = again.compute(span, {name for node in nodes for name in node.inputs})
            for node in nodes:
                node.inputs = [copies.get(name, name) for name in node.inputs]
        graph.nodes += nodes
    return True


class _Forward:
    """The forward pass: which of its tensors depend on the data, and when they are used.

    It may be cut at the indices `ends`. `read` are the tensors that the backward pass reads.
    """

    def __init__(self, graph: TrainingGraphBuilder, ends: Sequence[int], read: Collection[str]) -> None:
        self.nodes = graph.nodes[: ends[-1]]
        self.made: dict[str, int] = {}
        """The index of the node that computes each tensor of the stream, which is what depends on
        the data and on trained parameters. Only the stream is computed again.
        """
        self.data = set[str]()
        """All tensors that depend on the data."""
        self._graph, self._last = graph, dict[str, int]()
        known = {*graph.constants, *graph.active, *graph.live_statistics}
        computed = {name for node in self.nodes for name in node.outputs}
        self._bytes: dict[str, int] = {}
        for place, node in enumerate(self.nodes):
            inputs = [*free_inputs(node)]
            self.data.update(name for name in inputs if name not in computed and name not in known)
            if not self.data.isdisjoint(inputs):
                self.data.update(node.outputs)
                if not (graph.active.isdisjoint(node.outputs) and self.made.keys().isdisjoint(inputs)):
                    self.made |= {name: place for name in node.outputs if name}
            self._last |= {name: place for name in inputs if name in self.made}
            self._bytes |= {name: self._size(node, name) for name in node.outputs}
        self.alive = self._survey({*ends})
        """For each place, the tensors that nodes before it compute and nodes after it read. Shapes and
        axes do not count.
        """
        stored = [
            sum(self._bytes[name] for name in node.outputs if self._is_stored(name, read)) for node in self.nodes
        ]
        self._stored = [0, *accumulate(stored)]

    def _is_stored(self, name: str, read: Collection[str]) -> bool:
        return name in read and name in self.made

    def _size(self, node: Node, name: str) -> int:
        """Return the bytes of a tensor per example. Sizes of tensors within an operator are estimated."""
        if name in self._graph.shapes:
            values = math.prod([dim or 1 for dim in self._graph.shapes[name]])
            return values * self._graph.dtypes[name].itemsize
        if node.op in ("Shape", "Size") or node.op.startswith("Reduce"):
            return 0
        return max([self._bytes.get(each, 0) for each in node.inputs], default=0)

    def _survey(self, places: Collection[int]) -> dict[int, list[str]]:
        alive, found = dict.fromkeys(list[str]()), dict[int, list[str]]()
        for place, node in enumerate(self.nodes):
            if place in places:
                found[place] = [name for name in alive if self._last[name] >= place]
                alive = dict.fromkeys(found[place])
            alive |= dict.fromkeys(
                name for name in node.outputs if name in self._last and not self._is_shape(name)
            )
        return found

    def _is_shape(self, name: str) -> bool:
        shape = self._graph.shapes.get(name)
        return shape is not None and len(shape) < 2 and self._graph.dtypes[name].kind in "iu"

    def cuts(self) -> list[int]:
        """Return the cuts for which a step keeps the fewest bytes, or none if they do not pay."""
        found = self._valleys()
        alive = [[(self.made[name], self._bytes[name]) for name in self.alive[place]] for place in found]
        points = [0, *found, len(self.nodes)]
        added = [[], *alive, []]
        best, chosen = (1.0 - SAVED_MIN) * self._stored[-1], list[int]()
        for share in LIMITS:
            cuts = _cheapest([self._stored[point] for point in points], points, added, share * self._stored[-1])
            if cuts is None:
                break
            bounds = [0, *cuts, len(self.nodes)]
            kept = {name for cut in cuts for name in self.alive[cut]}
            largest = max(self._stored[b] - self._stored[a] for a, b in pairwise(bounds))
            needed = largest + sum(self._bytes[name] for name in kept)
            if needed < best:
                best, chosen = needed, cuts
        return chosen

    def _valleys(self) -> list[int]:
        """Return places at which fewer bytes are alive than before, and no more than after, in order.

        Of places with the same bytes, only the first counts, and places before the data do not.
        Otherwise, they would take the place of cuts between the last layers of a deep model.
        """
        sizes = {place: sum(self._bytes[name] for name in names) for place, names in self.alive.items()}
        row = [*sizes.items()]
        highest = math.inf
        around = [highest, *[size for _, size in row], highest]
        low = [place for (place, size), before, after in zip(row, around, around[2:], strict=False)
               if 0 < size < before and size <= after]  # fmt: skip
        return sorted(sorted(low, key=sizes.__getitem__)[:PLACES_MAX])


def _cheapest(
    stored: Sequence[int], points: Sequence[int], alive: Sequence[Sequence[tuple[int, int]]], limit: float
) -> list[int] | None:
    """Return the cuts that keep the fewest bytes, with at most `limit` stored bytes between two cuts.

    Return `None` if this is impossible. `points` are the possible cuts, and the beginning and the
    end. `alive` has the tensors at each point: the indices of their nodes, and their bytes.
    """
    costs, befores = [0.0], [0]
    for here in range(1, len(points)):
        best, before = math.inf, here - 1
        for earlier in range(here - 1, -1, -1):
            if stored[here] - stored[earlier] > limit:
                break
            # Tensors that are alive at the earlier cut, too, have been counted there.
            cost = costs[earlier] + sum(size for made, size in alive[here] if made >= points[earlier])
            if cost <= best:
                best, before = cost, earlier
        costs.append(best)
        befores.append(before)
    if math.isinf(costs[-1]):
        return None
    cuts, here = [], befores[-1]
    while here:
        cuts.append(points[here])
        here = befores[here]
    return cuts[::-1]


class _Again:
    """Appends a second computation of the nodes of a segment.

    It starts from the tensors in `kept`, after the gradient `arrived` at the segment's end.
    """

    def __init__(
        self, graph: TrainingGraphBuilder, forward: _Forward, kept: Collection[str], arrived: str
    ) -> None:
        self._graph, self._forward, self._kept, self._arrived = graph, forward, kept, arrived
        self._copies: dict[str, str] = {}
        self._tied: dict[str, str] = {}

    def compute(self, span: slice, wanted: Iterable[str]) -> Mapping[str, str]:
        """Compute those of the tensors `wanted` that the segment computed. Return their names."""
        needed, chosen = {*wanted}.difference(self._kept), list[Node]()
        for node in reversed(self._forward.nodes[span]):
            if self._may_repeat(node) and not needed.isdisjoint(node.outputs):
                chosen.append(node)
                needed.update(name for name in node.inputs if name not in self._kept)
        for node in reversed(chosen):
            self._graph.enter(f"again/{node.name or node.outputs[0]}")
            self._repeat(node)
        return self._copies

    def _may_repeat(self, node: Node) -> bool:
        """Return whether to compute a node again. Random numbers must not be drawn again."""
        if self._forward.made.keys().isdisjoint(node.outputs):
            return False
        bodies = any(isinstance(value, onnx.GraphProto) for value in node.attributes.values())
        return not bodies and node.op not in RANDOM_OPERATORS - {"Dropout"}

    def _repeat(self, node: Node) -> None:
        graph, op = self._graph, self._graph.op
        inputs = [self._input(name) for name in node.inputs]
        if inputs == node.inputs:
            inputs = [self._tie(name) if name in self._forward.data else name for name in inputs]
        if node.op == "Dropout":  # with the same mask
            scale = op("Div", graph.scalar(1.0), op("Sub", graph.scalar(1.0), node.inputs[1]))
            copies = [op("Where", node.outputs[1], op("Mul", inputs[0], scale), graph.scalar(0.0))]
        else:
            copies = [name and graph.new_name(node.op) for name in node.outputs]
            graph.nodes.append(Node(node.op, inputs, copies, node.attributes, copies[0], node.domain))
        for name, copy in zip(node.outputs, copies, strict=False):
            self._copies[name] = copy

    def _input(self, name: str) -> str:
        if name in self._copies:
            return self._copies[name]
        return self._tie(name) if name in self._forward.made else name

    def _tie(self, name: str) -> str:
        if name not in self._tied:
            fits = self._graph.dtypes.get(name) in _TIED
            self._tied[name] = tie(self._graph, name, self._arrived) if fits else name
        return self._tied[name]
