"""Explains a plan: its terms, its largest steps, changes that would help, the numbered algorithm, and the limits."""

from collections.abc import Iterator, Sequence

import msgspec

from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import CannotRunError
from meshwright.cost.breakdown import Breakdown, PricedOverlap, Term
from meshwright.cost.formulas.limit_table import Limit, limits_at
from meshwright.cost.letters import Letters
from meshwright.cost.outer import OuterExchange, step_values
from meshwright.cost.train_step import Estimate, PricedStrategy, price_strategy
from meshwright.cost.work.kernels import StepCost
from meshwright.masks.kernels import AttentionCase, kernel_named
from meshwright.masks.names import mask_named
from meshwright.plan.islands import plan_of_island
from meshwright.plan.legal import MEMORY_RULE, legal
from meshwright.plan.plan_file import Plan
from meshwright.plan.run_budget import RunBudget, run_budget
from meshwright.plan.why.bounds import BatchSplit, batch_of, letters_of, sheet_letters
from meshwright.plan.why.fsdp_case import FsdpCase, fsdp_case
from meshwright.plan.why.single_changes import Tried, try_changes
from meshwright.spec.chip import catalogued
from meshwright.spec.strategy import BATCH_AXES

MAX_FREE_SHARE = 0.002
"""Local steps that take at most this share of a pass are left out of the listing (every sum still has them)."""


class ListedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One numbered line of an algorithm: a derived step, its bytes, FLOPs and seconds, and whether it is exposed.

    ``num_bytes`` is the size of a collective's full array, or the memory traffic of a local step. ``overlaps`` says in
    words when the step can hide. ``times`` is how often it runs: on the busiest device in `Explanation.once`, on
    average for steps that a backward pass runs several times, else 1."""

    number: int
    text: str
    op: str
    phase: str
    num_bytes: float
    flops: float
    time_s: float
    critical: bool
    overlaps: str
    times: float = 1.0


class LargestStep(msgspec.Struct, frozen=True):
    """A derived step that runs ``runs`` times on the busiest device: ``alone_s`` are the seconds of all runs without
    overlap, ``added_s`` the seconds by which the training step would be shorter if it took no time."""

    text: str
    block: str
    phase: str
    runs: float
    alone_s: float
    added_s: float


class Algorithm(msgspec.Struct, frozen=True, kw_only=True):
    """A list of steps: its lines, and the seconds of compute, of collectives that can hide and of exposed ones.

    ``num_left_out`` counts steps that have no line.
    """

    title: str
    lines: tuple[ListedStep, ...]
    compute_s: float
    hidden_s: float
    critical_s: float
    num_left_out: int

    @property
    def alone_s(self) -> float:
        """Seconds without any overlap."""
        return self.compute_s + self.hidden_s + self.critical_s


class BlockListing(msgspec.Struct, frozen=True, kw_only=True):
    """Both passes over one layer of a block; the model has ``repeat`` such layers."""

    name: str
    repeat: int
    forward: Algorithm
    backward: Algorithm


class BetweenStages(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of a pipeline: the sends of one microbatch over one boundary, the exposed sends of a step with their
    seconds, and the seconds of the bubble."""

    schedule: str
    stages: int
    chunks: int
    microbatches: int
    sends: Algorithm
    num_sends: float
    sends_s: float
    bubble_s: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """All that `explain` shows of one plan; the estimate is computed anew from the plan's own rates.

    ``terms`` add up to the step, the largest first; ``largest`` are the steps that add most. ``recomputed`` is the
    share of all FLOPs that recompute results for the backward pass. ``changes`` has the best single change. ``fsdp`` is
    the case of FSDP alone. ``blocks`` are the blocks of layers, the one with the most layers last; ``once`` lists the
    steps after the last microbatch. ``islands`` lists the sums between islands, which share the seconds of an
    ``exchange``; None for one island. All other listings are of one island. ``attention_kernel`` is the name of the
    kernel that runs attention (`masks.kernels`). ``symbols`` are the symbols in ``limits``. ``training`` is the budget
    of the run, None if the job has no ``train_tokens``.
    """

    plan: Plan
    estimate: Estimate
    terms: tuple[Term, ...]
    largest: tuple[LargestStep, ...]
    overlap: PricedOverlap
    recomputed: float
    changes: Tried
    fsdp: FsdpCase | None
    blocks: tuple[BlockListing, ...]
    between: BetweenStages | None
    once: Algorithm
    islands: Algorithm | None
    exchange: OuterExchange | None
    batch: BatchSplit
    attention_kernel: str
    symbols: Letters
    limits: tuple[Limit, ...]
    training: RunBudget | None

    @property
    def sheet(self) -> Letters:
        """The letters with C / W by the data sheet."""
        plan = self.plan
        return sheet_letters(self.symbols, plan.cluster, plan.strategy.matmul_dtype, plan.calibration)

    @property
    def sheet_bounds(self) -> dict[str, float]:
        """Maps the name of each limit whose bound the data sheet puts elsewhere to that bound."""
        bound_by_name = {limit.name: limit.limit for limit in limits_at(self.sheet)}
        pairs = [(own, bound_by_name[own.name]) for own in self.limits if own.name in bound_by_name]
        return {own.name: bound for own, bound in pairs if abs(bound - own.limit) > 1e-3 * abs(own.limit)}

    @property
    def forward(self) -> Algorithm:
        """The forward pass of the block with the most layers."""
        return self.blocks[-1].forward

    @property
    def backward(self) -> Algorithm:
        """The backward pass of the block with the most layers."""
        return self.blocks[-1].backward


