"""Compute and communication of a few layers under data parallelism, laid on two lanes by their dependencies.

The derived steps of a strategy in order, at the prices of the cost model: local steps one after the other on the chip,
collectives one after the other on the links, each as soon as its input is there and the link is free. Weights are
gathered one pass ahead. The ways differ in what is split (ZeRO) and in when gradients are sent.
"""

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec

from meshwright.algebra.notation import ShardedArray
from meshwright.cost.lanes import Lanes, LaneSlices, joined
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import PricedStrategy, price_strategy
from meshwright.cost.work.kernels import StepCost
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

Send = Literal["at the end", "each", "buckets"]

BUCKET_BYTES = 25e6
"""Bytes of gradients that are sent together: the default of PyTorch's DistributedDataParallel."""


class DataParallelism(msgspec.Struct, frozen=True, kw_only=True):
    """One way of data parallelism: what ZeRO splits, and when gradients are sent."""

    name: str
    zero: int
    send: Send


WAYS: tuple[DataParallelism, ...] = (
    DataParallelism(name="data parallel, naive", zero=0, send="at the end"),
    DataParallelism(name="overlapped", zero=0, send="each"),
    DataParallelism(name="bucketed", zero=0, send="buckets"),
    DataParallelism(name="ZeRO-1", zero=1, send="each"),
    DataParallelism(name="ZeRO-3", zero=3, send="each"),
)


def two_streams(
    setting: Setting, way: DataParallelism, *, layers: int = 3, remat: str = "none", bucket_bytes: float = BUCKET_BYTES
) -> LaneSlices:
    """Returns both lanes of forward, backward and optimizer of ``layers`` layers, one microbatch, data parallel.

    The optimizer waits for every gradient, since the norm of all of them scales each.
    """
    strategy = Strategy(
        mesh=make_mesh({"fsdp": setting.cluster.num_chips}), assignment=standard_assignment(zero=way.zero), remat=remat
    )
    priced_strategy = price_strategy(setting, strategy)
    lanes = _Passes(priced_strategy, way, bucket_bytes)
    one_layer = max(priced_strategy.costs.layers, key=lambda one_layer: one_layer.steps.repeat)
    input_names = {name for op in one_layer.steps.block.ops for name in op.inputs}
    update_costs = [cost for cost in priced_strategy.costs.once if cost.step.result.name in input_names]
    passes = [("forward", layer, one_layer.forward) for layer in range(layers)]
    redo_costs, back_costs, segment_len = one_layer.again, one_layer.backward[len(one_layer.again) :], strategy.segment
    for layer in reversed(range(layers)):
        first_layer = layer // segment_len * segment_len if redo_costs and isinstance(segment_len, int) else layer
        passes += [*(("recompute", i, redo_costs) for i in range(first_layer, layer)), ("backward", layer, back_costs)]
    for pass_index, (kind, layer, costs) in enumerate(passes):
        passes_ahead = passes[pass_index + 1 : pass_index + 2] if pass_index else passes[:2]
        for _, next_layer, next_costs in passes_ahead:
            for cost in (cost for cost in next_costs if cost.gathers_weights):
                key = (id(next_costs), next_layer, cost.step.result)
                lanes.gathered[key] = lanes.collective(cost, next_layer, lanes.compute_end_s)
        lanes.run(kind, layer, costs)
    lanes.send_gradients()
    # the optimizer, and the gathers of the weights that it has updated
    for layer, cost in itertools.product(range(layers), update_costs):
        if cost.step.is_collective:
            lanes.collective(cost, layer, lanes.compute_end_s)
        else:
            lanes.compute("optimizer", float(cost.local_s), layer=layer)
    return LaneSlices(name=way.name, slices=joined(lanes.slices))


class _Passes(Lanes):
    """Both lanes of the passes; a step starts when its inputs are ready and its lane is free.

    ``gathered`` has the end of each gather of weights by pass, layer and result; ``waiting`` has gradients to send.
    """

    def __init__(self, priced: PricedStrategy, way: DataParallelism, bucket_bytes: float) -> None:
        super().__init__()
        self.priced, self.way, self.bucket_bytes = priced, way, bucket_bytes
        self.gathered: dict[tuple[int, int, ShardedArray], float] = {}
        self.waiting: list[tuple[StepCost, int, float]] = []

    def run(self, what: str, layer: int, costs: Sequence[StepCost]) -> None:
        """Adds one pass over one layer."""
        ready_s: dict[ShardedArray, float] = {}
        for cost in costs:
            step = cost.step
            start_s = max((ready_s.get(array, 0.0) for array in step.inputs), default=0.0)
            if cost.gathers_weights:
                ready_s[step.result] = self.gathered[id(costs), layer, step.result]
            elif step.is_collective and cost.hides:
                self.waiting.append((cost, layer, start_s))
                is_full = sum(float(grad_cost.network_bytes) for grad_cost, _, _ in self.waiting) >= self.bucket_bytes
                if self.way.send == "each":
                    self.waiting.clear()
                    self.collective(cost, layer, start_s)
                elif self.way.send == "buckets" and is_full:
                    self._send_bucket()
            elif step.is_collective:
                ready_s[step.result] = self.collective(cost, layer, max(start_s, self.compute_end_s))
            else:
                end_s = self.compute(what, float(cost.local_s), layer=layer, when=start_s)
                ready_s.update(dict.fromkeys((step.result, *step.more), end_s))

    def send_gradients(self) -> None:
        """Sends the remaining gradients when the backward pass is done; then the optimizer may start."""
        if self.way.send == "buckets":
            self._send_bucket()
        for cost, layer, _ in self.waiting:
            self.collective(cost, layer, self.compute_end_s)
        self.compute_end_s = max(self.compute_end_s, self.links_end_s)

    def _send_bucket(self) -> None:
        """Sends all waiting gradients as one collective: the bytes of all, the latency of one."""
        if not self.waiting:
            return
        (first_cost, layer, _), start_s = self.waiting[0], max(start_s for _, _, start_s in self.waiting)
        rate = self.priced.rates.groups[first_cost.group][first_cost.step.op]
        send_s = float(rate.time(sum(float(cost.network_bytes) for cost, _, _ in self.waiting)))
        self.waiting = []
        self.send(_name(first_cost), send_s, layer=layer, when=start_s)

    def collective(self, cost: StepCost, layer: int, when: float) -> float:
        """Sends one collective; returns its end."""
        return self.send(_name(cost), float(cost.network_s), layer=layer, when=when)


def _name(cost: StepCost) -> str:
    return cost.step.op.replace("_", "-")
