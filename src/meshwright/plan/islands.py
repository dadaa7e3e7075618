"""Plans of several islands: the searched plan of one island, joined with the exchange between islands; its notes."""

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.core.dims import ISLANDS
from meshwright.core.errors import InputError
from meshwright.core.fields import convert_fields
from meshwright.core.units import counted, format_bit_rate, format_bytes, format_seconds
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.plan_file import Plan
from meshwright.plan.result import PlanResult, plan_in, planned
from meshwright.spec.strategy import ISLAND_FIELDS, MAX_SEQUENCES, Strategy, make_mesh

PERIODS = (1, 10, 30, 100, 300)
"""Steps between two exchanges: the search tries these if none are given, and notes list their step times."""

LITTLE = 0.05
"""Share of a step that exchanges may add: the shortest period within it is chosen; only beyond it notes list others."""


class IslandSearch(msgspec.Struct, frozen=True, kw_only=True):
    """The search for one island: its setting, its fixed axes and strategy fields (``overrides``). ``fields`` are the
    given strategy fields of the exchange between islands."""

    setting: Setting
    axes: dict[str, int]
    overrides: dict[str, Any]
    fields: dict[str, Any]


def island_search(setting: Setting, axes: Mapping[str, int], overrides: Mapping[str, Any]) -> IslandSearch:
    """Returns the search for one island of a job; without islands it covers the whole job.

    Raises CannotRunError if the number of islands is not the cluster's or does not divide the batch, InputError if
    fields of the exchange are given for a single island."""
    values = {name.removeprefix("strategy."): value for name, value in overrides.items()}
    fields = {name: value for name, value in values.items() if name in ISLAND_FIELDS}
    num_islands = axes.get(ISLANDS, setting.cluster.num_islands)
    island_setting = setting.of_island(Strategy(mesh=make_mesh({ISLANDS: num_islands})))
    if num_islands == 1 and fields:
        name, value = next(iter(fields.items()))
        example = f"4*{setting.cluster.short_name}@1Gbit/s"
        raise InputError(f"strategy.{name}={value} needs several islands. Name a cluster of them, such as {example}.")
    return IslandSearch(
        setting=island_setting,
        axes={axis: size for axis, size in axes.items() if axis != ISLANDS},
        overrides={name: value for name, value in overrides.items() if name.removeprefix("strategy.") not in fields},
        fields=fields,
    )


def joined(setting: Setting, island: Strategy, fields: Mapping[str, Any]) -> Strategy:
    """Returns the strategy of all islands of a setting, made from the strategy of one. If no period is given, exchanges
    other than gradient sums get the shortest of `PERIODS` that adds at most `LITTLE` to a step, else the longest."""
    cluster = setting.cluster
    if cluster.num_islands == 1:
        return island
    rate_text = format_bit_rate(cluster.island_bytes_per_s or 0.0)
    is_open = "outer_every" not in fields and fields.get("islands_sync", "gradients") != "gradients"
    values = msgspec.to_builtins(island) | ({"outer_every": MAX_SEQUENCES} if is_open else {}) | dict(fields)
    values["mesh"] = {ISLANDS: cluster.num_islands, **island.mesh}
    values["placement"] = {ISLANDS: f"{cluster.num_islands} uplinks of {rate_text}", **island.placement}
    strategy = convert_fields(values, Strategy, section="strategy")
    least = max(strategy.outer_overlap + 1, strategy.outer_fragments)
    for period in [period for period in PERIODS if period >= least] or [least] if is_open else ():
        strategy = msgspec.structs.replace(strategy, outer_every=period)
        priced = price_strategy(setting, strategy)
        if priced.exchange_s <= LITTLE * priced.estimate.step_s:
            break
    return strategy


def join_plans(setting: Setting, plans: tuple[Plan, ...], fields: Mapping[str, Any]) -> tuple[Plan, ...]:
    """Turns plans of one island into plans of all islands of a setting, fastest first; all exchange at the period that
    is chosen for the first plan."""
    first_strategy = joined(setting, plans[0].strategy, fields)
    fields = {name: getattr(first_strategy, name) for name in ISLAND_FIELDS}
    joined_plans = []
    for plan in plans:
        rates = {name: getattr(setting.cluster, name) for name in ("num_islands", "island_bytes_per_s")}
        part_setting = setting.on(msgspec.structs.replace(plan.cluster, **rates))
        joined_plans.append(planned(part_setting, setting.job.batch_seqs, joined(setting, plan.strategy, fields)))
    return tuple(sorted(joined_plans, key=lambda plan: plan.predicted.step_s))


