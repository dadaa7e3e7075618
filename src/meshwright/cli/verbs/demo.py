"""`meshwright demo`: the whole loop on this machine: measure, plan, train, compare, draw, sample."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.api.rates import measure
from meshwright.api.running import TextOptions, generate_text, run_training
from meshwright.cli.output import say
from meshwright.cli.verb import Count, Options, option, show, verb
from meshwright.cli.verbs.plan import plan_text
from meshwright.cli.verbs.train import result_text
from meshwright.core.units import format_seconds
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import PricedStrategy, price_strategy
from meshwright.plan.plan_file import Plan, save_plan
from meshwright.plan.planner import rank_plans
from meshwright.report.answer import Answer, Facts, Paragraph
from meshwright.spec.calibration import memory_rate, reference_peak
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import make_mesh, mesh_words

if TYPE_CHECKING:
    from meshwright.report.figure import Figure
    from meshwright.train.loop import TrainResult

DEMO_MODEL = Model(
    name="demo-llama",
    family="llama",
    num_layers=4,
    d_model=256,
    d_ff=704,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    vocab_size=1024,
    max_positions=256,
)
DEMO_JOB = Job(batch_seqs=32, seq_len=128)
CLUSTER = "cpu:8"
PROMPT = "The statement"
SAMPLE_TOKENS = 60
SHOWN = {"q": "queries", "o": "attention", "g": "MLP in", "y": "MLP out", "logits": "unembedding"}
"""Results of the products that the roofline shows -> their labels."""

SETTINGS = {"learning_rate": 3e-3, "warmup_steps": 4, "weight_decay": 0.01, "beta1": 0.8}
"""The settings with the lowest loss after 100 steps, among those tried (2026-11-21)."""


class Given(Options):
    steps: Count = option("Optimizer steps.", default=100)
    out: Path = option("Folder of all files of the demo.", "-o", "--out", default=Path("runs/demo"))


@verb(Given, needs="run draw")
def command(given: Given) -> Answer:
    """Measure this machine, plan a small Llama for 8 emulated devices, train it, compare, draw, sample."""
    from meshwright.bench.machine import machine_speed
    from meshwright.serve.drawing.sampling import Sampling

    given.out.mkdir(parents=True, exist_ok=True)
    cluster = parse_cluster(CLUSTER)
    say("1/5 measure")
    calibration = measure(cluster, keep=given.out / "calibration.toml")
    say("2/5 plan")
    ranking = rank_plans(Setting(DEMO_MODEL, cluster, DEMO_JOB, calibration))
    plan = ranking.plans[0]
    save_plan(plan, given.out / "plan.toml")
    if given.form == "text":
        show(plan_text(ranking), ())
    say("3/5 train")
    train_result = run_training(plan, {**SETTINGS, "steps": given.steps}, runs=given.out)
    assert train_result is not None  # only islands have no result
    say("4/5 pictures")
    pictures = _draw(plan, train_result, given.out)
    say("5/5 sample")
    text_options = TextOptions(max_tokens=SAMPLE_TOKENS, sampling=Sampling(temperature=0.5), mesh=make_mesh({}))
    sample_text = PROMPT + generate_text(Path(train_result.run), [PROMPT], text_options).texts[0]
    speed = machine_speed(plan.calibration)
    facts: Facts = {**msgspec.to_builtins(train_result), "machine_speed": speed}
    facts |= {"plan": given.out / "plan.toml", "pictures": pictures, "sample": sample_text}
    lines = [f"pictures: {', '.join(pictures)}", f"sample:   {sample_text!r}"]
    return Answer(facts, ["", *result_text(plan, train_result, speed), *(Paragraph(line, None) for line in lines)])


def _draw(plan: Plan, result: "TrainResult", out: Path) -> list[str]:
    """Draws loss, roofline, sharded arrays, step and memory, both predicted and measured; returns the files."""
    from meshwright.report.arrays.sharding import array_panel, sharding_figure
    from meshwright.report.bars import memory_figure, step_breakdown_figure
    from meshwright.report.figure import save
    from meshwright.report.plans.measured import loss_figure

    token_sums = [plan.job.tokens_per_step * (i + 1) for i in range(len(result.losses))]
    rates_text = plan.calibration.describe()
    priced_plan = price_strategy(plan.setting, plan.strategy)
    array_by_name = priced_plan.derived.declared
    dims = {**plan.model.dims, "B": plan.job.batch_seqs, "T": plan.job.seq_len}
    panels = [array_panel(array_by_name[name], dims, plan.strategy.mesh) for name in ("x", "w_up", "g")]
    part_keys = ("weights", "optimizer", "batch", "temporaries")
    measured_bytes = {name: getattr(result.memory, f"{name}_bytes") or 0 for name in part_keys} if result.memory else {}
    figure_by_name = {
        "loss.png": loss_figure(result.losses, token_sums, subtitle=f"{plan.model.name} on Python's own documentation"),
        "roofline.png": _roofline(plan, priced_plan, result),
        "sharding.png": sharding_figure(
            panels, subtitle=f"Stream, one weight and one activation on {mesh_words(plan.strategy.mesh)}"
        ),
        "step.png": step_breakdown_figure(
            {
                "predicted": {name.replace("_", " "): s for name, s in priced_plan.estimate.terms.items() if s > 0},
                "measured": {"whole step": result.step_s or 0.0},
            },
            subtitle=f"Predicted parts without overlap; {rates_text}",
        ),
        "memory.png": memory_figure(
            {
                "predicted": {name.replace("_", " "): b for name, b in priced_plan.estimate.memory.items() if b > 0},
                "measured": measured_bytes,
            },
            subtitle="Predicted: the fullest moment. Measured: shards of one device, temporaries of its step",
        ),
    }
    return [str(save(figure, out / name)) for name, figure in figure_by_name.items()]


def _roofline(plan: Plan, priced_plan: PricedStrategy, result: "TrainResult") -> "Figure":
    """Draws a roofline with products of the step at their predicted rates and the whole step at its measured rate.

    The roofs are the calibration's rates, or those of the points where these are higher.
    """
    from meshwright.report.roofline import RooflinePoint, roofline_figure

    chip, rates = plan.cluster.chip, plan.calibration
    points = []
    for cost in priced_plan.costs.all:
        flops, name = float(cost.flops), cost.step.result.name
        if flops and cost.step.phase == "forward" and name in SHOWN:
            flops_per_s, num_bytes = flops / float(cost.local_s), float(cost.hbm_bytes)
            points.append(RooflinePoint(label=SHOWN[name], intensity=flops / num_bytes, flops_per_s=flops_per_s))
    if result.step_s:
        flops, num_bytes = (
            sum(float(getattr(c, field) * c.count) for c in priced_plan.costs.all) for field in ("flops", "hbm_bytes")
        )
        label = f"whole step, measured {format_seconds(result.step_s)}"
        points.append(RooflinePoint(label=label, intensity=flops / num_bytes, flops_per_s=flops / result.step_s))
    return roofline_figure(
        peak_flops_per_s=max(reference_peak(chip, rates, "fp32"), *(point.flops_per_s for point in points)),
        link_bytes_per_s={
            "memory": max(memory_rate(chip, rates), *(point.flops_per_s / point.intensity for point in points))
        },
        points=points,
        title="One emulated device of this machine, and the products of a layer",
    )
