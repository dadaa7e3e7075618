"""`meshwright budget`: the model size, tokens and loss that a compute budget gives, and its days, energy and money."""

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import click
from msgspec.structs import asdict, replace

from meshwright.calculators.training.scaling_laws import (
    DEFAULT_LAW,
    LAWS,
    TOKENS_PER_PARAM,
    ScalingLaw,
    fixed_ratio,
    flops_for_loss,
    scaling_law,
)
from meshwright.cli.output import format_energy, format_power, three_digits
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.cli.verbs.show_chip import product_dtype
from meshwright.core.errors import InputError
from meshwright.core.fields import LARGEST
from meshwright.core.units import counted, format_flops, format_params, format_seconds, parse_count
from meshwright.cost.formulas.failures import goodput
from meshwright.cost.formulas.training_budget import (
    DAY_S,
    available_flops,
    facility_energy_kwh,
    floor_area_m2,
    flops_per_dollar,
    flops_per_joule,
    mfu_from_hours,
    petaflop_days,
    train_seconds,
    training_flops,
    years,
)
from meshwright.cost.work.ops import token_flops
from meshwright.plan.run_budget import chip_time
from meshwright.report.answer import Answer, Condition, Fact, Facts, Piece, Table
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import Chip, chips, peak
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.model import Model
from meshwright.spec.weights import num_active_params, params_by_part

MAX_FLOPS = 1e36
ASSUMED_MFU = 0.4
"""Share of the peak that is assumed where neither --mfu nor --chip-hours says it."""
PRICED, FAILING = {"on": "--on", "with_years": "--years"}, {"failure_rate": "--failures-per-1000-node-days"}
GUESSED = math.log(262_144)
"""Nats per token of a model that has learned nothing and has the largest vocabulary of the catalogue."""
POSITIVE = click.FloatRange(0, min_open=True)


MONEY = partial(option, needs=PRICED, group="Energy and money")
FAILURE = partial(option, group="Failures", is_rare=True)
SHARE = click.FloatRange(0, 1, min_open=True)


class Given(Options):
    flops: str | None = argument()
    model_name: str | None = option("A model (name or config.json) instead of a size of the law's choice.", "--model")
    params_text: str | None = option("Parameters that a token uses, such as 70B, instead of --model.", "--params")
    tokens_text: str | None = option("Tokens of the run, such as 15T.", "--tokens")
    loss: float | None = option("Nats per token to reach: the least budget by the law.")
    law: str = option(f"Scaling law: {', '.join(LAWS)}.", default=DEFAULT_LAW)
    on: str | None = option("A cluster, such as h100:8x128: days, energy, money.")
    mfu: float | None = option(f"Assumed share of the chips' peak [default: {ASSUMED_MFU}].", type=SHARE, needs=PRICED)
    chip_hours_text: str | None = option("Chip-hours that a run took, such as 2.79M: gives its MFU.", "--chip-hours")
    dtype: str | None = option("Dtype of the products [default: bf16 where the chip has it].", needs=PRICED)
    pue: float = MONEY(
        "Energy of the building over its machines'.", type=click.FloatRange(1), default=1.0, is_rare=True
    )
    host_share: float = MONEY(
        "Power of hosts and network over chips'.", type=click.FloatRange(0), default=0.0, is_rare=True
    )
    price: float | None = MONEY("Dollars a chip-hour, instead of the catalogue's.", type=POSITIVE)
    watts: float | None = MONEY("Watts of a chip, instead of the catalogue's.", type=POSITIVE, is_rare=True)
    chips_per_rack: Count | None = MONEY(
        "Chips of a rack: gives the floor area.", type=click.IntRange(1), needs={"on": "--on"}, is_rare=True
    )
    m2_per_rack: float = MONEY(
        "Floor of a rack.", type=POSITIVE, default=1.0, needs={"chips_per_rack": "--chips-per-rack"}, is_rare=True
    )
    with_years: bool = option("Years on one of each chip of the catalogue.", "--years")
    nodes: Count | None = FAILURE("Nodes that may fail [default: the hosts of --on].")
    failure_rate: float | None = FAILURE(
        "Failures of 1000 nodes in a day.", "--failures-per-1000-node-days", is_rare=False
    )
    checkpoint_s: float = FAILURE("Seconds a save stops the run.", default=60.0, needs=FAILING)
    restart_s: float = FAILURE("Seconds from a failure to work.", default=600.0, needs=FAILING)
    interval_s: float | None = FAILURE("Seconds of work between saves [default: Daly's best].", needs=FAILING)


