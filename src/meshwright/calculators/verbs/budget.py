"""`meshwright budget`: what a compute budget trains, and what it takes: size, tokens, loss, days, energy, money."""

from typing import Any

import msgspec

from meshwright.calculators.training.failures import ExpectedGoodput, goodput
from meshwright.calculators.training.run_cost import CostAssumptions, one_chip_costs, run_cost
from meshwright.calculators.training.scaling_laws import (
    DEFAULT_LAW,
    LAWS,
    Allocation,
    ScalingLaw,
    allocation,
    fixed_ratio,
    flops_for_loss,
    scaling_law,
)
from meshwright.calculators.verbs.budget_text import budget_text
from meshwright.calculators.verbs.show_chip import product_dtype
from meshwright.cli.verb import Options, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.core.units import parse_count
from meshwright.cost.formulas.training_budget import available_flops, mfu_from_hours, petaflop_days, training_flops
from meshwright.report.answer import Answer
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import chips, peak
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.model import Model
from meshwright.spec.weights import num_active_params, params_by_part

MAX_FLOPS = 1e36
ASSUMED_MFU = CostAssumptions().mfu


class Given(Options):
    flops: str | None = argument()
    model_name: str | None = option("A model (name or config.json) instead of a size of the law's choice.", "--model")
    params_text: str | None = option("Parameters that a token uses, such as 70B, instead of --model.", "--params")
    tokens_text: str | None = option("Tokens of the run, such as 15T.", "--tokens")
    loss: float | None = option("Nats per token to reach: the least budget by the law.")
    law: str = option(f"Scaling law: {', '.join(LAWS)}.", default=DEFAULT_LAW)
    on: str | None = option("A cluster, such as h100:8x128: days, energy, money.")
    mfu: float | None = option(f"Assumed share of the chips' peak [default: {ASSUMED_MFU}].")
    chip_hours_text: str | None = option(
        "Chip-hours that a run took, such as 2.79M: gives its utilisation.", "--chip-hours"
    )
    dtype: str | None = option("Dtype of the products [default: bf16 where the chip has it].")
    pue: float = option("Energy of the building over its machines'.", default=1.0)
    host_share: float = option("Power of hosts and network, of chips'.", default=0.0)
    price: float | None = option("Dollars a chip-hour, instead of the catalogue's.")
    watts: float | None = option("Watts of a chip, instead of the catalogue's.")
    chips_per_rack: int | None = option("Gives the floor that racks of so many chips take.")
    m2_per_rack: float = option("Floor of a rack.", default=1.0)
    with_years: bool = option("Years on one of each chip of the catalogue.", "--years")
    nodes: int | None = option("Nodes that may fail [default: the hosts of --on].")
    failure_rate: float | None = option("Failures of 1000 nodes in a day.", "--failures-per-1000-node-days")
    checkpoint_s: float = option("Seconds a save stops the run.", default=60.0)
    restart_s: float = option("Seconds from a failure to work.", default=600.0)
    interval_s: float | None = option("Seconds of work between saves [default: Daly's best].")


@verb(Given)
def command(given: Given) -> Answer:
    """What FLOPS train (6 N D), or what a model and its tokens take, and how long that is on chips."""
    chosen = scaling_law(given.law)
    assumed = CostAssumptions(
        mfu=ASSUMED_MFU if given.mfu is None else given.mfu,
        pue=given.pue,
        host_share=given.host_share,
        price_usd_per_hour=given.price,
        watts_per_chip=given.watts,
        chips_per_rack=given.chips_per_rack,
        m2_per_rack=given.m2_per_rack,
    )
    cluster = parse_cluster(given.on) if given.on else None
    failing = _failures(cluster, given.nodes, given.failure_rate, given.checkpoint_s, given.restart_s, given.interval_s)
    found = load_model(given.model_name) if given.model_name else None
    wanted = (given.flops, found, given.params_text, given.tokens_text, given.loss)
    if failing is not None and all(one is None for one in wanted):
        facts: dict[str, Any] = {"flops": None, "failures": failing}
    else:
        amount, size, tokens = _budget(*wanted, chosen)
        reached = _utilisation(amount, cluster, given.dtype, given.chip_hours_text, given.mfu)
        if reached is not None:
            assumed = msgspec.structs.replace(assumed, mfu=reached["mfu"])
        facts = {
            "flops": amount,
            "petaflop_days": petaflop_days(amount),
            **_law_facts(amount, chosen, size, found),
            "tokens": tokens,
            "utilisation": reached,
            # hours that were published hold what failures cost
            "run": _run(amount, cluster, given.dtype, assumed, None if reached else failing),
            "years": _years(amount, given.dtype, assumed) if given.with_years else None,
            "failures": failing,
        }
    return Answer(_plain(facts), budget_text(facts, chosen, found))


