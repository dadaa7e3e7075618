"""`meshwright verify`: the real step of a plan compiled for its hardware, which need not be there."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from meshwright.cli.fields import check_tokens, parse_fields, take_axes, with_fields
from meshwright.cli.machine import rates_for
from meshwright.cli.output import emit_json, json_option, print_fact, print_table, print_text
from meshwright.cli.verbs.job_steps import CACHE_DTYPES, STEPS, job_of_step, require_storage
from meshwright.cli.verbs.plan import microbatch_words, remat_words
from meshwright.cli.verbs.verify_request import PROGRAM, TIMEOUT_S, request_of
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import format_bytes, format_count, format_flops, format_seconds, parse_count
from meshwright.spec.calibration import Calibration
from meshwright.spec.catalogue import model as find_model
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.job import Job, parse_batch
from meshwright.spec.model import Model
from meshwright.spec.plan_file import load_plan
from meshwright.spec.strategy import AS_RUN, Strategy, make_mesh, mesh_words

if TYPE_CHECKING:
    from meshwright.verify.differences import Difference
    from meshwright.verify.flops import Products
    from meshwright.verify.proof import Proof

DEPTHS = ("lower", "partition", "full")
PLATFORMS = ("tpu", "cuda", "cpu")


@click.command()
@click.argument("what", metavar="PLAN.toml | MODEL")
@click.option("--on", "on", help="The cluster, for a MODEL: v5p:16x20x28, h100:8x256, cpu:8.")
@click.option("--axes", help="Mesh axes, such as fsdp=4,tensor=4; to train, the best plan with these is taken.")
@click.option("--batch", help="Tokens a step (4Mi) or sequences (1024seq); to generate, sequences at once (32seq).")
@click.option("--seq", "seq_len", help="Tokens of a sequence; to generate, positions that the cache holds.")
@click.option("--step", type=click.Choice(STEPS), default="train", show_default=True)
@click.option("--depth", type=click.Choice(DEPTHS), default="partition", show_default=True, help="How far to compile.")
@click.option("--for", "platform", type=click.Choice(PLATFORMS), help="The compiler; by default the cluster's own.")
@click.option("--weights", type=click.Choice(["as they are", "int8"]), default="as they are", help="To generate.")
@click.option("--cache-dtype", type=click.Choice(CACHE_DTYPES), default="bf16", show_default=True, help="To generate.")
@click.option("--timeout", default=TIMEOUT_S, show_default=True, help="Seconds that the compiler may take.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep what the compiler wrote in this folder.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Any field: strategy.remat=block.")
@click.option("--calibration", type=click.Path(path_type=Path), help="Rates of the cluster (TOML), or datasheet.")
@json_option
def command(
    what: str,
    on: str | None,
    axes: str | None,
    batch: str | None,
    seq_len: str | None,
    step: str,
    depth: str,
    platform: str | None,
    weights: str,
    cache_dtype: str,
    timeout: float,
    keep: Path | None,
    pairs: tuple[str, ...],
    calibration: Path | None,
    as_json: bool,
) -> None:
    """Compile the real step of a plan for its target and hold what it needs against the prediction.

    Nothing of the target has to be here. Depths: lower (does everything divide and agree), partition (memory and
    collectives, in seconds), full (the whole compiler). Ends with 3 where the step does not partition or does not fit.
    """
    from meshwright.verify.proof import proof_table, prove
    from meshwright.verify.running import python_program

    fields = parse_fields(pairs)
    given = {"--on": on, "--batch": batch, "--seq": seq_len, "--axes": axes, "--calibration": str(calibration or "")}
    named = [option for option, value in given.items() if value]
    if what.endswith(".toml") and named:
        raise InputError(f"{what} says the cluster, axes, batch and seq; leave {', '.join(named)} out.")
    step = _step(what, step, fields["job"])
    _check_options(step, fields["train"], weights=weights, cache_dtype=cache_dtype, timeout=timeout)
    found = _Asked(what, given, fields, step, calibration)
    request = request_of(
        found.model,
        found.cluster,
        found.strategy,
        found.job,
        step=step,
        depth=depth,
        platform=platform,
        weights=weights,
        cache_dtype=cache_dtype,
        settings=fields["train"],
        calibration=found.calibration,
        assumptions=found.assumptions,
    )
    proof = prove(request, program=python_program(PROGRAM), timeout_s=timeout, keep=keep)
    if as_json:
        emit_json(proof_table(proof))
    else:
        print_proof(proof)
    if not proof.runs:
        raise CannotRunError(proof.refusal)


def _step(what: str, step: str, job: dict[str, Any]) -> str:
    """The step that is asked for; without one it is of the job's kind."""
    if click.get_current_context().get_parameter_source("step") is not ParameterSource.DEFAULT:
        return step
    return str(job.get("kind") or (load_plan(Path(what)).job.kind if what.endswith(".toml") else step))


