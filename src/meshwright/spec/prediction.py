"""The prediction of a training step, as plan files, records of runs and reports have it."""

from typing import Any, Generic, TypeVar

import msgspec

N = TypeVar("N")


def unmasked(reached: Any) -> float | None:
    """Returns ``reached.mfu_causal``, the MFU without masked scores, if ``reached.mfu`` is above 1; else None."""
    return reached.mfu_causal if reached.mfu is not None and reached.mfu > 1 else None


class Prediction(msgspec.Struct, Generic[N], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prediction of one training step; every number N may be an array with one entry per candidate.

    ``step_s_lower`` assumes perfect overlap of everything, ``step_s_upper`` none. The measured time of 8 in 10
    published steps was between ``step_s_p10`` and ``step_s_p90``, relative to ``step_s``; both are None for rates that
    are not fitted.

    ``flops`` is the number that all devices execute; ``hfu`` also counts attention's masked blocks, as ``mfu`` does.
    ``mfu_causal`` is the MFU without them (None in older plan files).
    ``memory`` is in bytes per chip. ``terms`` are seconds of each kind of work without overlap: matmul, attention,
    elementwise, loss_head, optimizer, a collective per group of mesh axes, latency. ``train_days`` and ``cost_usd``
    are for all tokens of the job, None if the tokens or the chip's price are not known.
    """

    step_s: N
    step_s_lower: N
    step_s_upper: N
    step_s_p10: N | None = None
    step_s_p90: N | None = None
    mfu: N
    hfu: N
    mfu_causal: N | None = None
    bound_by: str
    hbm_bytes_per_chip: N
    memory: dict[str, N]
    flops: N
    terms: dict[str, N] = {}
    train_days: float | None = None
    cost_usd: float | None = None

    def measured(self, step_s: float) -> dict[str, Any]:
        """Returns MFU, HFU and MFU without masked scores, by field name, if the step takes ``step_s`` when measured."""
        prediction: Prediction[Any] = self
        share_by_name = {"mfu": prediction.mfu, "hfu": prediction.hfu, "mfu_causal": prediction.mfu_causal}
        return {name: share and share * prediction.step_s / step_s for name, share in share_by_name.items()}
