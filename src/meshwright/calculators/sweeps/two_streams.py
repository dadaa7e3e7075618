"""Compute and communication of a few layers under data parallelism, laid on two lanes by their dependencies.

The derived steps of a strategy in order, at the prices of the cost model: local steps one after the other on the chip,
collectives one after the other on the links, each as soon as its input is there and the link is free. Weights are
gathered one pass ahead. The ways differ in what is split (ZeRO) and in when gradients are sent.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from meshwright.algebra.notation import ShardedArray
from meshwright.cost.step_costs import StepCost
from meshwright.cost.train_step import PricedStrategy, price_strategy
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

Send = Literal["at the end", "each", "buckets"]
Lane = Literal["compute", "links"]

BUCKET_BYTES = 25e6
"""Gradients that are sent together: the default of PyTorch's DistributedDataParallel."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way of data parallelism: what ZeRO splits, and when gradients are sent."""

    name: str
    zero: int
    send: Send


WAYS: tuple[Way, ...] = (
    Way(name="data parallel, naive", zero=0, send="at the end"),
    Way(name="overlapped", zero=0, send="each"),
    Way(name="bucketed", zero=0, send="buckets"),
    Way(name="ZeRO-1", zero=1, send="each"),
    Way(name="ZeRO-3", zero=3, send="each"),
)


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """Something that one lane does: forward, backward or optimizer of a layer, or a collective."""

    lane: Lane
    what: str
    layer: int
    start_s: float
    end_s: float


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """Both lanes of one way: ``compute_s`` and ``links_s`` are the seconds that each works."""

    name: str
    boxes: tuple[Box, ...]

    @property
    def total_s(self) -> float:
        """From the start to the end of the last box."""
        return max(box.end_s for box in self.boxes)

    @property
    def compute_s(self) -> float:
        return sum(box.end_s - box.start_s for box in self.boxes if box.lane == "compute")

    @property
    def links_s(self) -> float:
        return sum(box.end_s - box.start_s for box in self.boxes if box.lane == "links")

    @property
    def exposed_s(self) -> float:
        """Seconds in which the chip waits for the links."""
        return self.total_s - self.compute_s


def two_streams(
    model: Model,
    cluster: Cluster,
    job: Job,
    way: Way,
    *,
    layers: int = 3,
    remat: str = "none",
    bucket_bytes: float = BUCKET_BYTES,
    calibration: Calibration | None = None,
) -> Streams:
    """Forward, backward and optimizer of so many layers, one microbatch, all chips data parallel.

    The optimizer waits for every gradient, since the norm of all of them scales each.
    """
    strategy = Strategy(
        mesh=make_mesh({"fsdp": cluster.num_chips}), assignment=standard_assignment(zero=way.zero), remat=remat
    )
    priced = price_strategy(model, cluster, job, strategy, calibration=calibration)
    lanes = _Lanes(priced, way, bucket_bytes)
    most = max(priced.costs.layers, key=lambda block: block.steps.repeat)
    own = {name for op in most.steps.block.ops for name in op.inputs}
    update = [cost for cost in priced.costs.once if cost.step.result.name in own]
    passes = [("forward", layer, most.forward) for layer in range(layers)]
    passes += [("backward", layer, most.backward) for layer in reversed(range(layers))]
    for number, (what, layer, costs) in enumerate(passes):
        ahead = passes[number + 1 : number + 2] if number else passes[:2]
        for _, other, gathers in ahead:
            lanes.gather_ahead(gathers, other, of=id(gathers))
        lanes.run(what, layer, costs)
    lanes.send_gradients()
    for layer in range(layers):
        lanes.update(layer, update)
    return Streams(name=way.name, boxes=tuple(lanes.boxes))


def _is_ahead(cost: StepCost) -> bool:
    """Whether a collective needs nothing that its pass computes: a gather of weights."""
    return cost.step.op == "all_gather" and cost.hides