def _check_options(step: str, settings: dict[str, Any], *, weights: str, cache_dtype: str, timeout: float) -> None:
    """Raises InputError for a setting that is none, and for an option that has no part in the step."""
    from meshwright.train.settings import settings_from_table

    if not timeout > 0:
        raise InputError(f"--timeout {timeout:g} leaves the compiler no time. Give seconds above 0.")
    if step != "train" and settings:
        raise InputError(f"--set train.{next(iter(settings))} is of training. Leave it out, or take --step train.")
    settings_from_table(settings)
    require_storage(step, weights=weights, cache_dtype=cache_dtype)


class _Asked:
    """What the command line names: a plan file, or a model with what a plan file would say."""

    def __init__(
        self, what: str, given: dict[str, str | None], fields: dict[str, Any], step: str, calibration: Path | None
    ) -> None:
        self.calibration: Calibration | None
        if what.endswith(".toml"):
            plan = load_plan(Path(what))
            self.model: Model = with_fields(plan.model, "model", fields["model"])
            self.cluster: Cluster = plan.cluster
            self.job: Job = job_of_step(with_fields(plan.job, "job", fields["job"]), step)
            self.strategy: Strategy = with_fields(plan.strategy, "strategy", fields["strategy"])
            self.assumptions = with_fields(plan.assumptions, "assumptions", fields["assumptions"])
            self.calibration = plan.calibration
            return
        for option in ("--on", "--batch", "--seq"):
            if given[option] is None:
                raise InputError(
                    f"verify {what} needs {option}, or name a plan file. Write: --on v5e:4x4 --batch 64Ki."
                )
        self.model = with_fields(find_model(what), "model", fields["model"])
        self.cluster = parse_cluster(str(given["--on"]))
        length = parse_count(str(given["--seq"]), what="seq")
        seqs = parse_batch(str(given["--batch"]), seq_len=length)
        made = with_fields(Job(batch_seqs=seqs, seq_len=length), "job", fields["job"])
        self.job = check_tokens(job_of_step(made, step))
        self.assumptions = with_fields(AS_RUN, "assumptions", fields["assumptions"])
        fixed = take_axes(given["--axes"], fields["strategy"])
        if step == "train":
            self._plan(fixed, fields["strategy"], calibration)
        else:
            self.calibration = None
            one = Strategy(mesh=make_mesh(fixed), state="bf16-adam")
            self.strategy = with_fields(one, "strategy", fields["strategy"])

    def _plan(self, fixed: dict[str, int], overrides: dict[str, Any], calibration: Path | None) -> None:
        from meshwright.cost.setting import Setting
        from meshwright.plan.planner import plan
        from meshwright.plan.space import USUAL

        rates = rates_for(self.cluster, calibration, fitted=True)
        self.calibration = rates
        try:
            chosen = plan(
                Setting(self.model, self.cluster, self.job, rates, assumptions=self.assumptions),
                axes=fixed,
                overrides=overrides,
                choices=msgspec.structs.replace(USUAL, equal_stages=True),
                top=1,
            ).strategies[0]
        except CannotRunError:
            if math.prod(fixed.values()) != self.cluster.num_chips:
                raise
            # The mesh is given whole: what the compiler says of it is the answer, with the least memory there is.
            least = Strategy(mesh=make_mesh(fixed), state="bf16-adam", remat="full")
            self.strategy = with_fields(least, "strategy", overrides)
            return
        self.strategy, self.cluster, self.job = chosen.strategy, chosen.cluster, chosen.job


# -- what is printed ----------------------------------------------------------------------------------

HOW = {
    "lower": "lowered only: every array divides and every type agrees",
    "partition": "partitioned and its buffers assigned",
    "full": "compiled whole",
}