@verb(Given)
def command(given: Given) -> Answer:
    """Show what FLOPS train (6 N D), or the FLOPs of a model and its tokens, and how long they take on chips."""
    law = scaling_law(given.law)
    cluster = parse_cluster(given.on) if given.on else None
    failure_facts = _failures(given, cluster)
    model = load_model(given.model_name) if given.model_name else None
    budget_options = (given.flops, model, given.params_text, given.tokens_text, given.loss)
    if failure_facts is not None and all(value is None for value in budget_options):
        facts: Facts = {"flops": None, "failures": failure_facts}
    else:
        flops, num_params, num_tokens = _budget(given, model, law)
        utilisation = _utilisation(flops, cluster, given)
        mfu = utilisation["mfu"] if utilisation else given.mfu or ASSUMED_MFU
        # published chip-hours include the time that failures cost
        useful_share = failure_facts["goodput"] if failure_facts and not utilisation else 1.0
        facts = {
            "flops": flops,
            "petaflop_days": petaflop_days(flops),
            **_law_facts(flops, law, (num_params, num_tokens), model),
            "tokens": num_tokens,
            "utilisation": utilisation,
            "run": _run(flops, cluster, given, mfu, useful_share) if cluster else None,
            "years": _years(flops, given, mfu) if given.with_years else None,
            "failures": failure_facts,
        }
    return Answer(facts, _text(facts, law, model, is_assumed=given.mfu is None and not given.chip_hours_text))


# -- what is given --------------------------------------------------------------------------------------


def _budget(given: Given, model: Model | None, law: ScalingLaw) -> tuple[float, float | None, float | None]:
    """Returns FLOPs, and parameters and tokens if they are given or follow: two of the three give the third."""
    if model is not None and given.params_text is not None:
        raise InputError("--model and --params both say the size. Leave one of them out.")
    num_params = float(num_active_params(model)) if model else _count(given.params_text, "--params")
    flops_per_token = token_flops(model) if model else training_flops(num_params, 1) if num_params else None
    num_tokens, flops = _count(given.tokens_text, "--tokens"), _count(given.flops, "FLOPS")
    if given.loss is not None:
        if flops is not None or num_params is not None or num_tokens is not None:
            raise InputError("--loss asks for the least budget. Leave FLOPS, size and tokens out.")
        return flops_for_loss(law, given.loss), None, None
    if num_params is not None and num_tokens is not None:
        if flops is not None:
            raise InputError("FLOPS, a size and --tokens are one too many: 6 N D is the budget. Leave one of them out.")
        assert flops_per_token is not None
        flops = flops_per_token * num_tokens
    if flops is None:
        missing_text = "its --tokens, or FLOPS" if num_params else "a size too" if num_tokens else "FLOPS, such as 1e24"
        raise InputError(f"the budget is not known. Give {missing_text}.")
    if flops > MAX_FLOPS:
        raise InputError(f"{flops:g} FLOPs are more than all machines will do. Give at most {MAX_FLOPS:g}.")
    if num_tokens is not None and num_params is None:
        num_params = flops / training_flops(1, num_tokens)
    return flops, num_params, num_tokens if flops_per_token is None else flops / flops_per_token


def _count(text: str | None, what: str) -> float | None:
    return None if text is None else float(parse_count(text, what=what, least=1, most=LARGEST))


# -- laws -----------------------------------------------------------------------------------------------


