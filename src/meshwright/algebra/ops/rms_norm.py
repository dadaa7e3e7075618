"""RMS norm of each row, and the rules that norms share: a row is reduced over the dim of the scale."""

from meshwright.algebra.einsum import reshard
from meshwright.algebra.kinds import OpKind, StepKind, row_stream, row_stream_backward
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import Op
from meshwright.algebra.trace import Trace, like, local, moved, require_whole


def forward(op: Op, trace: Trace) -> None:
    """``kind(x, scale)`` or ``kind(x, scale, bias)`` in the sharding of the row."""
    x, *vectors, out = (trace.declared(n) for n in (*op.inputs, op.out))
    for dim in vectors[0].dims:
        require_whole(x, dim, op.kind)
    whole = tuple(moved(trace, v, _whole(v)) for v in vectors)
    trace.add(local(op.kind, (x, *whole), like(out, x)), *reshard(like(out, x), out))


def backward(op: Op, trace: Trace) -> None:
    """Cotangents of the row and, summed over every row of the device, of the vectors."""
    x, scale = (trace.declared(n) for n in op.inputs[:2])
    dx, *dvectors = (trace.cotangent(n) for n in op.inputs)
    sums = [_whole(d).replace(unreduced=x.spread) for d in dvectors]
    trace.need(x, _whole(scale))
    trace.add(local(f"{op.kind}_backward", (trace.cotangent(op.out), x, _whole(scale)), dx, *sums))
    for name, array in zip(op.inputs, (dx, *sums), strict=True):
        trace.contribute(name, array)


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
