"""The loss curve of a run."""

import math
from collections.abc import Sequence

from meshwright.core.errors import InputError
from meshwright.report.figure import INK, MUTED, PALETTE, Spec, headline, si_scale, text_layers, themed

MEAN_FRACTION = 0.05


def loss_figure(
    losses: Sequence[float], tokens: Sequence[float], *, title: str = "Training loss", subtitle: str = ""
) -> Spec:
    """The loss of every step against the tokens seen until then; non-finite losses leave a gap.

    From 40 steps on, each step's loss is drawn pale under a mean centred on the step, over 5% of all steps.
    """
    if len(losses) != len(tokens) or not losses:
        raise InputError(f"{len(losses)} losses do not go with {len(tokens)} token counts. Give one of each per step.")
    scale, unit = si_scale(max(tokens), "")
    reach = int(len(losses) * MEAN_FRACTION / 2)
    lines = [("loss of a step", _finite(losses))]
    if reach > 0:
        lines.append((f"mean over {2 * reach + 1} steps", _centred_mean(losses, reach)))
    layers = [
        _line_layer(values, [count / scale for count in tokens], name=name, axis=unit, pale=name != lines[-1][0])
        for name, values in lines
    ]
    if math.isfinite(losses[-1]):
        layers += _end_layers(tokens[-1] / scale, losses[-1])
    color = {"scale": {"domain": [name for name, _ in lines], "range": [PALETTE[4], PALETTE[0]][-len(lines) :]}}
    for layer in layers[: len(lines)]:
        layer["encoding"]["color"] |= color
    return themed({"title": headline(title, subtitle), "width": 600, "height": 340, "layer": layers})


def _finite(losses: Sequence[float]) -> list[float | None]:
    # JSON has no NaN, and a diverged run should show where it broke.
    return [loss if math.isfinite(loss) else None for loss in losses]


def _centred_mean(losses: Sequence[float], reach: int) -> list[float | None]:
    """The mean over ``reach`` steps before and after each; the ends reach less far, alike on both sides.

    A mean over past steps alone would lie above a falling curve. None where a step within reach is not finite.
    """
    means = []
    for step in range(len(losses)):
        near = min(reach, step, len(losses) - 1 - step)
        window = losses[step - near : step + near + 1]
        means.append(math.fsum(window) / len(window) if all(map(math.isfinite, window)) else math.nan)
    return _finite(means)


def _line_layer(values: Sequence[float | None], tokens: Sequence[float], *, name: str, axis: str, pale: bool) -> Spec:
    rows = [{"tokens": x, "loss": y, "line": name} for x, y in zip(tokens, values, strict=True)]
    title = f"tokens ({axis})" if axis else "tokens"
    legend = {"title": None, "orient": "top-right", "symbolType": "stroke", "symbolStrokeWidth": 3}
    return {
        "data": {"values": rows},
        "mark": {
            "type": "line",
            "strokeWidth": 1.2 if pale else 2.4,
            "opacity": 0.8 if pale else 1.0,
            # A single step is a point, which a line alone would not show.
            "point": len(rows) == 1,
            "invalid": "break-paths-show-domains",
        },
        "encoding": {
            "x": {
                "field": "tokens",
                "type": "quantitative",
                "title": title,
                "axis": {"tickCount": 7},
                "scale": {"zero": True},
            },
            "y": {
                "field": "loss",
                "type": "quantitative",
                "title": "cross-entropy (nats per token)",
                "scale": {"zero": False},
                "axis": {"tickCount": 6},
            },
            "color": {"field": "line", "type": "nominal", "legend": legend},
        },
    }


def _end_layers(tokens: float, loss: float) -> list[Spec]:
    row = {"tokens": tokens, "loss": loss, "text": f"{loss:.3f}"}
    place = {"x": {"field": "tokens", "type": "quantitative"}, "y": {"field": "loss", "type": "quantitative"}}
    dot = {
        "data": {"values": [row]},
        "mark": {"type": "circle", "size": 60, "color": MUTED, "opacity": 1},
        "encoding": place,
    }
    text = {**place, "text": {"field": "text"}}
    return [dot, *text_layers([row], text, align="left", baseline="middle", dx=8, fill=INK)]
