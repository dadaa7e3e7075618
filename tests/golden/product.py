"""The product's names that the golden files are made through: nothing else in this folder imports the product.

When a module or a field of the product gets another name, only this file changes. What goes in are plain texts and
numbers, what comes out are plain data.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

Plain = Any
"""Numbers, texts, None, and lists and dicts of them."""


# -- the command line ----------------------------------------------------------------------------------


class Said(NamedTuple):
    """What a call of the command line left."""

    code: int
    out: str
    err: str


def call(arguments: Sequence[str]) -> Said:
    """One call of `meshwright` in this process."""
    from meshwright.cli.main import run

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(list(arguments))
    return Said(code, out.getvalue(), err.getvalue())


# -- what is planned -----------------------------------------------------------------------------------


def find_model(name: str) -> Any:
    """A model of the catalogue, or of a path to a config.json."""
    from meshwright.spec import catalogue

    return catalogue.load_model(name)


class Chosen(NamedTuple):
    """A strategy, and what is assumed where it is priced."""

    strategy: Any
    assumptions: Any


def make_strategy(axes: Mapping[str, int], choices: Mapping[str, Any]) -> Chosen:
    """``zero`` and ``sequence_parallel`` among the choices of a strategy pick the assignment; some are assumptions."""
    from meshwright.spec.assumptions import Assumptions
    from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

    fields = dict(choices)
    assumed = {name: fields.pop(name) for name in Assumptions.__struct_fields__ if name in fields}
    assignment = standard_assignment(
        zero=fields.pop("zero", 3), sequence_parallel=fields.pop("sequence_parallel", True)
    )
    return Chosen(Strategy(mesh=make_mesh(axes), assignment=assignment, **fields), Assumptions(**assumed))


def make_options(choices: Mapping[str, Any]) -> Any:
    """What a job asks of its model's program: documents, losses of the router, a bound on its slots."""
    from meshwright.algebra.layers import ProgramOptions

    return ProgramOptions(**choices)


# -- derived steps -------------------------------------------------------------------------------------


def training_steps(model: Any, chosen: Chosen, options: Any) -> dict[str, list[str]]:
    """Section -> its derived steps, one line each, and what is kept."""
    from meshwright.algebra.derive import derive
    from meshwright.algebra.transformer import transformer

    return _sections(derive(transformer(model, options), chosen.strategy))


def generation_steps(model: Any, chosen: Chosen, *, which: str, cache_dtype: str, quantised: bool) -> dict[str, Any]:
    """The same of a step of generation: of prompts (``prefill``), or of one more token of each sequence."""
    from meshwright.algebra.generation.derive import derive_generation
    from meshwright.algebra.generation.program import Storage

    storage = Storage(cache_dtype=cache_dtype, weights="int8" if quantised else "")
    return _sections(derive_generation(model, chosen.strategy, storage, prompts=which == "prefill"))


