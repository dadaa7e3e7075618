"""`meshwright train`: run a plan, with the prediction beside every measured step."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from meshwright.cli.fields import parse_fields, take_axes, with_fields
from meshwright.cli.machine import rates_for
from meshwright.cli.output import emit_json, json_option, or_dash, print_table, say
from meshwright.cli.plan import mesh_words
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import format_bytes, format_count, format_seconds, parse_count
from meshwright.cost.ops import model_flops
from meshwright.cost.train_step import estimate_step
from meshwright.plan.legal import require_legal
from meshwright.plan.planner import plan
from meshwright.spec.calibration import reference_peak
from meshwright.spec.catalogue import model as find_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job, parse_batch
from meshwright.spec.model import require_runnable
from meshwright.spec.plan_file import Plan, load_plan
from meshwright.spec.toml_file import dump_toml

if TYPE_CHECKING:
    from meshwright.train.loop import TrainResult
    from meshwright.train.metrics import Predicted


@click.command()
@click.argument("what", metavar="PLAN.toml | MODEL")
@click.option("--on", "on", help="The cluster: cpu:8 is this machine as 8 emulated devices.")
@click.option("--axes", help="Mesh axes to keep fixed, such as fsdp=4,tensor=2.")
@click.option("--batch", help="Tokens a step (16Ki) or sequences (32seq).")
@click.option("--seq", "seq_len", help="Tokens of a sequence.")
@click.option("--steps", type=int, help="Optimizer steps.")
@click.option("--data", help="A text file or a folder of them; Python's own documentation by default.")
@click.option("--seed", type=int, help="Of the first weights and of the order of the data.")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Any field: strategy.remat=block.")
@click.option("--calibration", type=click.Path(path_type=Path), help="Rates of the cluster (TOML), or datasheet.")
@json_option
def command(
    what: str,
    on: str | None,
    axes: str | None,
    batch: str | None,
    seq_len: str | None,
    steps: int | None,
    data: str | None,
    seed: int | None,
    runs: Path,
    pairs: tuple[str, ...],
    calibration: Path | None,
    as_json: bool,
) -> None:
    """Train by a plan file, or a MODEL planned on the way, and compare each step with its prediction."""
    fields = parse_fields(pairs)
    if what.endswith(".toml"):
        if on or axes or batch or seq_len:
            raise InputError(
                f"{what} says the cluster, axes, batch and seq; leave --on, --axes, --batch and --seq out."
            )
        chosen = _changed(load_plan(Path(what)), fields)
    else:
        chosen = _planned(what, on, axes, batch, seq_len, fields, calibration)
    options = {"steps": steps, "data": data, "seed": seed}
    settings = {**fields["train"], **{k: v for k, v in options.items() if v is not None}}
    result = run_plan(chosen, settings, runs=runs)
    if as_json:
        emit_json(msgspec.to_builtins(result))
    else:
        print_result(chosen, result)


def _planned(
    name: str,
    on: str | None,
    axes: str | None,
    batch: str | None,
    seq_len: str | None,
    fields: dict[str, dict[str, Any]],
    calibration: Path | None,
) -> Plan:
    """The best plan for a model with the axes given."""
    for option, value in (("--on", on), ("--batch", batch), ("--seq", seq_len)):
        if value is None:
            raise InputError(
                f"train {name} needs {option}. Write: --on cpu:8 --batch 16Ki --seq 512, or give a plan file."
            )
    model = with_fields(find_model(name), "model", fields["model"])
    require_runnable(model)
    cluster = parse_cluster(str(on))
    length = parse_count(str(seq_len), what="seq")
    job = with_fields(Job(batch_seqs=parse_batch(str(batch), seq_len=length), seq_len=length), "job", fields["job"])
    result = plan(
        model,
        cluster,
        job,
        axes=take_axes(axes, fields["strategy"]),
        overrides=fields["strategy"],
        top=1,
        calibration=rates_for(cluster, calibration, fitted=True),
    )
    best = result.strategies[0]
    if best.num_chips < cluster.num_chips:
        raise CannotRunError(". ".join(result.shortfall))
    return result.plan()


def _changed(found: Plan, fields: dict[str, dict[str, Any]]) -> Plan:
    """A plan with fields set on the command line, checked and predicted again: a file may have been edited."""
    parts = ("model", "job", "strategy")
    if "mesh" in fields["strategy"]:
        mesh = {**found.strategy.mesh, **fields["strategy"]["mesh"]}
        fields["strategy"] |= {"mesh": mesh, "placement": {}}
    model, job, strategy = (with_fields(getattr(found, part), part, fields[part]) for part in parts)
    require_legal(model, found.cluster, job, strategy, calibration=found.calibration)
    new = estimate_step(model, found.cluster, job, strategy, calibration=found.calibration)
    numbers = {name: getattr(new, name) for name in new.__struct_fields__}
    predicted = msgspec.structs.replace(found.predicted, **numbers, train_days=None, cost_usd=None)
    return msgspec.structs.replace(found, model=model, job=job, strategy=strategy, predicted=predicted)


def predicted_of(chosen: Plan) -> "Predicted":
    """What the plan expects of a step, and what MFU is a share of."""
    from meshwright.train.metrics import Predicted

    peak = reference_peak(chosen.cluster.chip, chosen.calibration, chosen.strategy.matmul_dtype)
    return Predicted(
        step_s=chosen.predicted.step_s,
        step_s_lower=chosen.predicted.step_s_lower,
        step_s_upper=chosen.predicted.step_s_upper,
        model_flops=model_flops(chosen.model, chosen.job),
        peak_flops_per_s=peak * chosen.cluster.num_chips,
        hbm_bytes_per_chip=chosen.predicted.hbm_bytes_per_chip,
    )


def run_plan(chosen: Plan, settings: dict[str, Any], *, runs: Path) -> "TrainResult":
    """Train by a plan on the devices at hand. Raises CannotRunError when they are not those of the plan."""
    from meshwright.parallel.mesh import emulate_devices

    require_runnable(chosen.model)
    if chosen.cluster.kind == "host":
        emulate_devices(chosen.cluster.num_chips)
    else:
        _require_devices(chosen)
    from meshwright.train.loop import train
    from meshwright.train.settings import settings_from_table

    job, resolved = chosen.job, settings_from_table(settings)
    say(
        f"{chosen.model.name} on {chosen.cluster.short_name}: {mesh_words(chosen.strategy.mesh)}, "
        f"{format_count(job.tokens_per_step)} tokens a step, remat {chosen.strategy.remat}, "
        f"predicted {format_seconds(chosen.predicted.step_s)} a step"
    )
    return train(
        chosen.model,
        chosen.strategy,
        job,
        resolved,
        run_root=runs,
        predicted=predicted_of(chosen),
        texts={"plan.toml": dump_toml(chosen)},
    )


def _require_devices(chosen: Plan) -> None:
    import jax

    devices = jax.devices()
    if devices[0].platform == "cpu" or len(devices) < chosen.cluster.num_chips:
        raise CannotRunError(
            f"the plan is for {chosen.cluster.num_chips} chips of {chosen.cluster.chip.name} and this machine has "
            f"{len(devices)} of platform {devices[0].platform}. Run it there, or plan for emulated devices: --on cpu:8."
        )


def print_result(chosen: Plan, result: "TrainResult") -> None:
    """Losses, and each prediction beside its measurement."""
    if not result.losses:
        click.echo(f"stopped before the first step; {result.run} holds the plan")
        return
    stopped = " (stopped)" if result.stopped else ""
    held_out = or_dash(result.validation_loss, lambda loss: f"{loss:.3f}")
    losses = f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}, held out {held_out}"
    click.echo(f"{result.steps} steps{stopped}: {losses}")
    predicted = chosen.predicted
    memory = result.memory.total_bytes if result.memory else None
    rows = [
        _compared("step", predicted.step_s, result.step_s, format_seconds),
        _compared("MFU", predicted.mfu, result.mfu, lambda share: f"{share:.1%}"),
        _compared("memory of a device", predicted.hbm_bytes_per_chip, memory, format_bytes),
    ]
    print_table(["", "predicted", "measured", "ratio"], rows)
    rate = or_dash(result.tokens_per_s, lambda tokens: f"{tokens:,.0f}")
    click.echo(f"{rate} tokens/s; compiling took {format_seconds(result.compile_s)}; everything is in {result.run}")


def _compared(name: str, predicted: float, measured: float | None, show: Callable[[float], str]) -> list[str]:
    ratio = or_dash(measured, lambda found: f"{found / predicted:.2f}")
    return [name, show(predicted), or_dash(measured, show), ratio]
