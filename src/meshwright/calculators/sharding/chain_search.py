"""The fastest shardings of a chain of products under a memory limit: an exact best-first search (A*).

The time from each node to the end, without the memory limit, is computed backwards; the search expands the label with
the least time so far plus time to go. A label is dropped when ``keep`` labels of the same node need no more time and no
more memory: with ``keep`` = 1 the labels of a node are its Pareto front.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.calculators.sharding.chain import Chain, ChainNode, Graph, Label
from meshwright.calculators.sharding.einsum_cost import EinsumRates, StepPrice
from meshwright.core.errors import CannotRunError
from meshwright.core.units import format_bytes
from meshwright.cost.network.collectives import GroupRates, group_rates

Objective = Literal["time", "memory"]
Signature = tuple[tuple[frozenset[str], ...], ...]


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A sharding for every array of the chain, and the steps of the fastest path that fits.

    ``input_bytes`` stay in memory during all steps; ``memory_bytes`` is the peak.
    """

    arrays: dict[str, ShardedArray]
    steps: tuple[Step, ...]
    prices: tuple[StepPrice, ...]
    time_s: float
    input_bytes: float
    memory_bytes: float

    @property
    def communication_s(self) -> float:
        """Seconds of its collectives."""
        return sum(p.time_s or 0.0 for s, p in zip(self.steps, self.prices, strict=True) if s.is_collective)

    @property
    def bound_by(self) -> str:
        """What binds most of the time: "compute", "hbm", or a level of links."""
        seconds_by_bound: dict[str, float] = {}
        for price in self.prices:
            seconds_by_bound[price.bound_by] = seconds_by_bound.get(price.bound_by, 0.0) + (price.time_s or 0.0)
        return max(seconds_by_bound, key=lambda bound: seconds_by_bound[bound])


def search_chain(
    chain: Chain, rates: EinsumRates, *, memory_bytes: float, top: int = 1, objective: Objective = "time"
) -> tuple[Assignment, ...]:
    """Returns the ``top`` fastest assignments within ``memory_bytes`` of a device; of equals the smallest first.

    Assignments that differ only in the names of equal mesh axes, or in the order of axes on a dim, count as one. Raises
    CannotRunError, with the least memory that would be enough, if nothing fits.
    """
    graph = Graph(chain, rates)
    renamings = _renamings(chain, rates)
    assignments: dict[frozenset[Signature], Assignment] = {}
    for label in _labels(graph, memory_bytes, keep=top * len(renamings), objective=objective):
        signatures = frozenset(_signature(label, renaming) for renaming in renamings)
        assignment = Assignment(
            arrays=dict(zip(chain.choices, label.arrays, strict=True)),
            steps=label.steps,
            prices=tuple(map(graph.price, label.steps)),
            time_s=label.time_s,
            input_bytes=label.input_bytes,
            memory_bytes=label.input_bytes + label.alive_bytes,
        )
        assignments.setdefault(signatures, assignment)
        if len(assignments) == top:
            return tuple(assignments.values())
    if not assignments:
        (least_assignment,) = search_chain(chain, rates, memory_bytes=float("inf"), objective="memory")
        # the least number of three digits that is enough
        rounding_bytes = 10.0 ** max(0, math.floor(math.log10(least_assignment.memory_bytes)) - 2)
        min_text = format_bytes(math.ceil(least_assignment.memory_bytes / rounding_bytes) * rounding_bytes)
        raise CannotRunError(
            f"no shardings of the chain fit in {format_bytes(memory_bytes)} of a device: the least is {min_text}. Give "
            f"--memory of that or more, or a larger mesh."
        )
    return tuple(assignments.values())


def _labels(graph: Graph, memory_bytes: float, *, keep: int, objective: Objective) -> Iterator[Label]:
    """Yields labels at the end of the chain, best first; ``keep`` different histories are kept in each node."""
    counter = itertools.count()
    queue: list[tuple[tuple[float, float], int, ChainNode, Label]] = []
    labels_of: dict[ChainNode, list[tuple[Signature, Label]]] = {}

    def push(node: ChainNode, label: Label) -> None:
        memory = label.input_bytes + label.alive_bytes + graph.inputs_to_go[node.index + (node.stage == "multiplied")]
        if memory <= memory_bytes:
            # rounded, so that equal times summed in another order stay equal and memory decides
            time_s = float(f"{label.time_s + graph.time_to_go(node):.12g}") if objective == "time" else label.time_s
            priority = (time_s, memory) if objective == "time" else (memory, time_s)
            heapq.heappush(queue, (priority, next(counter), node, label))

    for node, label in graph.starts():
        push(node, label)
    while queue:
        _, _, node, label = heapq.heappop(queue)
        new_signature = _signature(label, {})
        better_signatures = {signature for signature, old_label in labels_of.get(node, ()) if old_label.matches(label)}
        if new_signature in better_signatures or len(better_signatures) >= keep:
            continue
        labels_of.setdefault(node, []).append((new_signature, label))
        if node.index == len(graph.chain.products):
            yield label
        for next_node, edge_label in graph.edges(node):
            push(next_node, label.then(edge_label))


def _signature(label: Label, renaming: dict[str, str]) -> Signature:
    """Returns the shardings so far, without the order of axes on a dim."""
    return tuple(
        tuple(frozenset(renaming.get(axis, axis) for axis in axes) for axes in array.axes) for array in label.arrays
    )


def _renamings(chain: Chain, rates: EinsumRates) -> list[dict[str, str]]:
    """Returns renamings of mesh axes that change no size, no fixed array and no rate; the first changes nothing."""
    axes = tuple(axis for axis, size in chain.mesh.items() if size > 1)
    fixed_axes = {axis for name in chain.fixed for axis in chain.choices[name][0].spread}
    axis_groups = [group for n in range(1, len(axes) + 1) for group in itertools.combinations(axes, n)]

    def rate(group: Iterable[str]) -> GroupRates:
        return group_rates(rates.laid, tuple(group), rates.calibration)

    return [
        renaming
        for renaming in (dict(zip(axes, permuted_axes, strict=True)) for permuted_axes in itertools.permutations(axes))
        if all(chain.mesh[a] == chain.mesh[b] and (a == b or not {a, b} & fixed_axes) for a, b in renaming.items())
        and all(rate(group) == rate(renaming[axis] for axis in group) for group in axis_groups)
    ]