def _law_facts(flops: float, law: ScalingLaw, sizes: tuple[float | None, float | None], model: Model | None) -> Facts:
    """Returns the optimum of the chosen law and of all laws, and the loss of a given size and tokens."""
    num_params, tokens = sizes
    laws = LAWS.values()
    facts: Facts = {
        "law": law.name,
        "optimum": law.optimum(flops),
        "rule_of_20": fixed_ratio(flops, law=law),
        "laws": [{"law": law.name, "source": law.source, **asdict(law.optimum(flops))} for law in laws],
        "spent": None,
        "loss_by_law": None,
        "optimal_flops_for_its_loss": None,
    }
    if num_params is not None and tokens is not None:
        count_by_part = params_by_part(model) if model else {}
        # Kaplan leaves embeddings out of N
        core_n = num_params - count_by_part.get("embedding", 0) - count_by_part.get("unembedding", 0)
        alloc_by_law = {x.name: x.allocation(num_params if x.params_counted == "all" else core_n, tokens) for x in laws}
        facts["spent"] = alloc_by_law[law.name]
        facts["loss_by_law"] = {name: allocation.loss for name, allocation in alloc_by_law.items()}
        with suppress(InputError):
            facts["optimal_flops_for_its_loss"] = flops_for_loss(law, alloc_by_law[law.name].loss)
    return facts


# -- chips ----------------------------------------------------------------------------------------------


def _utilisation(flops: float, cluster: Cluster | None, given: Given) -> Facts | None:
    """Returns the share of the chips' peak that published chip-hours imply; None if none are given."""
    hours = _count(given.chip_hours_text, "--chip-hours")
    if hours is None:
        return None
    if cluster is None:
        raise InputError(f"--chip-hours {given.chip_hours_text} needs the chips they were spent on. Give --on.")
    if given.mfu is not None:
        raise InputError(f"--chip-hours {given.chip_hours_text} gives the utilisation. Leave --mfu out.")
    dtype = _dtype(cluster, given)
    rate = peak(cluster.chip, dtype)
    mfu = mfu_from_hours(flops, hours, rate)
    if mfu > 1:
        raise InputError(
            f"{format_params(hours)} chip-hours of {cluster.chip.name} at {dtype} can do "
            f"{available_flops(hours, rate):.3g} FLOPs and the run is {flops:.3g}. Give more hours, or another dtype."
        )
    return {"chip_hours": hours, "chip": cluster.chip.name, "dtype": dtype, "peak_flops": rate, "mfu": mfu}


def _dtype(cluster: Cluster, given: Given) -> str:
    dtype = given.dtype or product_dtype(cluster.chip)
    if dtype is None:
        raise InputError(f"the peak of {cluster.chip.name} is not known. Name a chip of meshwright show chips.")
    return dtype


def run_cost(flops: float, chip: Chip, given: Given, *, num_chips: int = 1, dtype: str, mfu: float) -> Facts:
    """Returns time, energy, money and floor space of these FLOPs; None where a price, a power or a rack is not known.

    An estimate before there is a plan, whose predicted step is better (`plan.run_budget`). Source: How to Scale Your
    Model, section 6.2; Scaling systems for LLMs (slides) for years, power and floor.
    """
    peak_rate, per_rack = peak(chip, dtype), given.chips_per_rack
    train_s = train_seconds(flops, num_chips=num_chips, peak_flops=peak_rate, mfu=mfu)
    hour_usd, watts_per_chip = given.price or chip.price_usd_per_hour, given.watts or chip.power_w
    used_time = chip_time(train_s, replace(chip, price_usd_per_hour=hour_usd, power_w=watts_per_chip), num_chips)
    chips_kwh = used_time.energy_kwh
    return {
        **asdict(used_time),
        "chip": chip.name,
        "num_chips": num_chips,
        "dtype": dtype,
        "peak_flops": peak_rate,
        "mfu": mfu,
        "years": years(train_s),
        "facility_energy_kwh": chips_kwh and facility_energy_kwh(chips_kwh, pue=given.pue, host_share=given.host_share),
        "flops_per_dollar": hour_usd and flops_per_dollar(peak_rate, price_usd_per_hour=hour_usd, mfu=mfu),
        "flops_per_joule": watts_per_chip and flops_per_joule(peak_rate, watts_per_chip=watts_per_chip, mfu=mfu),
        "floor_area_m2": per_rack and floor_area_m2(num_chips, chips_per_rack=per_rack, m2_per_rack=given.m2_per_rack),
    }


