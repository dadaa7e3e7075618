"""How `meshwright budget` prints: what the budget trains, where a model stands, and what it takes on chips."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import asdict

from meshwright.calculators.training.failures import ExpectedGoodput
from meshwright.calculators.training.scaling_laws import TOKENS_PER_PARAM, ScalingLaw
from meshwright.cli.output import format_energy, format_power
from meshwright.core.units import format_flops, format_params, format_seconds
from meshwright.cost.formulas.training_budget import DAY_S
from meshwright.report.answer import Fact, Piece, Table
from meshwright.spec.model import Model


def budget_text(facts: dict[str, Any], law: ScalingLaw, model: Model | None) -> Iterator[Piece]:
    """The budget as text, by what is known of it."""
    if facts["flops"] is not None:
        yield f"{facts['flops']:.4g} FLOPs = {_number(facts['petaflop_days'])} petaflop-days"
        yield from _laws_text(facts, law)
        if facts["spent"] is not None:
            yield from _spent_text(facts, law, model)
        if facts["utilisation"] is not None:
            yield from _utilisation_text(facts["utilisation"])
        if facts["run"] is not None:
            yield from _run_text(facts["run"])
        if facts["years"] is not None:
            share = facts["years"][0].mfu
            yield Table.of(facts["years"], YEARS, f"On one chip, at {share:.0%} of its dense peak")
    if facts["failures"] is not None:
        yield from _failures_text(facts["failures"])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


LAWS: dict[str, Any] = {
    "best by": "law",
    "parameters": ("num_params", format_params),
    "tokens": ("num_tokens", format_params),
    "tokens/param": ("tokens_per_param", _number),
    "loss": ("loss", "{:.3f}".format),
}
YEARS: dict[str, Any] = {
    "chip": "chip",
    "dtype": "dtype",
    "peak": ("peak_flops", format_flops),
    "years": ("years", _number),
    "energy": ("energy_kwh", format_energy),
    "FLOPs/$": ("flops_per_dollar", "{:.3g}".format),
}


def _laws_text(facts: dict[str, Any], law: ScalingLaw) -> Iterator[Piece]:
    """Where the least loss is by every law, and by the rule of thumb."""
    rows = [one | {"law": f"{one['law']} *"} if one["law"] == law.name else one for one in facts["laws"]]
    rule = {**asdict(facts["rule_of_20"]), "law": f"{TOKENS_PER_PARAM} tokens a parameter"}
    yield Table.of([*rows, rule], LAWS)
    yield Fact("*", f"{law.name}: {law.source}", column=4)
    yield Fact("", "a loss is of its law's own data, so losses of two laws do not compare; Kaplan counts no "
               "embeddings, and the last row's loss is by *", column=4)  # fmt: skip


def _spent_text(facts: dict[str, Any], law: ScalingLaw, model: Model | None) -> Iterator[Piece]:
    """A given size beside the optimum: loss, ratio, and the budget that would have sufficed."""
    spent, best, least = facts["spent"], facts["optimum"], facts["optimal_flops_for_its_loss"]
    name = model.name if model else "this size"
    counted = " active" if model and model.num_experts else ""
    yield Fact(
        "here",
        f"{name}: {format_params(spent.num_params)}{counted} parameters on {format_params(spent.num_tokens)} tokens, "
        f"{_number(spent.tokens_per_param)} a parameter, {spent.num_params / best.num_params:.2g} times the best size",
    )
    losses = ", ".join(f"{key} {value:.3f}" for key, value in facts["loss_by_law"].items())
    yield Fact("loss", losses)
    if least is not None:
        yield Fact(
            "from the optimum",
            f"{spent.loss - best.loss:+.3f} in loss by {law.name}; the best size reaches its loss with "
            f"{least:.3g} FLOPs, {least / facts['flops']:.0%} of these",
        )


def _utilisation_text(at: dict[str, Any]) -> Iterator[Piece]:
    yield Fact(
        "utilisation",
        f"{at['mfu']:.1%} of {format_flops(at['peak_flops'])} {at['dtype']} for {format_params(at['chip_hours'])} "
        f"chip-hours of {at['chip']}",
    )


def _run_text(run: dict[str, Any]) -> Iterator[Piece]:
    yield Fact(
        "the run",
        f"{_time(run['days'])} on {run['cluster']} ({run['num_chips']:,} chips) at {run['mfu']:.0%} of "
        f"{format_flops(run['peak_flops'])} {run['dtype']}; {format_params(run['chip_hours'])} chip-hours",
    )
    if run["goodput"] < 1:
        yield Fact("", f"{run['goodput']:.1%} of the time is useful, by the failures below")
    yield Fact("one chip", f"{_number(run['one_chip_years'])} years")
    if run["power_w"] is not None:
        building = f", {format_energy(run['facility_energy_kwh'])} of the building"
        yield Fact(
            "energy",
            f"{format_power(run['power_w'])} for the chips alone, {format_energy(run['energy_kwh'])} in all"
            f"{building if run['facility_energy_kwh'] != run['energy_kwh'] else ''}; "
            f"{run['flops_per_joule']:.3g} FLOPs a joule",
        )
    money = "no price known; give --price" if run["cost_usd"] is None else (
        f"${run['cost_usd']:,.0f}, {run['flops_per_dollar']:.3g} FLOPs a dollar"
    )  # fmt: skip
    yield Fact("cost", money)
    if run["floor_area_m2"] is not None:
        yield Fact("floor", f"{_number(run['floor_area_m2'])} m2 of racks")


def _time(days: float) -> str:
    return f"{days / 365:,.3g} years" if days >= 1000 else format_seconds(days * DAY_S)


def _failures_text(at: ExpectedGoodput) -> Iterator[Piece]:
    yield Fact(
        "failures", f"{at.failures_per_day:.3g} a day, one every {format_seconds(at.mtbf_s)} somewhere in the fleet"
    )
    yield Fact(
        "checkpoints",
        f"every {format_seconds(at.interval_s)} of work (best: Young {format_seconds(at.young_interval_s)}, "
        f"Daly {format_seconds(at.daly_interval_s)}), each stopping the run for {format_seconds(at.checkpoint_s)}",
    )
    yield Fact(
        "goodput",
        f"{at.goodput:.1%} of the time is work kept; {at.lost_to_checkpoints:.1%} saving, "
        f"{at.lost_to_failures:.1%} lost to failures and restarts of {format_seconds(at.restart_s)}",
    )
