"""A server's steps: their prices, and an engine whose decode steps are profiled."""

from collections.abc import Sequence
from contextlib import suppress

import jax
import numpy as np
from msgspec.structs import replace

from meshwright.algebra.generation.cache import source_len
from meshwright.api.rates import rates_for
from meshwright.batching.limits import SchedulerLimits
from meshwright.core.errors import CannotRunError, InputError, UserError
from meshwright.cost.setting import Setting
from meshwright.nn.weights import init_params
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.profile.memory import Owner
from meshwright.profile.subjects import held_owners
from meshwright.serve.engine import Engine
from meshwright.serve.layout import with_usual
from meshwright.serve.options import EngineOptions
from meshwright.serve.request import TokenRequest
from meshwright.simulate.step_prices import StepPrices
from meshwright.spec.chip import chip_of_kind
from meshwright.spec.cluster import slice_shapes
from meshwright.spec.strategy import Strategy


def step_prices(engines: Sequence[Engine]) -> StepPrices:
    """Returns the `StepPrices` of equal engines, with this machine's measured rates from the cache folder, or the
    chip's rates; without rates if none are known. Peaks are one device's times the number of engines."""
    step = engines[0].packed
    prices = StepPrices(step.model, step.strategy, step.derived)
    with suppress(UserError):  # a chip that is not catalogued, or whose rates lack a dtype
        cluster = slice_shapes(chip_of_kind(step.mesh.devices.flat[0].device_kind), step.strategy.num_chips)[0]
        rates = rates_for(cluster, None, fitted=True, measures=False)
        if rates or cluster.kind != "host":
            prices.set_rates(cluster, rates, step.storage)
            prices.peak_flops_per_s *= len(engines)
            prices.peak_bytes_per_s *= len(engines)
    return prices


class ServedDecode:
    """Profiles an engine whose requests all decode; prompts are ``num_steps`` + 2 tokens shorter than the job's length.

    Each engine step dispatches a program, reads the tokens of the step before, and waits. Raises InputError if the
    job's length is at most ``num_steps`` + 2, CannotRunError for several processes.
    """

    def __init__(self, setting: Setting, strategy: Strategy, num_steps: int) -> None:
        self.job = job = setting.job
        self.num_tokens = num_steps + 2
        if jax.process_count() > 1:
            raise CannotRunError("an engine runs in one process. Profile it in one, or give --step prefill.")
        if job.seq_len <= self.num_tokens:
            raise InputError(
                f"{num_steps} steps need sequences of more than {self.num_tokens} positions, and they have "
                f"{job.seq_len:,}. Give a longer --seq, or fewer --steps and --warmup."
            )
        cache_dtype, _ = setting.storage.executed
        engine_options = EngineOptions(max_requests=job.batch_seqs)
        self.usual = with_usual(engine_options, jax.default_backend(), cache_dtype, strategy)
        storage = replace(setting.storage, page_len=self.usual.page_len)
        self.step = PackedStep(setting.model, strategy, max_len=job.seq_len, max_seqs=job.batch_seqs, storage=storage)

    def begin(self, seed: int) -> None:
        """Makes an engine with random weights, and prefills random prompts until each has its first token."""
        limits = SchedulerLimits(
            policy="interleaved",  # none decodes before all prompts are in the cache
            max_requests=self.job.batch_seqs,
            token_budget=self.usual.token_budget,
            page_len=self.usual.page_len,
            num_pages=self.step.cache_sizes["Pg"],
            watermark=0,
        )
        self.engine = Engine(self.step, self.step.place(init_params(self.step.model, seed)), limits)
        prompts_shape = self.job.batch_seqs, self.job.seq_len - self.num_tokens
        source = (0,) * source_len(self.step.model)
        for prompt in np.random.default_rng(seed).integers(0, self.engine.vocab_size, prompts_shape).tolist():
            self.engine.submit(TokenRequest(prompt=tuple(prompt), max_tokens=self.num_tokens, source=source))
        started_numbers = set[int]()
        while len(started_numbers) < self.job.batch_seqs:
            started_numbers |= {output.number for output in self.engine.step()}

    def compile(self) -> jax.stages.Compiled:
        """Returns the compiled program of a step in which all requests decode."""
        decode_shapes = (shape for shape in self.engine.shapes() if shape.longest == 1)
        return self.step.compiled(next(shape for shape in decode_shapes if shape.rows >= self.job.batch_seqs))

    def advance(self, compiled: jax.stages.Compiled) -> None:
        """Runs one engine step and waits for its end, so that one window of the trace has all of it."""
        jax.block_until_ready((self.engine.step(), self.engine._cache))

    def owners(self) -> list[Owner]:
        """Returns weights and cache pages, with their bytes on one device."""
        return held_owners(self.step)