def _run(flops: float, cluster: Cluster, given: Given, mfu: float, useful_share: float) -> Facts:
    """Returns the cost on a cluster of which failures leave ``useful_share`` of the time."""
    if useful_share <= 0:
        raise InputError("failures leave no time for work at this interval. Save faster, or give fewer nodes.")
    cost_facts = run_cost(
        flops, cluster.chip, given, num_chips=cluster.num_chips, dtype=_dtype(cluster, given), mfu=mfu * useful_share
    )
    return {
        "cluster": cluster.short_name,
        **cost_facts,
        "mfu": mfu,
        "pue": given.pue,
        "goodput": useful_share,
        "one_chip_years": years(train_seconds(flops, peak_flops=cost_facts["peak_flops"], mfu=mfu)),
    }


def _years(flops: float, given: Given, mfu: float) -> list[Facts]:
    """Returns the cost of the FLOPs on one of each chip that has a peak, in the dtype if given; slowest first."""
    datasheet_chips = [c for c in chips().values() if c.variant == "datasheet" and c.peak_flops]
    rated_chips = [c for c in datasheet_chips if given.dtype is None or given.dtype in c.peak_flops]
    if not rated_chips:
        raise InputError(f"no chip of the catalogue has a {given.dtype} rate. Leave --dtype out.")
    rows = [run_cost(flops, c, given, dtype=given.dtype or product_dtype(c) or "", mfu=mfu) for c in rated_chips]
    return sorted(rows, key=lambda row: -row["years"])


def _failures(given: Given, cluster: Cluster | None) -> dict[str, float] | None:
    if given.failure_rate is None:
        if given.nodes is not None:
            raise InputError(f"--nodes {given.nodes} needs a rate. Give --failures-per-1000-node-days, such as 10.")
        return None
    num_machines = cluster.num_hosts if given.nodes is None and cluster else given.nodes
    if num_machines is None:
        raise InputError("--failures-per-1000-node-days needs a number of machines. Give --nodes or --on.")
    return goodput(
        num_machines,
        failures_per_node_day=given.failure_rate / 1000,
        checkpoint_s=given.checkpoint_s,
        restart_s=given.restart_s,
        interval_s=given.interval_s,
    )


# -- the text -------------------------------------------------------------------------------------------


def _text(facts: Facts, law: ScalingLaw, model: Model | None, is_assumed: bool) -> Iterator[Piece]:
    """Yields the known parts of the budget as text."""
    if facts["flops"] is not None:
        yield f"{facts['flops']:.4g} FLOPs = {three_digits(facts['petaflop_days'])} petaflop-days"
        if (util := facts["utilisation"]) is not None:
            rate = f"{format_flops(util['peak_flops'])} {util['dtype']}"
            text = f"{util['mfu']:.1%} of {rate} for {format_params(util['chip_hours'])} chip-hours of {util['chip']}"
            yield Fact("MFU", text)
        if facts["run"] is not None:
            yield from _run_text(facts["run"], is_assumed)
    if facts["failures"] is not None:
        yield from _failures_text(facts["failures"])
    if facts["flops"] is not None:
        yield from _laws_text(facts, law)
        if facts["spent"] is not None:
            yield from _spent_text(facts, law, model)
        if facts["years"] is not None:
            mfu = facts["years"][0]["mfu"]
            yield Table.of(facts["years"], YEAR_COLUMNS, f"On one chip, at {mfu:.0%} of its dense peak")


LAW_COLUMNS: Facts = {
    "parameters": "num_params",
    "tokens": ("num_tokens", format_params),
    "tokens/param": ("tokens_per_param", three_digits),
    "loss": ("loss", "{:.3f}".format),
}
YEAR_COLUMNS: Facts = {
    "chip": "chip",
    "dtype": "dtype",
    "peak": "peak_flops",
    "years": ("years", three_digits),
    "energy": ("energy_kwh", format_energy),
    "FLOPs/$": ("flops_per_dollar", "{:.3g}".format),
}


def _laws_text(facts: Facts, law: ScalingLaw) -> Iterator[Piece]:
    """Yields the optimum of every law and of the rule of thumb."""
    law_column = {"best by": ("law", lambda name: f"{name} *" if name == law.name else name)}
    ratio_row = {**asdict(facts["rule_of_20"]), "law": f"{TOKENS_PER_PARAM} tokens a parameter"}
    yield Table.of([*facts["laws"], ratio_row], {**law_column, **LAW_COLUMNS})
    if max(row["loss"] for row in facts["laws"]) > GUESSED or (facts["spent"] and facts["spent"].loss > GUESSED):
        yield f"a loss above {GUESSED:.3g}, that of a guess among 262,144 tokens: no law holds for a run so small"
    yield Condition(f"*: {law.source}; the last row's loss is by it")
    yield Condition("losses of two laws do not compare: each is of its own data; Kaplan counts no embeddings")