def _plain(value: Any) -> Any:
    """Allocations with what follows from them; the rest as it is."""
    if isinstance(value, Allocation):
        return {**msgspec.structs.asdict(value), "tokens_per_param": value.tokens_per_param}
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


# -- what is given --------------------------------------------------------------------------------------


def _budget(
    flops: str | None,
    model: Model | None,
    params_text: str | None,
    tokens_text: str | None,
    loss: float | None,
    law: ScalingLaw,
) -> tuple[float, float | None, float | None]:
    """FLOPs, and parameters and tokens where they are given or follow: two of the three give the third."""
    if model is not None and params_text is not None:
        raise InputError("--model and --params both say the size. Leave one of them out.")
    size = float(num_active_params(model)) if model else _count(params_text, "--params")
    tokens, amount = _count(tokens_text, "--tokens"), _count(flops, "FLOPS")
    if loss is not None:
        if amount is not None or size is not None or tokens is not None:
            raise InputError("--loss asks for the least budget. Leave FLOPS, size and tokens out.")
        return flops_for_loss(law, loss), None, None
    if size is not None and tokens is not None:
        if amount is not None:
            raise InputError("FLOPS, a size and --tokens are one too many: 6 N D is the budget. Leave one of them out.")
        amount = training_flops(size, tokens)
    if amount is None:
        missing = "its --tokens, or FLOPS" if size else "a size too" if tokens else "FLOPS, such as 1e24"
        raise InputError(f"the budget is not known. Give {missing}.")
    if amount > MAX_FLOPS:
        raise InputError(f"{amount:g} FLOPs are more than all machines will do. Give at most {MAX_FLOPS:g}.")
    if tokens is not None and size is None:
        size = amount / training_flops(1, tokens)
    return amount, size, tokens if size is None else amount / training_flops(size, 1)


def _count(text: str | None, what: str) -> float | None:
    if text is None:
        return None
    value = float(parse_count(text, what=what))
    if value < 1:
        raise InputError(f"{what} {text} must be at least 1.")
    return value


# -- laws -----------------------------------------------------------------------------------------------


def _law_facts(flops: float, law: ScalingLaw, size: float | None, model: Model | None) -> dict[str, Any]:
    """The optimum of the chosen law, of all laws, and where a given size stands beside them."""
    facts: dict[str, Any] = {
        "law": law.name,
        "optimum": law.optimum(flops),
        "rule_of_20": fixed_ratio(flops, law=law),
        "laws": [{"law": one.name, "source": one.source, **_plain(one.optimum(flops))} for one in LAWS.values()],
        "spent": None,
        "loss_by_law": None,
        "optimal_flops_for_its_loss": None,
    }
    if size is not None:
        spent = {one.name: _spent(one, size, flops, model) for one in LAWS.values()}
        facts["spent"] = allocation(size, flops, law=law) if law.params_counted == "all" else spent[law.name]
        facts["loss_by_law"] = {name: one.loss for name, one in spent.items()}
        reached = spent[law.name].loss
        facts["optimal_flops_for_its_loss"] = None if reached is None else _least(law, reached)
    return facts


