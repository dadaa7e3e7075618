"""`meshwright simulate fleet`: a plan's cluster that trains while its parts fail."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec.structs import asdict

from meshwright.cli.asked import PlanOptions, read_fields, resolve
from meshwright.cli.fields import split_pairs
from meshwright.cli.output import or_dash
from meshwright.cli.verb import PNG, Count, option, verb
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import counted, format_count, format_seconds, parse_seconds
from meshwright.cost.formulas.failures import daly_interval_s, exact_steps, recovery_interval_s, young_interval_s
from meshwright.cost.formulas.training_budget import DAY_S
from meshwright.plan.plan_file import Plan
from meshwright.plan.run_budget import FailureOutlook, chip_time, failure_outlook
from meshwright.report.answer import Answer, Fact, Facts, Heading, Piece, Table
from meshwright.report.figure import Figure
from meshwright.report.marks import Points
from meshwright.report.plans.fleet import fleet_figure
from meshwright.simulate.fleet.fleet import POLICIES, FleetPolicy, TrainingFleet, checkpoint_steps
from meshwright.simulate.fleet.outcome import PolicyOutcome, simulate_fleet
from meshwright.simulate.fleet.run import WORDS, WORK
from meshwright.spec.faults.rates import TimeRange, load_rates, rates_for_chip
from meshwright.spec.job import require_training

NEEDS_REPLICAS: tuple[FleetPolicy, ...] = ("elastic", "diloco")
POLICY_NAMES = {"stop": "restart", "elastic": "elastic", "memory": "in memory", "diloco": "DiLoCo"}
SHOWN_FAULTS, POINTS = 12, 600
"""Faults, on average, that the drawn part of a run has, and its points."""


class Given(PlanOptions):
    days: float = option("Days to simulate.", default=54.0)
    rates: str | None = option("Rates of failures: llama3, opt, rsc1, rsc2 or a .toml file [default: the chip's].")
    spares: str = option("Spare hosts, as a share of those in use.", default="2%")
    interval: str = option("Between checkpoints: auto, young, daly, 30steps, 600s.", default="auto")
    policies: tuple[FleetPolicy, ...] = option("What to do about failures [default: all].", "--policy")
    replicas: Count | None = option("Parts that elastic and diloco lose alone [default: the plan's islands or data].")
    memory_steps: Count | None = option("Steps between copies to a neighbour's memory [default: the best].")
    outer_every: Count = option("Inner steps of DiLoCo.", default="100")
    times: tuple[str, ...] = option("A time in seconds, such as save_s=5.", "--time", metavar="NAME=SECONDS")
    seeds: Count = option("Random runs, of which means and 5-95% are given.", default="20")
    price: float | None = option("Dollars a chip-hour, instead of the catalogue's.")
    png: Path | None = PNG


@verb(Given)
def command(given: Given) -> Answer:
    """What failures leave of a fleet's time: goodput under each policy, where the lost hours go, days and cost.

    Rates of failures are those of a published fleet, or of a TOML file of the same form (docs/fleets.md); of times that
    are known as a range the middle is taken.
    """
    plan = resolve(given, read_fields(given.pairs), verb="simulate fleet").plan()
    require_training(plan.job, "simulate fleet")
    fleet, rates_text = _fleet(given, plan)
    duration_s = given.days * DAY_S
    outcomes = simulate_fleet(fleet, _policies(given, fleet), duration_s=duration_s, seeds=given.seeds)
    outlook = failure_outlook(plan.cluster, fleet.step_s, fleet.rates, fleet.times, fleet.checkpoint_steps)
    rows = [_row(given, plan, fleet, outcome) for outcome in outcomes]
    facts: Facts = {
        "model": plan.model.name,
        "cluster": plan.cluster.short_name,
        "days": given.days,
        "seeds": given.seeds,
        "rates": {"name": rates_text, "source": fleet.rates.source, **asdict(outlook)},
        "times": fleet.times,
        "fleet": {name: getattr(fleet, name) for name in ("num_hosts", "num_spares", "num_replicas", "step_s")},
        "intervals": _intervals(fleet, outlook),
        "policies": rows,
    }
    pictures = {given.png: lambda: _figure(plan, fleet, outcomes, duration_s)}
    return Answer(facts, _text(given, plan, fleet, facts), pictures, [rows])


def _fleet(given: Given, plan: Plan) -> tuple[TrainingFleet, str]:
    """Returns the fleet of the options, and whose rates it has."""
    if given.days == 0:
        raise InputError("--days 0 simulates nothing. Give a positive number.")
    name, of_chip = rates_for_chip(plan.cluster.chip.name) if given.rates is None else (given.rates, True)
    rates = load_rates(name)
    values = {key: text for pair in given.times for key, text in split_pairs(pair, "save_s=5", what="--time").items()}
    times = rates.times_at(0.5, {key: parse_seconds(text, what=f"--time {key}") for key, text in values.items()})
    step_s, hosts = plan.predicted.step_s, plan.cluster.num_hosts
    mesh = plan.strategy.mesh
    replicas = given.replicas or max(mesh.get("islands", 1), mesh.get("data", 1), plan.cluster.num_slices)
    if replicas > hosts and given.replicas:
        raise InputError(f"--replicas {replicas:,} are more than the {hosts:,} hosts. Give at most so many.")
    mtbf_s = rates.mtbf_s(plan.cluster.num_chips, hosts)
    fleet = TrainingFleet(
        num_chips=plan.cluster.num_chips,
        num_hosts=hosts,
        step_s=step_s,
        rates=rates,
        times=times,
        checkpoint_steps=checkpoint_steps(given.interval, step_s=step_s, save_s=times.save_s, mtbf_s=mtbf_s),
        num_replicas=min(replicas, hosts),
        spares=_share(given.spares),
        memory_steps=given.memory_steps or exact_steps(step_s, checkpoint_s=times.memory_s, mtbf=min(mtbf_s, 1e12)),
        outer_every=given.outer_every,
    )
    return fleet, name if of_chip else f"{name}, as none of {plan.cluster.chip.name} are published"


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise InputError(f"--spares {text!r} is not a share of the hosts. Give 0% to 100%, such as 2%.")
    return share


def _policies(given: Given, fleet: TrainingFleet) -> list[FleetPolicy]:
    policies = list(dict.fromkeys(given.policies)) or [*POLICIES]
    if fleet.num_replicas > 1:
        return policies
    if missing := [policy for policy in given.policies if policy in NEEDS_REPLICAS]:
        raise CannotRunError(
            f"--policy {missing[0]} needs parts that fail alone, and the plan has one. Give --replicas."
        )
    return [policy for policy in policies if policy not in NEEDS_REPLICAS]


def _intervals(fleet: TrainingFleet, outlook: FailureOutlook) -> dict[str, float]:
    """Returns the steps between checkpoints by each rule."""
    save_s, step_s, mtbf_s = fleet.times.save_s, fleet.step_s, outlook.mtbf_s
    return {
        "young_steps": young_interval_s(save_s, mtbf_s) / step_s,
        "recovery_steps": recovery_interval_s(save_s, mtbf_s, outlook.restart_s) / step_s,
        "daly_steps": daly_interval_s(save_s, mtbf_s) / step_s,
        "exact_steps": exact_steps(step_s, checkpoint_s=save_s, mtbf=min(mtbf_s, 1e12)),
        "steps": fleet.checkpoint_steps,
    }


def _row(given: Given, plan: Plan, fleet: TrainingFleet, outcome: PolicyOutcome) -> Facts:
    """Returns the figures of a policy as plain data; days and cost are those of all tokens."""
    row = {**asdict(outcome), "hours": {word: s / 3600 for word, s in outcome.seconds.items()}}
    del row["seconds"], row["trained"]
    days: dict[str, float | None] = dict.fromkeys(("days_to_end", "days_to_end_p5", "days_to_end_p95", "cost_usd"))
    if (tokens := plan.job.train_tokens) is not None:
        ideal_s = tokens / plan.job.tokens_per_step * fleet.step_s
        shares = (outcome.goodput, outcome.goodput_p95, outcome.goodput_p5)
        names = ("days_to_end", "days_to_end_p5", "days_to_end_p95")
        days |= {name: ideal_s / s / DAY_S if s else None for name, s in zip(names, shares, strict=True)}
        chip = plan.cluster.chip if given.price is None else plan.cluster.chip.priced(given.price)
        chips = round(fleet.num_chips * (1 + fleet.num_spares / fleet.num_hosts))
        end = days["days_to_end"]
        days["cost_usd"] = None if end is None else chip_time(end * DAY_S, chip, chips).cost_usd
    return {**row, **days}


def _text(given: Given, plan: Plan, fleet: TrainingFleet, facts: Facts) -> Iterator[Piece]:
    rates, intervals, rows = facts["rates"], facts["intervals"], facts["policies"]
    yield (
        f"{plan.model.name} on {plan.cluster.short_name} ({counted(fleet.num_chips, 'chip')}) for {given.days:g} days, "
        f"{counted(given.seeds, 'seed')}"
    )
    yield Fact("failures", f"one in {format_seconds(rates['mtbf_s'])}, by the rates of {rates['name']}")
    yield Fact("", fleet.rates.source)
    yield Fact(
        "times",
        f"{format_seconds(fleet.step_s)} a step; {format_seconds(rates['restart_s'])} to restart on average, "
        f"{format_seconds(fleet.times.save_s)} to save; {counted(fleet.num_spares, 'spare host')}, "
        f"{format_seconds(fleet.times.repair_s)} to repair one",
    )
    ranges = [
        f"{name} {time.low:g}-{time.high:g}" for name, time in fleet.rates.times.items() if isinstance(time, TimeRange)
    ]
    if ranges:
        yield Fact("", f"of ranges the middle: {', '.join(ranges)}")
    yield Fact(
        "checkpoint",
        f"every {counted(fleet.checkpoint_steps, 'step')}; best: Young {intervals['young_steps']:.1f}, with recovery "
        f"{intervals['recovery_steps']:.1f}, Daly {intervals['daly_steps']:.1f}, exact {intervals['exact_steps']:,}",
    )
    yield Fact(
        "closed form", f"a run that stops and restarts keeps {rates['goodput']:.1%}; {rates['ettr']:.1%} by Meta's ETTR"
    )
    replicas_text = f"{fleet.num_replicas:,} that elastic and DiLoCo lose alone"
    yield Fact("replicas", replicas_text if fleet.num_replicas > 1 else "one: elastic and DiLoCo need --replicas")
    yield ""
    names = [POLICY_NAMES[row["policy"]] for row in rows]
    yield Table.of(
        rows,
        {
            "policy": ("policy", POLICY_NAMES.get),
            "goodput": ("goodput", "{:.1%}".format),
            "5-95%": (lambda row: f"{row['goodput_p5']:.1%}-{row['goodput_p95']:.1%}", None),
            "faults": ("faults", "{:,.0f}".format),
            "days": ("days_to_end", lambda days: or_dash(days, "{:.1f}".format)),
            "cost": ("cost_usd", lambda usd: or_dash(usd, lambda amount: f"${format_count(round(amount))}")),
        },
    ).known()
    yield ""
    shown = [word for word in WORDS if any(row["hours"][word] > 0 for row in rows)]
    columns = [Heading("hours of the fleet", name="word"), *(Heading(name, "{:,.1f}".format) for name in names)]
    yield Table(columns, [[word.replace("_", " "), *(row["hours"][word] for row in rows)] for word in shown])


def _figure(plan: Plan, fleet: TrainingFleet, outcomes: list[PolicyOutcome], duration_s: float) -> Figure:
    shown_s = min(duration_s, SHOWN_FAULTS * fleet.mtbf_s)
    lost = {
        POLICY_NAMES[outcome.policy]: {
            word.replace("_", " "): 100 * s / duration_s for word, s in outcome.seconds.items() if word != WORDS[WORK]
        }
        for outcome in outcomes
    }
    return fleet_figure(
        lost,
        {POLICY_NAMES[outcome.policy]: outcome.goodput for outcome in outcomes},
        {POLICY_NAMES[outcome.policy]: _training(outcome, shown_s) for outcome in outcomes},
        title=f"{plan.model.name} on {plan.cluster.short_name}: a failure in {format_seconds(fleet.mtbf_s)}",
        subtitle=f"above: {duration_s / DAY_S:g} days; below: the first {format_seconds(shown_s)} of one seed",
    )


def _training(outcome: PolicyOutcome, shown_s: float) -> Points:
    """Returns the share of the fleet that makes steps over the first ``shown_s``, in hours."""
    edges = np.linspace(0, shown_s, POINTS + 1)
    start, end, share = np.array([span for span in outcome.trained if span[0] < shown_s] or [(0.0, 0.0, 0.0)]).T
    passed = np.clip(edges[:, None] - start, 0, end - start) @ share
    shares = np.diff(passed) / np.diff(edges)
    return [(float(a), float(b)) for a, b in zip(edges[1:] / 3600, shares, strict=True)]