def explain(plan: Plan) -> Explanation:
    """Returns the explanation of a plan.

    Raises CannotRunError if the sizes do not divide or the mesh cannot be laid out. A plan that needs more memory than
    a chip has is explained too; its limit on memory is marked as missed.
    """
    setting = plan.setting
    for refusal in legal(setting, plan.strategy):
        if refusal.rule != MEMORY_RULE:
            raise CannotRunError(refusal.message)
    priced = price_strategy(setting, plan.strategy)
    budget = run_budget(plan, step_s=priced.estimate.step_s)
    letters = letters_of(priced, budget)
    phase_flops = [(cost.step.phase, float(cost.flops * cost.count)) for cost in priced.costs.all]
    breakdown = Breakdown(priced)
    return Explanation(
        plan=plan,
        estimate=priced.estimate,
        terms=breakdown.terms,
        largest=largest_steps(breakdown),
        overlap=breakdown.overlap(),
        recomputed=sum(n for phase, n in phase_flops if phase == "recompute") / sum(n for _, n in phase_flops),
        changes=try_changes(setting, plan.strategy, priced.estimate.step_s),
        fsdp=fsdp_case(plan_of_island(plan)),
        blocks=_passes(priced),
        between=_between_stages(priced),
        once=algorithm("once per step", priced.costs.once, of_layers=True),
        islands=_between_islands(priced),
        exchange=priced.exchange,
        batch=batch_of(priced),
        attention_kernel=attention_kernel(plan),
        symbols=letters,
        limits=tuple(sorted(limits_at(letters), key=lambda limit: limit.kind != "speed")),
        training=budget,
    )


def attention_kernel(plan: Plan) -> str:
    """Returns the name of the kernel that runs attention (of an encoder-decoder, the decoder's) on the plan's chips."""
    model, chip, strategy = plan.model, plan.cluster.chip, plan.strategy
    gpu = catalogued(chip, "xla_gpu")
    gpu_platform = "cuda" if chip.vendor == "NVIDIA" else "rocm"
    context_size = strategy.mesh.get("context", 1)
    case = AttentionCase(
        platform={"torus": "tpu", "host": "cpu"}.get(chip.topology, gpu_platform),
        capability=float(gpu.capability.rstrip("a")) if gpu else 0,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[strategy.state_dtype],
        widths=(model.head_dim, model.v_head_dim or model.head_dim),
        positions=plan.job.seq_len // context_size,
        terms={*(mask_named(model.attention_mask or "causal").terms or {""}), *["chunk"] * model.chunked_windows},
        in_order=context_size == 1 or strategy.context_attention == "ulysses",
        scored=bool(model.attention_score or model.relative_buckets or model.attention_softcap),
        looks_up=bool(model.relative_buckets),
    )
    return kernel_named(case)


