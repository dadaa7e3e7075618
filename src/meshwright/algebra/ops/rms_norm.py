"""RMS norm of each row, and the rules that norms share: a row is reduced over its last dim, which is the last of the
scale; a scale with more dims, [N, H], has a separate row for each head."""

from functools import partial

from meshwright.algebra.kinds import OpKind, StepKind, row_stream
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.tape import Tape, require_whole


def forward(tape: Tape) -> None:
    """Adds the op ``kind(x, scale)`` or ``kind(x, scale, bias)`` in the sharding of the rows, each of them whole."""
    x, *vectors = tape.inputs
    require_whole(x, x.dims[-1], tape.op.kind)
    local_vectors = [tape.move(vector, _as_rows(vector, x)) for vector in vectors]
    local_out = tape.out.like(x)
    tape.run(tape.op.kind, (x, *local_vectors), local_out)
    tape.move(local_out, tape.out)


def backward(tape: Tape) -> None:
    """Adds the step for the cotangents of the rows, and of the vectors, which are sums over the device's rows."""
    x, scale, *_ = tape.inputs
    dx, *dvectors = tape.dinputs
    scale = _as_rows(scale, x)
    row_axes = tuple(axis for axis in x.spread if axis not in scale.spread)
    vector_sums = [_as_rows(d, x).replace(unreduced=row_axes) for d in dvectors]
    tape.run_backward((x, scale), zip(tape.op.inputs, (dx, *vector_sums), strict=True))


def _as_rows(vector: ShardedArray, x: ShardedArray) -> ShardedArray:
    """Returns a vector split as the rows are; the dim of a row is whole."""
    return vector.resharded({dim: x.axes_of(dim) for dim in vector.dims})


def norm(name: str) -> OpKind:
    """Returns the `OpKind` of a norm called ``name``."""
    return OpKind(
        forward=forward,
        backward=backward,
        steps={
            name: StepKind(hbm_bytes=row_stream, group="normalisation"),
            f"{name}_backward": StepKind(hbm_bytes=partial(row_stream, rows=2), group="normalisation"),
        },
    )


OP = norm("rms_norm")