def _spent(law: ScalingLaw, size: float, flops: float, model: Model | None) -> Allocation:
    """The run as a law counts it: Kaplan leaves embeddings out of N. Tokens are the same for all."""
    num_tokens = flops / training_flops(size, 1)
    counted = size
    if model is not None and law.params_counted == "without embeddings":
        parts = params_by_part(model)
        counted = size - parts.get("embedding", 0) - parts.get("unembedding", 0)
    return Allocation(num_params=counted, num_tokens=num_tokens, loss=float(law.loss(counted, num_tokens)))


def _least(law: ScalingLaw, loss: float) -> float | None:
    try:
        return flops_for_loss(law, loss)
    except InputError:
        return None


# -- chips ----------------------------------------------------------------------------------------------


def _utilisation(
    flops: float, cluster: Cluster | None, dtype: str | None, chip_hours_text: str | None, mfu: float | None
) -> dict[str, Any] | None:
    """The share of the chips' peak that published chip-hours come to; None where none are given."""
    hours = _count(chip_hours_text, "--chip-hours")
    if hours is None:
        return None
    if cluster is None:
        raise InputError(f"--chip-hours {chip_hours_text} needs the chips they were spent on. Give --on.")
    if mfu is not None:
        raise InputError(f"--chip-hours {chip_hours_text} gives the utilisation. Leave --mfu out.")
    used = _dtype(cluster, dtype)
    rate = peak(cluster.chip, used)
    share = mfu_from_hours(flops, hours, rate)
    if share > 1:
        raise InputError(
            f"{hours:,.4g} chip-hours of {cluster.chip.name} at {used} can do {available_flops(hours, rate):.3g} FLOPs "
            f"and the run is {flops:.3g}. Give more hours, or another dtype."
        )
    return {"chip_hours": hours, "chip": cluster.chip.name, "dtype": used, "peak_flops": rate, "mfu": share}


def _dtype(cluster: Cluster, dtype: str | None) -> str:
    used = dtype or product_dtype(cluster.chip)
    if used is None:
        raise InputError(f"the peak of {cluster.chip.name} is not known. Name a chip of meshwright show chips.")
    return used


def _run(
    flops: float, cluster: Cluster | None, dtype: str | None, given: CostAssumptions, failing: ExpectedGoodput | None
) -> dict[str, Any] | None:
    if cluster is None:
        return None
    used = _dtype(cluster, dtype)
    share = 1.0 if failing is None else failing.goodput
    if share <= 0:
        raise InputError("failures leave no time for work at this interval. Save faster, or give fewer nodes.")
    cost = run_cost(flops, cluster.chip, num_chips=cluster.num_chips, dtype=used, given=given, useful_share=share)
    alone = run_cost(flops, cluster.chip, dtype=used, given=given)
    return {
        "cluster": cluster.short_name, **msgspec.structs.asdict(cost), "pue": given.pue, "goodput": share,
        "one_chip_years": alone.years,
    }  # fmt: skip


def _years(flops: float, dtype: str | None, given: CostAssumptions) -> list[dict[str, Any]]:
    """One of each chip of the catalogue that has a peak, or one in that dtype."""
    every = [c for c in chips().values() if c.variant == "datasheet" and c.peak_flops]
    units = [c for c in every if dtype is None or dtype in c.peak_flops]
    if not units:
        raise InputError(f"no chip of the catalogue has a {dtype} rate. Leave --dtype out.")
    dtypes = [dtype or product_dtype(c) or "" for c in units]
    return [msgspec.structs.asdict(row) for row in one_chip_costs(flops, units, dtypes=dtypes, given=given)]


def _failures(
    cluster: Cluster | None,
    nodes: int | None,
    rate: float | None,
    checkpoint_s: float,
    restart_s: float,
    interval_s: float | None,
) -> ExpectedGoodput | None:
    if rate is None:
        if nodes is not None:
            raise InputError(f"--nodes {nodes} needs a rate. Give --failures-per-1000-node-days, such as 10.")
        return None
    count = nodes if nodes is not None else cluster.num_hosts if cluster else None
    if count is None:
        raise InputError("--failures-per-1000-node-days needs a number of machines. Give --nodes or --on.")
    return goodput(
        count, failures_per_node_day=rate / 1000, checkpoint_s=checkpoint_s, restart_s=restart_s, interval_s=interval_s
    )