def limit_of_term(term: Term, limits: Sequence[Limit]) -> Limit | None:
    """Returns the most specific of ``limits`` on the work of a term of the step; None if no limit concerns it."""
    limit_by_name = {limit.name: limit for limit in limits}
    return next((limit_by_name[name] for name in _limits_of(term.name) if name in limit_by_name), None)


def _limits_of(name: str) -> Iterator[str]:
    """Yields the names of limits on the work of the term ``name`` (axes, or "bubble"), the most specific first."""
    axis_names = set(name.split(","))
    if name == "bubble":
        yield "microbatches, bubble < 10%"
    if axis_names == {"expert"}:
        yield "expert width, AllToAll shorter"
    if axis_names == {"context"}:
        yield "positions/device, ring hides"
    if "tensor" in axis_names:
        yield "tensor"
    if "fsdp" in axis_names:
        yield "tokens/chip, weights hide"
    if axis_names & {*BATCH_AXES, "context"}:
        yield from ("tokens/chip, gradients hide", "tokens/slice, over DCN")


# -- the algorithm ----------------------------------------------------------------------------------------


def largest_steps(breakdown: Breakdown, count: int = 10) -> tuple[LargestStep, ...]:
    """Returns the steps of all parts that add most to a training step, the largest first."""
    priced, exchange, between_islands = breakdown.priced, breakdown.priced.exchange, _between_islands(breakdown.priced)
    cost_runs = [(cost, float(cost.here)) for cost in priced.costs.all]
    cost_runs += [(cost, float(priced.pipeline.num_sends) / 2) for cost in priced.costs.boundary]
    cost_runs.sort(key=lambda pair: -float(pair[0].time_s) * pair[1])
    steps = [  # a step adds about what it takes, or less
        LargestStep(str(c.step), c.step.block or "", c.step.phase, n, float(c.time_s) * n, breakdown.added_s(c))
        for c, n in cost_runs[: 4 * count]
    ]
    if exchange is not None and between_islands is not None and exchange.serial_s:
        added_share = priced.exchange_s / exchange.serial_s
        steps_s = [(line, line.time_s / exchange.period) for line in between_islands.lines]
        runs = 1 / exchange.period
        steps += [LargestStep(x.text, "islands", x.phase, runs, s, s * added_share) for x, s in steps_s]
    return tuple(sorted(steps, key=lambda step: -step.added_s)[:count])


def _passes(priced: PricedStrategy) -> tuple[BlockListing, ...]:
    """Returns the passes over every block of layers, the one with the most layers last."""
    layer_blocks, listings = priced.costs.layers, []
    for block in layer_blocks:
        repeat = block.steps.repeat
        suffix = "" if len(layer_blocks) == 1 else f" ({block.name}, {repeat} of {priced.derived.num_layers})"
        listings.append(
            BlockListing(
                name=block.name,
                repeat=repeat,
                forward=algorithm(f"forward pass of one layer{suffix}", block.forward),
                backward=algorithm(
                    f"backward pass of one layer{suffix}",
                    block.backward,
                    again=(len(block.again), float(block.steps.times_again(priced.pipeline.runs)) / repeat),
                ),
            )
        )
    return tuple(sorted(listings, key=lambda listing: listing.repeat))