def _spent_text(facts: Facts, law: ScalingLaw, model: Model | None) -> Iterator[Piece]:
    """Yields a given size against the optimum: loss, ratio, and the least budget with the same loss."""
    chosen, optimum, least_flops = facts["spent"], facts["optimum"], facts["optimal_flops_for_its_loss"]
    kind_text = f"{'active ' * (model.num_experts > 0)}parameters, embeddings included," if model else "parameters"
    yield Fact(
        model.name if model else "this size",
        f"{format_params(chosen.num_params)} {kind_text} on {format_params(chosen.num_tokens)} tokens: "
        f"{three_digits(chosen.tokens_per_param)} a parameter, {chosen.num_params / optimum.num_params:.2g} times "
        f"{law.name}'s best size",
    )
    yield Fact(
        "its loss", ", ".join(f"{law_name} {law_loss:.3f}" for law_name, law_loss in facts["loss_by_law"].items())
    )
    if least_flops is not None:
        yield Fact(
            "from the optimum",
            f"{chosen.loss - optimum.loss:+.3f} in loss by {law.name}; the best size reaches its loss with "
            f"{least_flops:.3g} FLOPs, {least_flops / facts['flops']:.0%} of these",
        )


def _run_text(run: Facts, is_assumed: bool) -> Iterator[Piece]:
    rate_text = f"{run['mfu']:.0%} MFU (peak {format_flops(run['peak_flops'])} {run['dtype']})"
    chips_text = f"{run['cluster']} ({counted(run['num_chips'], 'chip')})"
    yield Fact("time", f"{format_seconds(run['days'] * DAY_S)} on {chips_text} at {rate_text}; "
               f"{format_params(run['chip_hours'])} chip-hours")  # fmt: skip
    if run["goodput"] < 1:
        yield Fact("", f"{run['goodput']:.1%} of the time is useful, by the failures below")
    yield Fact("cost", "no price known; give --price" if run["cost_usd"] is None else
               f"${run['cost_usd']:,.0f}, {run['flops_per_dollar']:.3g} FLOPs a dollar")  # fmt: skip
    if run["power_w"] is not None:
        building_text = f", {format_energy(run['facility_energy_kwh'])} with hosts, network and cooling"
        yield Fact(
            "energy",
            f"{format_power(run['power_w'])} and {format_energy(run['energy_kwh'])} for the chips alone"
            f"{building_text if run['facility_energy_kwh'] != run['energy_kwh'] else ''}; "
            f"{run['flops_per_joule']:.3g} FLOPs a joule",
        )
    chip_name = run["cluster"].split(":")[0].split("*")[-1]
    yield Fact("one chip", f"{three_digits(run['one_chip_years'])} years on one {chip_name}")
    if run["floor_area_m2"] is not None:
        yield Fact("floor", f"{three_digits(run['floor_area_m2'])} m2 of racks")
    if is_assumed:
        yield Condition(f"an MFU of {run['mfu']:.0%} is assumed: --mfu or the --chip-hours of a run give another")


def _failures_text(at: dict[str, float]) -> Iterator[Piece]:
    text_of = {name: format_seconds(value) for name, value in at.items() if name.endswith("_s")}
    yield Fact("failures", f"{at['failures_per_day']:.3g} a day, one every {text_of['mtbf_s']} somewhere in the fleet")
    yield Fact(
        "checkpoints",
        f"every {text_of['interval_s']} of work (best: Young {text_of['young_interval_s']}, Daly "
        f"{text_of['daly_interval_s']}), each stopping the run for {text_of['checkpoint_s']}",
    )
    yield Fact(
        "goodput",
        f"{at['goodput']:.1%} of the time is work kept; {at['lost_to_checkpoints']:.1%} saving, "
        f"{at['lost_to_failures']:.1%} lost to failures and restarts of {text_of['restart_s']}",
    )
