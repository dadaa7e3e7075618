"""`meshwright transfer --frames`: a collective on the ring or line of an axis, drawn hop by hop."""

from pathlib import Path

from meshwright.algebra.steps import BOOK_NAMES
from meshwright.calculators.sharding.ring_steps import RING_KINDS, RingKind, RingRun, run_ring
from meshwright.cli.output import say
from meshwright.core.dims import CollectiveKind
from meshwright.core.errors import InputError
from meshwright.cost.network.legs import Leg
from meshwright.spec.cluster import Cluster

PICTURES = (".png", ".svg", ".json")
WORDS = {
    "all_gather": "Every device passes on what it got last, until all have every block",
    "reduce_scatter": "Blocks travel to their own device and are added on the way",
    "all_reduce": "A ReduceScatter, then an AllGather of the sums",
}


def draw_frames(
    path: Path, kind: CollectiveKind | None, legs: tuple[Leg, ...], cluster: Cluster, *, two_way: bool
) -> list[Path]:
    """The files written: all steps in one picture where the path is one, else a picture a step in that folder."""
    from meshwright.report.arrays.ring import MAX_DEVICES, ring_figure
    from meshwright.report.figure import save

    chosen, leg = _drawable(kind), _only(legs)
    size = int(leg.size)
    if size > MAX_DEVICES:
        raise InputError(f"--frames shows at most {MAX_DEVICES} devices and the axis has {size}. Name a smaller one.")
    run = ring_run(chosen, size, wraps=bool(leg.wraps), two_way=two_way)
    shape = "a ring" if leg.wraps else "a line"
    title = f"{BOOK_NAMES[chosen]} on {shape} of {size}: {run.num_steps} steps"
    subtitle = f"{WORDS[chosen]}; {_ways(bool(leg.wraps), two_way)} ({cluster.short_name})."
    sums = chosen != "all_gather"
    if path.suffix.lower() in PICTURES:
        written = [save(ring_figure(run.frames, title=title, subtitle=subtitle, sums=sums), path)]
    else:
        path.mkdir(exist_ok=True)
        written = [
            save(ring_figure([frame], title=title, sums=sums), path / f"step-{frame.step:02}.png")
            for frame in run.frames
        ]
    say(f"wrote {written[0]}" if len(written) == 1 else f"wrote {len(written)} pictures to {path}")
    return written


def _drawable(kind: CollectiveKind | None) -> RingKind:
    for one in RING_KINDS:
        if one == kind:
            return one
    raise InputError(
        f"--frames draws one collective: give --collective {', '.join(RING_KINDS[:-1])} or {RING_KINDS[-1]}."
    )


def _only(legs: tuple[Leg, ...]) -> Leg:
    if len(legs) != 1 or legs[0].level != "ici":
        raise InputError("--frames draws one torus axis, hop by hop. Name one --axis of a torus, such as x of v5e:4x4.")
    return legs[0]


def _ways(wraps: bool, two_way: bool) -> str:
    if not wraps:
        return "both directions of each link are used"
    return "both ways round" if two_way else "one way round"


def ring_run(kind: RingKind, size: int, *, wraps: bool, two_way: bool) -> RingRun:
    """The collective on whole numbers, one row a block."""
    import numpy as np

    rows = 1 if kind == "all_gather" else size
    blocks = [np.arange(rows) + 100 * device for device in range(size)]
    return run_ring(kind, blocks, wraps=wraps, two_way=two_way)
