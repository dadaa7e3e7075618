"""Draws who holds which slot of an engine when: a row per slot, a box per request and phase."""

from collections.abc import Mapping, Sequence

from meshwright.batching.spans import SlotSpan
from meshwright.core.errors import InputError
from meshwright.report.figure import Figure, alt, si_scale, themed
from meshwright.report.marks import color_by, plot, span, spans

COLORS = {"prefill": "#E69F00", "decode": "#009E73", "ended, held": "#999999"}
FREE = "#F0F0F0"
MAX_SPANS, MAX_SLOTS = 5_000, 128
WIDTH_PX = 900


def slots_figure(pools: Mapping[str, Sequence[SlotSpan]], *, title: str, subtitle: str = "") -> Figure:
    """Draws each pool's spans under its name, a row for every slot that is ever held, the request's number in each box
    that has room for it.

    Grey boxes are held by requests that have all their tokens; in pale ones a slot is free. Raises InputError if there
    are too many boxes to be seen.
    """
    every = [(name, one) for name, found in pools.items() for one in found]
    held = {(name, one.replica, one.slot) for name, one in every}
    if not 0 < len(every) <= MAX_SPANS or len(held) > MAX_SLOTS:
        raise InputError(
            f"{len(every):,} spans in {len(held):,} slots; a picture shows 1 to {MAX_SPANS:,} in at most {MAX_SLOTS} "
            f"slots. Simulate fewer seconds, a lower --rate, or smaller engines and batches."
        )
    scale, unit = si_scale(max(one.end_s for _, one in every), "s")
    end = max(one.end_s for _, one in every) / scale
    order = [key for name in pools for key in sorted(held) if key[0] == name]
    numbered = {name for name, replica, _ in held if replica}
    rows = {
        key: f"{key[0]}{f' {key[1] + 1}' * (key[0] in numbered)}, slot {key[2] + 1}" for key in order
    }  # fmt: skip
    boxes = []
    for name, one in every:
        what = "ended, held" if one.phase == "ended" else one.phase
        times = (one.start_s / scale, one.end_s / scale)
        row = rows[name, one.replica, one.slot]
        boxes.append(span(*times, str(one.request + 1), COLORS[what], WIDTH_PX / end, slot=row, what=what))
    row_px = 22 if len(order) <= 24 else 12 if len(order) <= 64 else 7
    names = [rows[key] for key in order]
    y = alt.Y("slot:O", sort=names, title=None, axis=alt.Axis(ticks=False, domain=False, labelOverlap=True))
    x = alt.X("start:Q", title=f"time ({unit})", scale=alt.Scale(domain=[0, end], nice=False))
    free = plot({"slot": name, "start": 0, "end": end} for name in names)
    shown = {name: color for name, color in COLORS.items() if any(box["what"] == name for box in boxes)}
    chart = alt.layer(
        free.mark_bar(height=alt.RelativeBandSize(band=0.88), color=FREE).encode(y=y, x=x, x2="end"),
        spans(boxes, y=y, x=x, color=color_by("what", shown, orient="bottom"), band=0.88, edge=0.6, font=10),
    )
    return themed(chart, title, subtitle, width=WIDTH_PX, height=row_px * len(order))