class _Lanes:
    """The state of both lanes while steps are laid down."""

    def __init__(self, priced: PricedStrategy, way: Way, bucket_bytes: float) -> None:
        self.priced, self.way, self.bucket_bytes = priced, way, bucket_bytes
        self.boxes: list[Box] = []
        self.chip_s = self.link_s = 0.0
        self.gathered: dict[tuple[int, int, ShardedArray], float] = {}
        self.waiting: list[tuple[StepCost, int, float]] = []

    def gather_ahead(self, costs: Sequence[StepCost], layer: int, *, of: int) -> None:
        """Queue the gathers of a pass now."""
        for cost in costs:
            if _is_ahead(cost):
                self.gathered[of, layer, cost.step.result] = self._send(cost, layer, self.chip_s)

    def run(self, what: str, layer: int, costs: Sequence[StepCost]) -> None:
        """One pass over one layer."""
        ready: dict[ShardedArray, float] = {}
        for cost in costs:
            step = cost.step
            when = max((ready.get(array, 0.0) for array in step.inputs), default=0.0)
            if _is_ahead(cost):
                ready[step.result] = self.gathered[id(costs), layer, step.result]
            elif step.is_collective and cost.hides:
                self._gradient(cost, layer, when)
            elif step.is_collective:
                ready[step.result] = self._send(cost, layer, max(when, self.chip_s))
            else:
                end = self._compute(what, layer, when, float(cost.local_s))
                ready.update(dict.fromkeys((step.result, *step.more), end))

    def _gradient(self, cost: StepCost, layer: int, when: float) -> None:
        """Send a gradient now, or keep it until its bucket is full, or to the end."""
        if self.way.send == "each":
            self._send(cost, layer, when)
            return
        self.waiting.append((cost, layer, when))
        full = sum(float(one.network_bytes) for one, _, _ in self.waiting) >= self.bucket_bytes
        if self.way.send == "buckets" and full:
            self._send_bucket()

    def send_gradients(self) -> None:
        """Send what is left when the backward pass is done; then the optimizer may start."""
        if self.way.send == "buckets":
            self._send_bucket()
        for cost, layer, _ in self.waiting:
            self._send(cost, layer, self.chip_s)
        self.chip_s = max(self.chip_s, self.link_s)

    def _send_bucket(self) -> None:
        """All waiting gradients as one collective: the bytes of all, the latency of one."""
        if not self.waiting:
            return
        (first, layer, _), when = self.waiting[0], max(when for _, _, when in self.waiting)
        rate = self.priced.rates.groups[first.group][first.step.op]
        seconds = float(rate.time(sum(float(cost.network_bytes) for cost, _, _ in self.waiting)))
        self.waiting = []
        self._link(first.step.op, layer, when, seconds)

    def update(self, layer: int, costs: Sequence[StepCost]) -> None:
        """The optimizer of one layer, and the gathers of what it has updated."""
        for cost in costs:
            if cost.step.is_collective:
                self._send(cost, layer, self.chip_s)
            else:
                self._compute("optimizer", layer, 0.0, float(cost.local_s))

    def _compute(self, what: str, layer: int, when: float, seconds: float) -> float:
        start = max(self.chip_s, when)
        self.chip_s = start + seconds
        if seconds:
            self._add(Box(lane="compute", what=what, layer=layer, start_s=start, end_s=self.chip_s))
        return self.chip_s

    def _send(self, cost: StepCost, layer: int, when: float) -> float:
        return self._link(cost.step.op, layer, when, float(cost.network_s))

    def _link(self, op: str, layer: int, when: float, seconds: float) -> float:
        start = max(self.link_s, when)
        self.link_s = start + seconds
        if seconds:
            name = op.replace("_", "-")
            self.boxes.append(Box(lane="links", what=name, layer=layer, start_s=start, end_s=self.link_s))
        return self.link_s

    def _add(self, box: Box) -> None:
        """Steps of one pass that follow each other at once are one box."""
        for number in range(len(self.boxes) - 1, -1, -1):
            last = self.boxes[number]
            if last.lane == box.lane:
                if (last.what, last.layer, last.end_s) == (box.what, box.layer, box.start_s):
                    self.boxes[number] = msgspec.structs.replace(last, end_s=box.end_s)
                    return
                break
        self.boxes.append(box)