def _between_stages(priced: PricedStrategy) -> BetweenStages | None:
    """Returns the costs of a pipeline; None if the plan has one stage."""
    strategy = priced.strategy
    if strategy.mesh.get("pipeline", 1) == 1:
        return None
    num_microbatches = strategy.num_microbatches
    seconds_by_term = priced.estimate.terms
    return BetweenStages(
        schedule=strategy.schedule,
        stages=strategy.mesh["pipeline"],
        chunks=strategy.chunks,
        microbatches=num_microbatches,
        sends=algorithm("between stages, one microbatch", priced.costs.boundary),
        num_sends=float(priced.pipeline.num_sends),
        sends_s=float(seconds_by_term.get("pipeline", 0.0)),
        bubble_s=float(seconds_by_term.get("bubble", 0.0)),
    )


def _between_islands(priced: PricedStrategy) -> Algorithm | None:
    """Returns the sums between islands, each with its share of the seconds of an exchange; None for one island."""
    exchange = priced.exchange
    if exchange is None:
        return None
    values = [step_values(step, priced.sizes) for step in priced.derived.outer]
    exchange_s = exchange.serial_s * exchange.period
    lines = [
        ListedStep(
            number=number,
            text=str(step),
            op=step.op,
            phase=step.phase,
            num_bytes=num_values * DTYPE_BYTES[step.result.dtype],
            flops=0.0,
            time_s=exchange_s * num_values / exchange.num_values,
            critical=not exchange.hidden_s,
            overlaps=step.details.words,
        )
        for number, (step, num_values) in enumerate(zip(priced.derived.outer, values, strict=True), 1)
    ]
    return Algorithm(
        title="between islands, on their hosts",
        lines=tuple(lines),
        compute_s=0.0,
        hidden_s=exchange.hidden_s,
        critical_s=exchange_s - exchange.hidden_s,
        num_left_out=0,
    )


def algorithm(
    title: str, costs: Sequence[StepCost], *, of_layers: bool = False, again: tuple[int, float] = (0, 1.0)
) -> Algorithm:
    """Returns the lines and sums of a list of steps; with ``of_layers`` each counts as often as the busiest device runs
    it, else once. ``again`` = (n, runs): the first n steps count ``runs`` times instead."""
    num_again, mean_runs = again
    cost_runs = [(c, float(c.here) if of_layers else mean_runs if i < num_again else 1.0) for i, c in enumerate(costs)]
    total_s = sum(float(c.time_s) for c in costs)
    listed_runs = [(c, n) for c, n in cost_runs if c.step.is_collective or float(c.time_s) > MAX_FREE_SHARE * total_s]
    return Algorithm(
        title=title,
        lines=tuple(_line(i, cost, num_runs) for i, (cost, num_runs) in enumerate(listed_runs, 1)),
        compute_s=sum(float(c.local_s) * n for c, n in cost_runs if not c.step.is_collective),
        hidden_s=sum(float(c.network_s) * n for c, n in cost_runs if c.hides),
        critical_s=sum(float(c.network_s) * n for c, n in cost_runs if c.step.is_collective and not c.hides),
        num_left_out=len(costs) - len(listed_runs),
    )


def _line(line_number: int, cost: StepCost, num_runs: float) -> ListedStep:
    return ListedStep(
        number=line_number,
        text=str(cost.step),
        op=cost.step.op,
        phase=cost.step.phase,
        num_bytes=float(cost.network_bytes if cost.step.is_collective else cost.hbm_bytes),
        flops=float(cost.flops),
        time_s=float(cost.time_s),
        critical=cost.step.is_collective and not cost.hides,
        overlaps=_overlap(cost),
        times=num_runs,
    )


def _overlap(cost: StepCost) -> str:
    step = cost.step
    if not step.is_collective:
        return "recomputed" if step.phase == "recompute" else ""
    if cost.in_ring_loop:
        return "can overlap with its products"
    if cost.hides:
        return "can overlap" + ", prefetched" * cost.gathers_weights + ", once per step" * (step.scope == "step")
    return "on the critical path"