def plan_of_island(plan: Plan) -> Plan:
    """Returns the plan of one island, without exchanges; returns ``plan`` itself if it has one island."""
    if plan.strategy.num_islands == 1:
        return plan
    setting, strategy = plan.setting.of_island(plan.strategy), plan.strategy.inner()
    return plan_in(setting, strategy, price_strategy(setting, strategy).estimate)


def result_of_island(result: PlanResult) -> PlanResult:
    """Returns the result of planning one island, without exchanges; returns ``result`` itself if it has one island."""
    if result.setting.cluster.num_islands == 1:
        return result
    sought = island_search(result.setting, result.axes, result.overrides)
    plans = tuple(plan_of_island(plan) for plan in result.plans)
    given = {"axes": sought.axes, "overrides": sought.overrides}
    return msgspec.structs.replace(result, setting=sought.setting, plans=plans, **given)


# -- in words -----------------------------------------------------------------------------------------------

_SYNC_WORDS = {
    "gradients": "gradients summed between islands",
    "diloco": "DiLoCo between islands",
    "local-sgd": "weights averaged between islands",
    "async-sgd": "asynchronous SGD between islands",
}


def exchange_words(strategy: Strategy) -> str:
    """Returns the exchange as words, ``"DiLoCo between islands every 30 steps in 4 bits"``; "" for one island."""
    if strategy.num_islands == 1:
        return ""
    every = strategy.outer_every
    parts = [f"{_SYNC_WORDS[strategy.islands_sync]} every {counted(every, 'step') if every > 1 else 'step'}"]
    parts += [f"in {strategy.outer_bits} bits"] * (strategy.outer_bits < 32)
    parts += [f"in {strategy.outer_fragments} fragments"] * (strategy.outer_fragments > 1)
    parts += [f"applied {counted(strategy.outer_overlap, 'step')} later"] * (strategy.outer_overlap > 0)
    return " ".join(parts)


def exchange_notes(plan: Plan) -> tuple[str, ...]:
    """Returns notes: the seconds that exchanges between islands expose, the step times at other periods if gradients
    are summed, host memory, and what the prices assume. () for one island."""
    exchange = price_strategy(plan.setting, plan.strategy).exchange
    if exchange is None:
        return ()
    rate_text, step_text = (
        format_bit_rate(plan.cluster.island_bytes_per_s or 0.0),
        format_seconds(plan.predicted.step_s),
    )
    link_s, copy_s, host_s, hidden_s, exposed_s = map(
        format_seconds, (exchange.link_s, exchange.copy_s, exchange.host_s, exchange.hidden_s, exchange.exposed_s)
    )
    is_sum = plan.strategy.islands_sync == "gradients"
    notes = [
        f"{'sums of gradients' if is_sum else 'exchanges'} between islands expose {exposed_s} of a {step_text} step: "
        + f"every {exchange.period} steps they take " * (exchange.period > 1)
        + f"{link_s} on the link ({format_bytes(exchange.link_bytes)} from each island at {rate_text}), {copy_s} "
        + f"between chips and hosts and {host_s} in host memory"
        + f", of which {hidden_s} overlap with compute" * (exchange.hidden_s > 0)
    ]
    if is_sum and exchange.exposed_s > LITTLE * plan.predicted.step_s:
        notes.append(_periods_words(plan))
    if exchange.num_arrays:
        hosts, size_text = plan.cluster.island.num_hosts, format_bytes(exchange.host_bytes)
        each_text = f" ({format_bytes(exchange.host_bytes / hosts)} on each of {hosts} hosts)" * (hosts > 1)
        notes.append(f"the hosts of an island keep {size_text} of outer weights and momentum in float32{each_text}")
    return (*notes, exchange.assumed)


def _periods_words(plan: Plan) -> str:
    """Returns a note on the step times with DiLoCo in place of gradient sums, for several periods and bits."""
    wide_text, narrow_text = (
        ", ".join(format_seconds(_step_s(plan, outer_every=every, outer_bits=bits)) for every in PERIODS[1:])
        for bits in (32, 4)
    )
    return (
        f"with --set strategy.islands_sync=diloco --set strategy.outer_every=30 a step takes "
        f"{format_seconds(_step_s(plan, outer_every=30))}. With outer_every "
        f"{', '.join(map(str, PERIODS[1:]))} it takes {wide_text}; with outer_bits=4 as well, {narrow_text}. Both "
        f"settings change what the model learns, which is not predicted"
    )


def _step_s(plan: Plan, **fields: Any) -> float:
    strategy = msgspec.structs.replace(plan.strategy, islands_sync="diloco", **fields)
    return float(price_strategy(plan.setting, strategy).estimate.step_s)
