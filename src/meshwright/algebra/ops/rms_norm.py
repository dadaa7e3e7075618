"""RMS norm of each row, and the rules that norms share: a row is reduced over the dim of the scale."""

from functools import partial

from meshwright.algebra.kinds import OpKind, StepKind, row_stream
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.tape import Tape, require_whole


def forward(tape: Tape) -> None:
    """Normalises ``kind(x, scale)`` or ``kind(x, scale, bias)`` in the sharding of the row."""
    x, *vectors = tape.inputs
    for dim in vectors[0].dims:
        require_whole(x, dim, tape.op.kind)
    whole_vectors = [tape.move(vector, _whole(vector)) for vector in vectors]
    local_out = tape.out.like(x)
    tape.run(tape.op.kind, (x, *whole_vectors), local_out)
    tape.move(local_out, tape.out)


def backward(tape: Tape) -> None:
    """Makes the cotangents of the rows and of the vectors; those of vectors are sums over the device's rows."""
    x, scale, *_ = tape.inputs
    dx, *dvectors = tape.dinputs
    vector_sums = [_whole(d).replace(unreduced=x.spread) for d in dvectors]
    tape.run_backward((x, _whole(scale)), zip(tape.op.inputs, (dx, *vector_sums), strict=True))


def _whole(vector: ShardedArray) -> ShardedArray:
    return vector.resharded(dict.fromkeys(vector.dims, ()))


def norm(name: str) -> OpKind:
    """Returns the kind of a norm under its name."""
    return OpKind(
        forward=forward,
        backward=backward,
        steps={
            name: StepKind(hbm_bytes=row_stream, group="normalisation"),
            f"{name}_backward": StepKind(hbm_bytes=partial(row_stream, rows=2), group="normalisation"),
        },
    )


OP = norm("rms_norm")