def _sections(derived: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for block in derived.blocks:
        name = block.block.name
        found[f"{name} forward"] = [f"x{block.repeat}", *_lines(block.forward)]
        found[f"{name} backward"] = [f"segment {block.segment}", *_lines(block.backward)]
        found[f"{name} kept"] = [str(array) for array in block.kept]
    found["boundary"] = _lines(derived.boundary)
    found["ends"] = _lines(derived.ends)
    found["update"] = _lines(derived.update)
    found["declared"] = [f"{array} {array.dtype}".rstrip() for _, array in sorted(derived.declared.items())]
    return {name: lines for name, lines in found.items() if lines}


def _lines(steps: Sequence[Any]) -> list[str]:
    return [line for step in steps for line in _step_lines(step)]


def _step_lines(step: Any, indent: str = "") -> list[str]:
    more = "".join(f" & {array}" for array in step.more)
    words = [step.op, step.phase, step.scope, step.block or "-", ",".join(step.axes) or "-"]
    words += _facts(step)
    words += ["critical"] if step.critical else []
    parts = [line for part in step.parts for line in _step_lines(part, f"{indent}  part ")]
    return [f"{indent}{step}{more} | {' '.join(words)}", *parts]


def _facts(step: Any) -> list[str]:
    """The details of a step as the golden files have them: name=value, in the order of the program's text."""
    details = step.details
    given = {} if details is None else msgspec.to_builtins(details)
    kind = type(details).__name__
    if kind == "Round":
        order = {"ring": given["ring"], "window": given["window"]}
        if given["beside_products"]:
            order |= {"behind": "collective_matmul", "ways": given["ways"]}
    elif kind == "Blocks":
        order = {"form": given["form"], "ways": given["ways"], "over": ",".join(given["axes"])}
    elif kind == "Attention":
        order = {**given, "ring": ",".join(given["ring"])}
    elif kind == "Routing" and not (given["balance"] or given["z"] or given["capacity"]):
        order = {}
    elif kind == "Routing" and (step.op != "route_backward"):
        order = {name: value for name, value in given.items() if name != "microbatches"}
    else:
        order = {name: "true" if value is True else value for name, value in given.items()}
    order |= {"reduce": "max"} if step.reduction == "max" else {}
    order |= {"accumulate": "true"} if step.accumulates else {}
    return [f"{name}={value}" for name, value in order.items() if value]


# -- prices --------------------------------------------------------------------------------------------


def priced(
    model: Any, cluster_text: str, *, batch_seqs: int, seq_len: int, strategy: Chosen, rates: str
) -> dict[str, Plain]:
    """Every field of the prediction of one strategy, where its axes lie, and its bytes and work by kind.

    ``rates`` are ``fitted``, ``datasheet`` or a path to a calibration. A strategy that cannot be priced gives the
    words in which it is refused; one that can be priced and not run, the names of the rules that it breaks.
    """
    from meshwright.core.errors import CannotRunError, InputError
    from meshwright.cost.setting import Setting
    from meshwright.cost.train_step import price_strategy
    from meshwright.plan.legal import legal
    from meshwright.spec.cluster import parse_cluster
    from meshwright.spec.job import Job

    cluster, job = parse_cluster(cluster_text), Job(batch_seqs=batch_seqs, seq_len=seq_len)
    setting = Setting(model, cluster, job, _rates(cluster, rates), assumptions=strategy.assumptions)
    try:
        found = price_strategy(setting, strategy.strategy)
        refusals = legal(setting, strategy.strategy)
    except (CannotRunError, InputError) as error:
        return {"refused": str(error)}
    return {
        "estimate": msgspec.to_builtins(found.estimate),
        "placement": found.placement.describe(),
        "refusals": [refusal.rule for refusal in refusals],
        "sent": _sent(found.costs.all),
        "work": _work(found.costs.all),
    }


def _rates(cluster: Any, rates: str) -> Any:
    from meshwright.spec.calibration import load_calibration
    from meshwright.spec.efficiency import fitted_calibration

    if rates == "fitted":
        return fitted_calibration(cluster.chip)
    return None if rates == "datasheet" else load_calibration(Path(rates))


def _sent(costs: Sequence[Any]) -> dict[str, Plain]:
    """Collective and axes -> how often, bytes of full arrays, seconds, over the whole step on one device."""
    found: dict[str, dict[str, float]] = {}
    for cost in (cost for cost in costs if cost.step.is_collective):
        row = found.setdefault(
            f"{cost.step.op} over {','.join(cost.step.axes)}", {"times": 0.0, "bytes": 0.0, "seconds": 0.0}
        )
        row["times"] += float(cost.count)
        row["bytes"] += float(cost.network_bytes * cost.count)
        row["seconds"] += float(cost.network_s * cost.count)
    return dict(sorted(found.items()))


def _work(costs: Sequence[Any]) -> dict[str, Plain]:
    """Op -> FLOPs, bytes through memory, kernels, seconds, over the whole step on one device."""
    found: dict[str, dict[str, float]] = {}
    for cost in (cost for cost in costs if not cost.step.is_collective):
        row = found.setdefault(cost.step.op, {"flops": 0.0, "hbm_bytes": 0.0, "kernels": 0.0, "seconds": 0.0})
        row["flops"] += float(cost.flops * cost.count)
        row["hbm_bytes"] += float(cost.hbm_bytes * cost.count)
        row["kernels"] += float(cost.num_kernels * cost.count)
        row["seconds"] += float(cost.local_s * cost.count)
    return dict(sorted(found.items()))


# -- training ------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """One step's mean loss, norm of the gradient, and sums over the weights after it."""

    loss: float
    grad_norm: float
    extras: dict[str, list[float]]


def train_steps(
    model: Any, chosen: Chosen, settings: Mapping[str, Any], batches: Sequence[Mapping[str, Any]]
) -> list[Trained]:
    """The step that a run of these settings takes, once for each batch, from the weights of seed 0."""
    import numpy as np

    from meshwright.train.settings import TrainSettings, program_options
    from meshwright.train.step import make_step

    made = TrainSettings(**{"steps": len(batches), "warmup_steps": 1, "learning_rate": 1e-2, **settings})
    options = program_options(made, chosen.strategy, several_documents="documents" in batches[0])
    step = make_step(model, chosen.strategy, made, options=options)
    state, found = step.init(0), []
    for batch in batches:
        state, metrics = step.step(state, batch)
        extras = {name: [float(x) for x in np.ravel(value)] for name, value in sorted(metrics.extras.items())}
        found.append(Trained(float(metrics.loss), float(metrics.grad_norm), extras))
    return found


def compiler_for(platform: str) -> bool:
    """Whether the compiler for a platform, ``tpu`` or ``cuda``, is installed."""
    from meshwright.verify.targets import is_installed

    return bool(is_installed(platform))
