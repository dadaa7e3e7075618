"""`meshwright transfer --frames`: a collective on the ring or line of an axis, drawn hop by hop."""

from pathlib import Path

from meshwright.algebra.steps import BOOK_NAMES
from meshwright.calculators.links.ring_steps import RING_KINDS, ring_frames
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

    chosen = next((one for one in RING_KINDS if one == kind), None)
    if chosen is None:
        kinds = f"{', '.join(RING_KINDS[:-1])} or {RING_KINDS[-1]}"
        raise InputError(f"--frames draws one collective: give --collective {kinds}.")
    if len(legs) != 1 or legs[0].level != "ici":
        raise InputError("--frames draws one torus axis, hop by hop. Name one --axis of a torus, such as x of v5e:4x4.")
    size, wraps = int(legs[0].size), bool(legs[0].wraps)
    if size > MAX_DEVICES:
        raise InputError(f"--frames shows at most {MAX_DEVICES} devices and the axis has {size}. Name a smaller one.")
    frames = ring_frames(chosen, size, wraps=wraps, two_way=two_way)
    title = f"{BOOK_NAMES[chosen]} on {'a ring' if wraps else 'a line'} of {size}: {len(frames) - 1} steps"
    if not wraps:
        used = "both directions of each link are used"
    else:
        used = "both ways round" if two_way else "one way round"
    subtitle = f"{WORDS[chosen]}; {used} ({cluster.short_name})."
    sums = chosen != "all_gather"
    if path.suffix.lower() in PICTURES:
        written = [save(ring_figure(frames, title=title, subtitle=subtitle, sums=sums), path)]
    else:
        path.mkdir(exist_ok=True)
        written = [
            save(ring_figure([frame], title=title, sums=sums), path / f"step-{frame.step:02}.png") for frame in frames
        ]
    say(f"wrote {written[0]}" if len(written) == 1 else f"wrote {len(written)} pictures to {path}")
    return written