def print_proof(proof: "Proof") -> None:
    """Who compiled it and how far, the memory, and the collectives with their differences."""
    request, outcome = proof.request, proof.outcome
    strategy, setting = request.strategy, request.setting
    what = f"{setting.model.name} on {setting.cluster.short_name}, {request.step}: {mesh_words(strategy.mesh)}"
    if request.step == "train":
        what += f"; {microbatch_words(strategy)}, {remat_words(strategy)}"
    print_text(f"{what}; {format_count(setting.job.batch_seqs)} sequences of {format_count(setting.job.seq_len)}")
    if outcome.lowered and proof.runs:
        print_fact("compiled", f"{HOW[request.depth]}, for {_target_words(proof)}")
    print_fact(
        "took",
        f"{format_seconds(outcome.cpu_s)} of CPU, {format_bytes(outcome.max_rss_bytes)} of memory, "
        f"{format_seconds(outcome.wall_s)} of the clock",
    )
    if request.target.note:
        print_fact("note", request.target.note)
    if proof.memory is not None:
        _print_memory(proof)
    if proof.traffic is not None:
        _print_traffic(proof)
    if proof.products is not None:
        _print_products(proof.products)
    if proof.traffic_error:
        print_fact("collectives", f"could not be read: {proof.traffic_error}")


def _target_words(proof: "Proof") -> str:
    target, cluster = proof.request.target, proof.request.setting.cluster
    if target.platform == "cpu":
        return f"{target.num_devices:,} emulated CPU devices"
    return f"{cluster.num_chips:,} x {cluster.chip.full_name or cluster.chip.name}"


def _print_memory(proof: "Proof") -> None:
    memory = proof.memory
    assert memory is not None
    word = "fits" if memory.fits else "does not fit"
    print_fact(
        "memory",
        f"{word}: {format_bytes(memory.needed)} of {format_bytes(memory.available)} a chip; predicted "
        f"{format_bytes(memory.predicted)} ({memory.error:+.1%})",
    )
    if memory.peak is not None:
        print_fact("peak", f"{format_bytes(memory.peak)} alive at once, by the compiler's count")
    own = [(name, value) for name, value in memory.items.items() if value > 0]
    rows = [[f"  {name}", format_bytes(value), ""] for name, value in own]
    rows.append(["arguments", format_bytes(memory.predicted_arguments), format_bytes(memory.arguments)])
    rows.append(["all else", format_bytes(memory.predicted_temporaries), format_bytes(memory.temporaries)])
    print_table(["memory of a chip", "predicted", "compiled"], rows)


def _print_traffic(proof: "Proof") -> None:
    traffic = proof.traffic
    assert traffic is not None
    rows = [
        [
            f"{row.kind} over {','.join(row.axes)}",
            f"{row.derived_arrays:,}",
            f"{row.compiled_arrays:,}",
            format_bytes(row.derived_bytes),
            format_bytes(row.compiled_bytes),
        ]
        for row in traffic.rows
    ]
    if not rows:
        print_fact("collectives", "none")
        return
    print_table(["collectives of a step", "derived", "compiled", "bytes derived", "compiled"], rows)
    for name in dict.fromkeys(one.name for one in traffic.differences):
        print_fact(name, _difference_words([one for one in traffic.differences if one.name == name]), column=22)
    print_fact("without a name", f"{traffic.remainder:.2%} of all bytes", column=22)


def _print_products(found: "Products") -> None:
    """FLOPs of matrix products, and the steps in which they are not as derived."""
    share = found.compiled / found.derived - 1 if found.derived else 0.0
    print_fact(
        "matrix products",
        f"{format_flops(found.compiled, unit='FLOPs')} on a device, derived "
        f"{format_flops(found.derived, unit='FLOPs')} ({share:+.2%})",
        column=22,
    )
    for one in found.differences[:SHOWN_PLACES]:
        print_fact(
            "",
            f"{one.where}: {format_flops(one.compiled, unit='FLOPs')}, derived "
            f"{format_flops(one.derived, unit='FLOPs')}",
            column=22,
        )
    if found.by_data:
        print_fact("", f"left out, since their number depends on the data: {', '.join(found.by_data)}", column=22)


SHOWN_PLACES = 3
"""Places of one kind of difference that are named; `--json` has them all."""


def _difference_words(found: list["Difference"]) -> str:
    """How much a kind of difference comes to, what it is, and where most of it is."""
    from meshwright.verify.differences import CLASSES

    extra = sum(one.extra_bytes for one in found)
    places = ", ".join(f"{one.where} {format_bytes(abs(one.extra_bytes))}" for one in found[:SHOWN_PLACES])
    rest = f" and {len(found) - SHOWN_PLACES} more" if len(found) > SHOWN_PLACES else ""
    return f"{format_bytes(abs(extra))} {'more' if extra >= 0 else 'less'}, {CLASSES[found[0].name]}: {places}{rest}"
