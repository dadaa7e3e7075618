"""Communication against compute by batch size, for several ways of sharding, and the batch at which the two cross.

As in the book, compute is compared with the sum of all collectives, which assumes nothing about overlap. Batches are
tokens and need not be whole sequences per chip. Source: How to Scale Your Model, section 5.1.4 and its figures 15 and
16.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.derive import derive
from meshwright.algebra.derived import Derived
from meshwright.algebra.program import Program, Variable
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import parse_block, transformer
from meshwright.cli.sweeps.points import filled_mesh
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.arrays import select
from meshwright.cost.formulas import limits
from meshwright.cost.network.links import torus_width
from meshwright.cost.network.placement import Placement, place_axes
from meshwright.cost.step_costs import collective_groups, op_sizes, price_step
from meshwright.cost.step_rates import attention_scores, step_rates
from meshwright.cost.work.slots import SlotSizes
from meshwright.plan.legal import divisors
from meshwright.report.answer import Facts
from meshwright.spec.assumptions import Assumptions
from meshwright.spec.calibration import Calibration, datasheet_calibration, matmul_rate
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh, mesh_words

Array = Any
"""A NumPy array with one entry per batch."""

MAX_TENSOR = 64
SCALES = 0.9
"""Growth of compute over that of the batch, in logarithms, from which compute follows the batch."""
NO_FORMS: dict[str, tuple[str, float]] = {}
MAX_WIDTH = 10**9
_LAYER = re.compile(r"mlp:(\d+)x(\d+)")

MLP_ASSIGNMENT: dict[str, dict[str, tuple[str, ...]]] = {
    "activation": {"B": ("data", "fsdp"), "F": ("tensor",), "D": ("tensor",)},
    "weight": {"F": ("tensor",), "D": ("fsdp",)},
}
"""Mixed FSDP and tensor parallelism as the book writes it: In[B_X, D_Y], Win[D_X, F_Y]."""


class SweptWork(msgspec.Struct, frozen=True, kw_only=True):
    """Derived steps with symbolic sizes, their dims, and the tokens in one unit of B (``seq_len``).

    ``whole`` prices every step of training; otherwise the forward pass of the layers alone, which has the most
    communication for its FLOPs.
    """

    name: str
    derived: Derived
    dims: dict[str, int]
    seq_len: int
    model: Model | None = None
    whole: bool = False
    d_ff: int

    def steps(self) -> Iterable[tuple[Step, float]]:
        """Returns every step, and how often it runs."""
        if self.whole:
            return self.derived.steps(1)
        return ((step, b.repeat) for b in self.derived.blocks if b.block.carry for step in b.forward)

    def sizes(self, tokens: Array, mesh: Mapping[str, Array], cluster: Cluster) -> SlotSizes:
        """Returns sizes of all candidates, B in units of ``seq_len`` tokens."""
        if self.model is None:
            return SlotSizes(dims={**self.dims, "B": tokens}, mesh=mesh, state="bf16-adam")
        return op_sizes(
            self.model,
            seq_len=self.seq_len,
            microbatch_seqs=tokens / self.seq_len,
            mesh=mesh,
            strategy=Strategy(mesh={}),
            scores=attention_scores(cluster),
            assumptions=Assumptions(empty_slots=False),  # as the closed forms count
        )


def mlp_work(text: str) -> SweptWork | None:
    """Returns the book's layer of two matrices for ``"mlp:8192x32768"`` (D x F); None for another text."""
    layer_match = _LAYER.fullmatch(text.strip())
    if layer_match is None:
        return None
    d_model, d_ff = int(layer_match[1]), int(layer_match[2])
    if not 1 <= min(d_model, d_ff) <= max(d_model, d_ff) <= MAX_WIDTH:
        raise InputError(f"{text}: no layer has such widths. Give 1 to {MAX_WIDTH:,}, such as mlp:8192x32768.")
    variables = {
        "Win": Variable("Win", ("D", "F"), "weight"),
        "Wout": Variable("Wout", ("F", "D"), "weight"),
    }
    block_text = "Tmp[B,F] = In[B,D] * Win[D,F]\nOut[B,D] = Tmp[B,F] * Wout[F,D]"
    block = parse_block("mlp", block_text, variables, carry="In", result="Out")
    strategy = Strategy(mesh=make_mesh({}), assignment=MLP_ASSIGNMENT, remat="none")
    derivation = derive(Program((block,), variables), strategy, symbolic=True)
    return SweptWork(name=text, derived=derivation, dims={"D": d_model, "F": d_ff}, seq_len=1, d_ff=d_ff)


