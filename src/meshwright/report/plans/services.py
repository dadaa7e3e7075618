"""Services that nothing beats: tokens per second and chip over the time per output token, and what that time is."""

from collections.abc import Mapping

from meshwright.report.figure import INK, Figure, alt, panel, themed
from meshwright.report.labels import Frame, point_labels
from meshwright.report.marks import Points, check_positive, color_by, lines, log_axis, palette_of, plot, stroke_colors

SIZE_PX = (620, 340)
SPLIT_PX = (620, 240)
WHOLE = "time per output token"


def services_figure(
    curves: Mapping[str, Points],
    split: Mapping[str, Points],
    chosen: tuple[float, float, str],
    *,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draws a curve of (ms per token, tokens per second and chip) for each pair of dtypes, with the chosen point and
    its name, and below the parts of the time along the best of all curves, (ms per token, ms) each by itself.

    Parts overlap in time, so that they do not add up; those that take nothing are left out.
    """
    x, y, name = chosen
    check_positive((one, value) for one, points in curves.items() for point in points for value in point)
    across = [x, *(at for points in curves.values() for at, _ in points)]
    up = [y, *(at for points in curves.values() for _, at in points)]
    low, high = min(across), max(across)
    domain = (low / 1.05, high * 1.05)
    shared = log_axis(alt.X, "x", domain, WHOLE + " (ms)")
    tall = (min(up) / 1.5, max(up) * 1.5)
    made = log_axis(alt.Y, "y", tall, "output tokens per second and chip")
    drawn = {"strokeWidth": 2.4, "point": {"size": 28}}
    rows = [{"x": x, "y": y, "text": name}]
    first = plot(rows).mark_point(size=170, color=INK, strokeWidth=2.4, opacity=1).encode(x=shared, y=made)
    frame = Frame(x=domain, y=tall, size=SIZE_PX)
    taken = [box for points in curves.values() for box in (*frame.curve(points), *frame.dots(points, half=4))]
    label = point_labels(rows, frame, [*taken, *frame.dots([(x, y)], half=9)], fill=INK)
    legend = {"orient": "right", "symbolStrokeWidth": 3}
    above = lines(curves, shared, made, stroke_colors(curves, **legend), **drawn)
    shown = {WHOLE: [(at, at) for at in sorted({at for points in split.values() for at, _ in points})]}
    # a logarithmic axis has no zero: parts below a thousandth of the time are not seen
    kept = {part: [(at, s if s > at / 1000 else float("nan")) for at, s in points] for part, points in split.items()}
    shown |= {part: points for part, points in kept.items() if any(s == s for _, s in points)}
    least = min(s for points in shown.values() for _, s in points if s == s)
    parts = log_axis(alt.Y, "y", (least / 1.3, high * 1.3), "ms of each part by itself")
    colors = {WHOLE: INK, **palette_of(one for one in shown if one != WHOLE)}
    below = lines(shown, shared, parts, color_by("name", colors, symbolType="stroke", **legend), **drawn)
    panels = (panel(*above, first, label, size=SIZE_PX), panel(*below, size=SPLIT_PX))
    return themed(alt.concat(*panels, columns=1, spacing=28).resolve_scale(color="independent"), title, subtitle)
