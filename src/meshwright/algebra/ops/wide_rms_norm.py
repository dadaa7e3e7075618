"""RMS norm over all dims of its scale, any of which may be split: sums over a row are reduced between devices."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Adds the steps that sum squares over a device's part of a row, reduce the sums, and normalise the part."""
    x, scale = tape.inputs
    sums = _sums(tape, "squares")
    tape.run("sum_squares", (x,), sums)
    whole_sums = tape.move(sums, sums.replace(unreduced=()))
    local_out = tape.out.like(x)
    tape.run("wide_rms_norm", (x, tape.move(scale, _scale(x, scale)), whole_sums), local_out)
    tape.move(local_out, tape.out)


def backward(tape: Tape) -> None:
    """Adds the steps that sum cotangent x scale x input over each row, reduce it, and make the part's cotangents."""
    x, scale = tape.inputs
    dx, dscale = tape.dinputs
    square_sums, along_sums = _sums(tape, "squares").replace(unreduced=()), _sums(tape, "along")
    dout, scale_part = tape.move(tape.dout, tape.dout.like(x)), _scale(x, scale)
    tape.run("wide_rms_norm_along", (dout, x, scale_part), along_sums)
    whole_along_sums = tape.move(along_sums, along_sums.replace(unreduced=()))
    row_axes = tuple(axis for axis in x.spread if axis not in scale_part.spread)
    dscale = dscale.like(scale_part).replace(unreduced=row_axes)
    cotangents = zip(tape.op.inputs, (dx.like(x), dscale), strict=True)
    tape.run_backward((x, scale_part, square_sums, whole_along_sums), cotangents, dout=dout)


def _scale(x: ShardedArray, scale: ShardedArray) -> ShardedArray:
    """Returns the scale, split as the row is."""
    return scale.resharded({dim: x.axes_of(dim) for dim in scale.dims})


def _sums(tape: Tape, name: str) -> ShardedArray:
    """Returns the sums over a device's part of each row."""
    x, scale = tape.inputs
    row_dims = tuple(dim for dim in x.dims if dim not in scale.dims)
    axes = tuple(axis for dim in scale.dims for axis in x.axes_of(dim))
    return ShardedArray(f"{tape.out.name}_{name}", row_dims, tuple(x.axes_of(dim) for dim in row_dims), axes, "fp32")


_NORM = StepKind(group="normalisation")

OP = OpKind(
    forward=forward,
    backward=backward,
    steps=dict.fromkeys(("sum_squares", "wide_rms_norm", "wide_rms_norm_along", "wide_rms_norm_backward"), _NORM),
)
