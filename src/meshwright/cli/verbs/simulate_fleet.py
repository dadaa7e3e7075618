"""`meshwright simulate fleet`: a plan's cluster that trains while its parts fail."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from msgspec.structs import asdict

from meshwright.cli.asked import PlanOptions, read_fields, resolve
from meshwright.cli.fields import split_pairs
from meshwright.cli.verb import PNG, Count, option, verb
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import counted, format_count, format_seconds, parse_seconds
from meshwright.cost.formulas.failures import daly_interval_s, exact_steps, recovery_interval_s, young_interval_s
from meshwright.cost.formulas.training_budget import DAY_S
from meshwright.plan.plan_file import Plan
from meshwright.plan.run_budget import chip_time, failure_outlook
from meshwright.report.answer import Answer, Condition, Facts, Heading, Piece, Table
from meshwright.report.plans.fleet import fleet_figure
from meshwright.simulate.fleet.fleet import POLICIES, FleetPolicy, TrainingFleet, checkpoint_steps
from meshwright.simulate.fleet.outcome import PolicyOutcome, simulate_fleet
from meshwright.simulate.fleet.run import WORDS
from meshwright.spec.faults.rates import NEVER_S, load_rates, rates_for_chip
from meshwright.spec.job import require_training

SHOWN_FAULTS = 12
"""Mean number of faults in the part of a run that is drawn."""
MOST_FAULTS = 5_000_000
"""Largest mean number of faults of a run, which takes seconds to simulate."""


class Given(PlanOptions, group="Failures"):
    days: float = option("Days to simulate.", default=54.0, group="Simulation")
    rates: str | None = option("Rates of failures: llama3, opt, rsc1, rsc2 or a .toml file. Default: the chip's.")
    spares: str = option("Spare hosts, as a share of those in use.", default="2%")
    interval: str = option(
        "Between checkpoints: auto, young, daly, 30steps, 600s.", default="auto", group="Checkpoints"
    )
    policies: tuple[FleetPolicy, ...] = option(
        "What to do about failures. Default: all that the plan allows.", "--policy"
    )
    replicas: Count | None = option(
        "Replicas that elastic and diloco lose one by one. Default: the plan's islands or data."
    )
    memory_steps: Count | None = option(
        "Steps between copies to a neighbour's memory. Default: the best.", group="Checkpoints"
    )
    outer_every: Count | None = option("Inner steps of diloco. Default: the plan's, or 100.", group="Checkpoints")
    times: tuple[str, ...] = option(
        "A time in place of the published one, such as save_s=5.", "--time", metavar="NAME=SECONDS"
    )
    seeds: Count = option("Random runs, of which mean and 5-95% are printed.", default="20", group="Simulation")
    price: float | None = option("Dollars a chip-hour, instead of the catalogue's.", group="Simulation")
    png: Path | None = PNG


@verb(Given)
def command(given: Given) -> Answer:
    """Simulate training while parts fail: goodput of each policy, where the lost hours go, days and cost.

    Rates of failures are a published fleet's, or from a TOML file (docs/fleets.md). Policies: stop (restart from a
    checkpoint), elastic (train on without the failed replica until it is back), memory (restart from copies in a
    neighbour's memory), diloco (only the failed island stops).
    """
    plan = resolve(given, read_fields(given.pairs), verb="simulate fleet").plan()
    require_training(plan.job, "simulate fleet")
    fleet, rates_text = _fleet(given, plan)
    duration_s, step_s, save_s = given.days * DAY_S, fleet.step_s, fleet.times.save_s
    outcomes = simulate_fleet(fleet, _policies(given, fleet), duration_s=duration_s, seeds=given.seeds)
    outlook = failure_outlook(plan.cluster, step_s, fleet.rates, fleet.times, fleet.checkpoint_steps)
    rows = [_row(given, plan, fleet, outcome) for outcome in outcomes]
    facts: Facts = {
        "model": plan.model.name,
        "cluster": plan.cluster.short_name,
        "days": given.days,
        "seeds": given.seeds,
        **asdict(outlook),
        "rates": rates_text,
        "source": fleet.rates.source,
        "times": fleet.times,
        **{name: getattr(fleet, name) for name in ("num_chips", "num_hosts", "num_spares", "num_replicas", "step_s")},
        "young_steps": young_interval_s(save_s, outlook.mtbf_s) / step_s,
        "recovery_steps": recovery_interval_s(save_s, outlook.mtbf_s, outlook.restart_s) / step_s,
        "daly_steps": daly_interval_s(save_s, outlook.mtbf_s) / step_s,
        "exact_steps": exact_steps(step_s, checkpoint_s=save_s, mtbf=outlook.mtbf_s),
        "policies": rows,
    }
    shown_s = min(duration_s, SHOWN_FAULTS * outlook.mtbf_s)
    draw = partial(
        fleet_figure,
        outcomes,
        duration_s=duration_s,
        shown_s=shown_s,
        title=f"{plan.model.name} on {plan.cluster.short_name}: failures {_often(outlook.mtbf_s)}",
        subtitle=f"above: {given.days:g} days; below: the first {format_seconds(shown_s)} of one seed",
    )
    return Answer(facts, _text(fleet, facts), {given.png: draw}, [rows])


def _fleet(given: Given, plan: Plan) -> tuple[TrainingFleet, str]:
    """Returns the fleet of the options, and the name of its failure rates.

    Raises InputError for no days, for days with over `MOST_FAULTS`, and for replicas that do not divide the hosts."""
    if given.days == 0:
        raise InputError("--days 0 simulates nothing. Give more than 0.")
    name, of_chip = rates_for_chip(plan.cluster.chip.name) if given.rates is None else (given.rates, True)
    rates, step_s, hosts = load_rates(name), plan.predicted.step_s, plan.cluster.num_hosts
    texts = {
        key: text
        for pair in given.times
        for key, text in split_pairs(pair, "a time. Write save_s=5", what="--time").items()
    }
    is_outer = plan.strategy.islands_sync != "gradients"  # the plan's step then includes its share of the exchange
    changes = {key: parse_seconds(text, what=f"--time {key}") for key, text in texts.items()}
    times = rates.times_at(0.5, {**({"outer_s": 0.0} if is_outer else {}), **changes})
    mesh, mtbf_s = plan.strategy.mesh, rates.mtbf_s(plan.cluster.num_chips, hosts)
    most_days = MOST_FAULTS / 24 / (sum(rates.per_hour(plan.cluster.num_chips, hosts)) or 1e-9)
    if given.days > (most_days := float(f"{most_days:.3g}")):
        raise InputError(f"--days {given.days:g} have over {MOST_FAULTS:,} faults. Give at most {most_days:g}.")
    replicas = given.replicas or max(mesh.get("islands", 1), mesh.get("data", 1), plan.cluster.num_slices)
    if given.replicas and hosts % replicas:
        raise InputError(f"--replicas {replicas:,} do not divide the {hosts:,} hosts. Give a number that does.")
    fleet = TrainingFleet(
        num_chips=plan.cluster.num_chips,
        num_hosts=hosts,
        step_s=step_s,
        rates=rates,
        times=times,
        checkpoint_steps=checkpoint_steps(given.interval, step_s=step_s, save_s=times.save_s, mtbf_s=mtbf_s),
        num_replicas=min(replicas, hosts),
        spares=_share(given.spares),
        memory_steps=given.memory_steps or exact_steps(step_s, checkpoint_s=times.memory_s, mtbf=mtbf_s),
        outer_every=given.outer_every or (plan.strategy.outer_every if is_outer else 100),
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
    alone = [policy for policy in given.policies if policy in ("elastic", "diloco")]
    if fleet.num_replicas == 1 and alone:
        raise CannotRunError(f"--policy {alone[0]} needs parts that fail alone, and the plan has one. Give --replicas.")
    some = POLICIES if fleet.num_replicas > 1 else ("stop", "memory")
    return list(dict.fromkeys(given.policies or some))


def _row(given: Given, plan: Plan, fleet: TrainingFleet, outcome: PolicyOutcome) -> Facts:
    """Returns the figures of a policy as plain data; days and cost are None without train_tokens."""
    hours, goodput = {word: s / 3600 for word, s in outcome.seconds.items()}, outcome.goodput
    tokens = plan.job.train_tokens
    row: Facts = {"policy": outcome.policy, "faults": outcome.faults, "goodput": goodput, "hours": hours}
    if tokens is None or not goodput.p5:
        return row | dict.fromkeys(("days", "days_p5", "days_p95", "cost_usd"))
    ideal_s = tokens / plan.job.tokens_per_step * fleet.step_s
    chip = plan.cluster.chip if given.price is None else plan.cluster.chip.priced(given.price)
    chips = round(fleet.num_chips * (1 + fleet.num_spares / fleet.num_hosts))
    days_p5, days_p95 = ideal_s / goodput.p95 / DAY_S, ideal_s / goodput.p5 / DAY_S
    spent = chip_time(ideal_s / goodput.mean, chip, chips)
    return {**row, "days": spent.days, "days_p5": days_p5, "days_p95": days_p95, "cost_usd": spent.cost_usd}


def _often(mtbf_s: float) -> str:
    return f"one in {format_seconds(mtbf_s)}" if mtbf_s < NEVER_S else "none that stop the run"


def _text(fleet: TrainingFleet, facts: Facts) -> Iterator[Piece]:
    """Yields the policies, where the hours go, and what both rest on."""
    size_text = f"{counted(fleet.num_chips, 'chip')} for {facts['days']:g} days, {counted(facts['seeds'], 'seed')}"
    yield f"{facts['model']} on {facts['cluster']}: {size_text}; failures: {_often(facts['mtbf_s'])}"
    yield ""
    yield Table.of(
        rows := facts["policies"],
        {
            "policy": "policy", "goodput": ("goodput.mean", "{:.1%}".format),
            "5-95%": lambda row: f"{row['goodput'].p5:.1%}-{row['goodput'].p95:.1%}",
            "faults": ("faults", "{:,.0f}".format), "days": ("days", lambda days: days and f"{days:,.1f}"),
            "days 5-95%": lambda row: row["days"] and f"{row['days_p5']:,.1f}-{row['days_p95']:,.1f}",
            "cost": ("cost_usd", lambda usd: usd and f"${format_count(round(usd))}"),
        },
    ).known()  # fmt: skip
    columns = [Heading("hours", name="word"), *(Heading(row["policy"], "{:,.1f}".format) for row in rows)]
    lines = [[word.replace("_", " "), *(row["hours"][word] for row in rows)] for word in WORDS]
    yield Table(columns, [line for line in lines if any(line[1:])], "Hours of the fleet, means over seeds")
    if any(row["days"] for row in rows):
        yield Condition("days and cost are for all tokens of the plan, spare hosts included")
    yield Condition(
        f"a checkpoint every {counted(fleet.checkpoint_steps, 'step')}; best by Young {facts['young_steps']:,.0f}, "
        f"with recovery {facts['recovery_steps']:,.0f}, Daly {facts['daly_steps']:,.0f}, exact {facts['exact_steps']:,}"
    )
    yield Condition(f"rates of failures: {facts['rates']}, {facts['source']}")
    ranges_text = ", ".join(f"{name} {low:g}-{high:g}" for name, (low, high) in fleet.rates.ranges.items())
    yield Condition(
        f"{format_seconds(fleet.step_s)} a step; {format_seconds(facts['restart_s'])} to restart on average, "
        f"{format_seconds(fleet.times.save_s)} to save; {counted(fleet.num_spares, 'spare host')}; a repair "
        f"takes {format_seconds(fleet.times.repair_s)}, for which the fleet waits once no spare is left"
        f"{'; middle of ' * bool(ranges_text)}{ranges_text}"
    )
    yield Condition(f"closed form: stop keeps {facts['goodput']:.1%} of the time, {facts['ettr']:.1%} by Meta's ETTR")
    outer_text = f"diloco adds {fleet.times.outer_s:g} s to every {counted(fleet.outer_every, 'step')}"
    lost_text = f"elastic and diloco lose one of {fleet.num_replicas:,} replicas at a time; {outer_text}"
    yield Condition(lost_text if fleet.num_replicas > 1 else "one replica: elastic and diloco need --replicas")