def model_work(model: Model, *, seq_len: int, whole: bool = False, remat: str = "none") -> SweptWork:
    """Returns a model's layers under the default assignment."""
    derived = derive(transformer(model), Strategy(mesh=make_mesh({}), remat=remat), symbolic=True)
    return SweptWork(
        name=model.name, derived=derived, dims=model.dims, seq_len=seq_len, model=model, whole=whole, d_ff=model.d_ff
    )


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One way of sharding at every batch: seconds of compute and of the collectives by mesh axes.

    ``flops_s`` are the seconds of the FLOPs alone: where compute takes longer, the chip's memory binds.
    ``meshes`` and ``shapes`` (of the cluster) have an entry per batch; ``mesh`` is None if the mesh differs by batch.
    """

    name: str
    mesh: dict[str, int] | None
    tokens: Array
    compute_s: Array
    flops_s: Array
    comms_s: dict[str, Array]
    meshes: Sequence[dict[str, int]]
    shapes: Sequence[str]

    @property
    def total_s(self) -> Array:
        """All collectives, one after the other."""
        return sum(self.comms_s.values(), start=np.zeros(len(self.tokens)))

    @property
    def ratio(self) -> Array:
        """Compute over communication: above one, communication can hide. Infinite without any."""
        with np.errstate(divide="ignore"):
            return self.compute_s / self.total_s

    @property
    def memory_bound(self) -> int:
        """The number of first batches with which compute grows less than they do: reading weights binds, not FLOPs."""
        slopes = np.diff(np.log(self.compute_s)) / np.diff(np.log(self.tokens))
        return int(np.argmin([*((slopes < SCALES) & (self.compute_s > self.flops_s)[:-1]), False]))

    def to_json(self) -> Facts:
        """Returns plain data; the meshes only where they differ."""
        value_by_field = {**msgspec.structs.asdict(self), "axes": self.mesh, "total_s": self.total_s}
        del value_by_field["tokens"], value_by_field["mesh"]
        return value_by_field | {"meshes": None if self.mesh else self.meshes}


# -- curves ---------------------------------------------------------------------------------------------


def scheme_curves(
    work: SweptWork,
    clusters: Sequence[Cluster],
    tokens: Array,
    *,
    axes: Mapping[str, int] | None = None,
    whole_axes: bool = False,
    calibration: Calibration | None = None,
) -> tuple[Curve, ...]:
    """Returns FSDP alone, FSDP with each tensor size, tensor alone if all chips can share the widths (those of the
    book's layer always, also unevenly), and the best at every batch; or the one mesh of ``axes``.

    ``clusters`` are shapes of equally many chips; every mesh takes the shape with the least communication.
    ``whole_axes`` keeps every torus axis to one mesh axis, as the book counts them; otherwise a mesh axis may take
    parts of several, which can be faster.
    """
    num_chips, dims = clusters[0].num_chips, ("F", "D") if work.model is None else ("F", "N")
    if axes is not None:
        mesh = filled_mesh(clusters[0], axes)
        meshes = {mesh_words(mesh, " x ", alone="one chip"): mesh}
    else:
        sizes = [n for n in divisors(num_chips) if n <= MAX_TENSOR and not any(work.dims[dim] % n for dim in dims)]
        meshes = {f"FSDP x tensor {n}" if n > 1 else "FSDP alone": {"fsdp": num_chips // n, "tensor": n} for n in sizes}
        if work.model is None or not any(work.dims[dim] % num_chips for dim in dims):
            meshes = {name: mesh for name, mesh in meshes.items() if num_chips == 1 or mesh["tensor"] != num_chips}
            meshes |= {"tensor alone": {"tensor": num_chips}} if num_chips > 1 else {}
        meshes = {name: make_mesh(mesh) for name, mesh in meshes.items()}
    priced_curves = _priced(work, clusters, list(meshes.values()), tokens, whole_axes, calibration)
    curves_by_name = {name: [curve for curve in priced_curves if curve.mesh == mesh] for name, mesh in meshes.items()}
    curves = [_best(name, meshes[name], mesh_curves) for name, mesh_curves in curves_by_name.items() if mesh_curves]
    return tuple(curves) if axes is not None else (*curves, _best("best mesh", None, priced_curves))


def crossing(curve: Curve, closed: Mapping[str, tuple[str, float]] = NO_FORMS) -> Facts:
    """Returns the last batch where compute overtakes communication, interpolated between two batches in logarithms.

    ``tokens`` is None if compute never or always takes longer within the batches of the curve. ``closed`` are the
    `closed_forms` by the name of their curve.
    """
    log_ratio, log_tokens = np.log(curve.ratio), np.log(curve.tokens)
    formula, closed_tokens = closed.get(curve.name, ("", None))
    rising_indices = np.flatnonzero((log_ratio[:-1] < 0) & (log_ratio[1:] >= 0))
    tokens = None
    if len(rising_indices):
        last_rise = rising_indices[-1]
        fraction = -log_ratio[last_rise] / (log_ratio[last_rise + 1] - log_ratio[last_rise])
        tokens = float(np.exp(log_tokens[last_rise] + fraction * (log_tokens[last_rise + 1] - log_tokens[last_rise])))
    return {"name": curve.name, "tokens": tokens, "formula": formula, "closed_form": closed_tokens}


def closed_forms(
    work: SweptWork, cluster: Cluster, calibration: Calibration | None = None
) -> dict[str, tuple[str, float]]:
    """Returns curve name -> (formula, tokens) on one slice of a torus: FSDP over all axes, best mixture with tensor."""
    torus = torus_width(cluster)
    if torus is None or cluster.num_slices > 1 or len(torus.axes) < 2:
        return {}
    rates = calibration or datasheet_calibration(cluster.chip)
    alpha = limits.ici_intensity(matmul_rate(cluster.chip, rates, "bf16"), torus.bytes_per_s * rates.efficiency.ici)
    (tensor_axes, *fsdp_axes), total_axes = torus.axes, sum(torus.axes)
    fsdp_tokens = limits.data_parallel_min_batch(alpha, total_axes, cluster.num_chips)
    chip_tokens = limits.mixed_min_tokens_per_chip(alpha, work.d_ff, fsdp_axes=sum(fsdp_axes), tensor_axes=tensor_axes)
    return {
        "FSDP alone": (f"N alpha / {total_axes:g}", float(fsdp_tokens)),
        "best mesh": (f"4 N alpha^2 / ({tensor_axes * sum(fsdp_axes):g} F)", float(chip_tokens) * cluster.num_chips),
    }


# -- pricing --------------------------------------------------------------------------------------------


def _priced(
    work: SweptWork,
    clusters: Sequence[Cluster],
    meshes: Sequence[dict[str, int]],
    tokens: Array,
    whole_axes: bool,
    calibration: Calibration | None,
) -> list[Curve]:
    """Returns every placement of every mesh on every shape, priced at every batch."""
    curves: list[Curve] = []
    groups = collective_groups(work.derived)
    for cluster in clusters:
        placements: list[Placement] = [
            placement
            for mesh in meshes
            for placement in place_axes(cluster, mesh)
            if not whole_axes or all(len(link.parts) <= 1 for link in placement.links)
        ]
        if not placements:
            continue
        rates = step_rates(cluster, placements, groups, Strategy(mesh={}), calibration=calibration)
        for placement_index, placement in enumerate(placements):
            mesh = {axis: float(size) for axis, size in placement.mesh.items()}
            sizes, placement_rates = work.sizes(tokens, mesh, cluster), select(rates, placement_index)
            compute_s, flops_s, comms_s = np.zeros(len(tokens)), np.zeros(len(tokens)), dict[str, Array]()
            for step, repeats in work.steps():
                cost = price_step(step, sizes, placement_rates, num_microbatches=1)
                if not step.is_collective:
                    compute_s, flops_s = compute_s + cost.local_s * repeats, flops_s + cost.math_s * repeats
                elif long_axes := [axis for axis in step.axes if placement.mesh[axis] > 1]:
                    axes_name = "+".join(long_axes)
                    comms_s[axes_name] = comms_s.get(axes_name, np.zeros(len(tokens))) + cost.network_s * repeats
            curves.append(
                Curve(
                    name="",
                    mesh=placement.mesh,
                    tokens=tokens,
                    compute_s=compute_s,
                    flops_s=flops_s,
                    comms_s=comms_s,
                    meshes=[placement.mesh] * len(tokens),
                    shapes=[cluster.short_name] * len(tokens),
                )
            )
    if not curves:
        raise CannotRunError(f"no mesh of {work.name} can be laid on {clusters[0].short_name}. Name another shape.")
    return curves


def _best(name: str, mesh: dict[str, int] | None, curves: Sequence[Curve]) -> Curve:
    """Returns the curve that at every batch is the one with the least communication."""
    fastest_indices = np.argmin([curve.total_s for curve in curves], axis=0)
    batch_indices = range(len(fastest_indices))
    zeros = np.zeros(len(fastest_indices))

    def picked(rows: Sequence[Array]) -> Array:
        return np.stack(rows)[fastest_indices, batch_indices]

    comms_s = {
        axis: picked([curve.comms_s.get(axis, zeros) for curve in curves])
        for axis in dict.fromkeys(axis for curve in curves for axis in curve.comms_s)
    }
    return Curve(
        name=name,
        mesh=mesh,
        tokens=curves[0].tokens,
        compute_s=picked([curve.compute_s for curve in curves]),
        flops_s=picked([curve.flops_s for curve in curves]),
        comms_s={axis: seconds for axis, seconds in comms_s.items() if seconds.any()},
        meshes=[curves[curve_index].meshes[i] for i, curve_index in zip(batch_indices, fastest_indices, strict=True)],
        shapes=[curves[curve_index].shapes[i] for i, curve_index in zip(batch_indices, fastest_indices, strict=True)],
    )
