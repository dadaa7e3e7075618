"""RMS norm of each row, and the rules that norms share: a row is reduced over the dim of the scale."""

from meshwright.algebra.kinds import OpKind, StepKind, row_stream, row_stream_backward
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.trace import Trace, require_whole


def forward(trace: Trace) -> None:
    """``kind(x, scale)`` or ``kind(x, scale, bias)`` in the sharding of the row."""
    x, *vectors = trace.inputs
    for dim in vectors[0].dims:
        require_whole(x, dim, trace.op.kind)
    whole = [trace.move(vector, _whole(vector)) for vector in vectors]
    here = trace.out.like(x)
    trace.run(trace.op.kind, (x, *whole), here)
    trace.move(here, trace.out)


def backward(trace: Trace) -> None:
    """Cotangents of the row and, summed over every row of the device, of the vectors."""
    x, scale, *_ = trace.inputs
    dx, *dvectors = trace.dinputs
    sums = [_whole(d).replace(unreduced=x.spread) for d in dvectors]
    trace.run_backward((x, _whole(scale)), zip(trace.op.inputs, (dx, *sums), strict=True))


def _whole(vector: ShardedArray) -> ShardedArray:
    return vector.resharded(dict.fromkeys(vector.dims, ()))


def norm(name: str) -> OpKind:
    """The kind of a norm under its name."""
    return OpKind(
        forward=forward,
        backward=backward,
        steps={
            name: StepKind(hbm_bytes=row_stream, group="normalisation"),
            f"{name}_backward": StepKind(hbm_bytes=row_stream_backward, group="normalisation"),
        },
    )


OP = norm("rms_norm")
