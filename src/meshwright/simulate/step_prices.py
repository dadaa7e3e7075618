"""Prices of an engine's steps: the bytes and FLOPs of the program that it runs, and their seconds by the cost model."""

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from meshwright.algebra.derived import Derived
from meshwright.algebra.generation.program import Storage
from meshwright.algebra.ops import kind_of
from meshwright.algebra.program import WEIGHTS
from meshwright.batching.clock import Clock
from meshwright.cost.setting import Setting
from meshwright.cost.step_costs import op_sizes
from meshwright.cost.step_rates import strategy_placements
from meshwright.cost.work.ops import is_attention, op_flops, op_hbm_bytes
from meshwright.cost.work.sequences import LikeSequences
from meshwright.cost.work.slots import unread_bytes
from meshwright.simulate.service import PricedClock
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy


class StepPrices:
    """Prices the steps of a server's packed program, ``derived`` from a model under a strategy. ``clock`` gives their
    seconds; it is None, and the peaks per device are 0, until `set_rates`."""

    clock: Clock | None = None
    peak_flops_per_s = peak_bytes_per_s = 0.0

    def __init__(self, model: Model, strategy: Strategy, derived: Derived) -> None:
        self.model, self.strategy, self.derived = model, strategy, derived

    def set_rates(self, cluster: Cluster, calibration: Calibration | None, storage: Storage) -> None:
        """Sets clock and peaks from the rates of a cluster; does nothing for models with an encoder, whose sources `of`
        does not count. Raises InputError if the rates lack a dtype of the strategy."""
        if self.model.encoder:
            return
        base_storage = replace(storage, adapters=0)
        setting = Setting(self.model, cluster, Job(kind="decode", batch_seqs=1, seq_len=1), calibration, base_storage)
        rates = setting.step_rates(self.strategy, strategy_placements(cluster, self.strategy)[:1])
        self.clock, self.peak_flops_per_s = PricedClock(setting, self.strategy), float(rates.peak_flops_per_s)
        self.peak_bytes_per_s = float(cluster.chip.hbm_bytes_per_s or rates.chip.hbm_bytes_per_s)

    def of(self, steps: ArrayLike) -> NDArray[np.float64]:
        """Returns for each row of ``steps`` the seconds (NaN without rates), and per device the bytes of weights that
        are read, the bytes of the cache that are read, and the FLOPs.

        Columns of ``steps``: decode rows, cached tokens that these read, prefill tokens, (query, key) pairs of
        prefill attention, cached positions of all sequences, and rows with logits.
        """
        num_decoded, num_cached, num_prefilled, num_pairs, num_positions, num_outputs = np.transpose(steps)
        seconds = np.full(len(num_decoded), np.nan)
        if self.clock:
            mean_past = np.maximum(num_pairs / np.maximum(num_prefilled, 1) - 1, 0)
            seconds = self.clock.step_s(num_decoded, num_cached, num_prefilled, mean_past)
        n_rows = num_decoded + num_prefilled
        sizes = op_sizes(self.model, seq_len=1, microbatch_seqs=n_rows, mesh=self.strategy.mesh, strategy=self.strategy)
        prompt_rows, num_earlier = np.maximum(num_prefilled, 1), np.maximum(num_positions - num_cached - num_decoded, 1)
        prompt_seqs = LikeSequences.of_sums(prompt_rows, np.maximum(num_pairs, 1), num_earlier)
        decode_seqs = LikeSequences(num_decoded, 1.0, num_cached / np.maximum(num_decoded, 1))
        prompt_seqs = replace(prompt_seqs, count=prompt_seqs.count * (num_prefilled > 0))
        size_by_dim = {**sizes.dims, "O": num_outputs, "Q": 0.0, "Pg": 1.0, "Pw": 1.0, "Pl": 1.0, "Bp": 0.0, "Bx": 0.0}
        sizes = replace(sizes, dims=size_by_dim, sequences=(decode_seqs, prompt_seqs), cache={})
        weight_bytes = kv_bytes = flops = 0.0
        w_names = {name for name, variable in self.derived.program.variables.items() if variable.role in WEIGHTS}
        for step, num_runs in self.derived.steps():
            if step.is_collective:
                continue
            if is_attention(step):
                uncached_arrays = [array for array in (*step.inputs, *step.results) if "Pl" not in array.dims]
                kv_bytes = kv_bytes + num_runs * (op_hbm_bytes(step, sizes) - sizes.total(*uncached_arrays))
            flops = flops + num_runs * op_flops(step, sizes)
            if kind_of(step).group != "embedding":  # an embedding reads only a few rows of its table
                weight_bytes = weight_bytes + num_runs * (
                    sizes.total(*(array for array in step.inputs if array.name in w_names)) - unread_bytes(step, sizes)
                )
        return np.transpose(np.broadcast_arrays(seconds, weight_bytes, kv_bytes, flops))
