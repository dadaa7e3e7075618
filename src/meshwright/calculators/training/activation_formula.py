"""The closed form of activation memory: s b h (34 + 5 a s / h) a layer, with tensor and sequence parallelism.

It counts one layer of a GPT: full heads, F = 4 D without a gate, dropout with one-byte masks, 16-bit results, attention
scores in memory. Plans count activations from the derived steps (`cost.memory`), for any program; this is the published
formula beside that count. Source: Korthikanti et al., Reducing Activation Recomputation (2022), equations 1-4, table 2.
"""

from typing import Literal

import msgspec

from meshwright.core.errors import InputError
from meshwright.cost.formulas.training_budget import Number
from meshwright.spec.model import Model

Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


class LayerActivations(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one layer keeps for its backward pass on one device, and the same in units of s b h."""

    recompute: Recompute
    tensor: int
    sequence_parallel: bool
    num_bytes: float
    per_sbh: float


def attention_term(num_heads: Number, seq_len: Number, d_model: Number) -> Number:
    """Returns 5 a s / h: scores, their softmax and its dropout, in units of s b h. 80 for GPT-3 at 2048 positions."""
    return 5 * num_heads * seq_len / d_model


def layer_units(
    attention: Number, *, tensor: Number = 1, sequence_parallel: bool = False, recompute: Recompute = "none"
) -> Number:
    """Returns bytes of a layer in units of s b h.

    none: 10 + 24/t + 5as/(ht), or (34 + 5as/h)/t with sequence parallelism, which splits the norms, dropouts and
    inputs (the 10) as well; selective drops attention's own term; full keeps the layer's input, 2.
    """
    if recompute not in RECOMPUTES:
        raise InputError(f"recompute {recompute!r} is not known. Use none, selective or full.")
    if recompute == "full":
        return 2 / tensor if sequence_parallel else 2
    whole = 10 / tensor if sequence_parallel else 10
    kept = attention / tensor if recompute == "none" else 0
    return whole + 24 / tensor + kept


def layer_activations(
    model: Model,
    *,
    seq_len: int,
    microbatch_seqs: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> LayerActivations:
    """Returns the closed form for a model's D and N; its gates, kv heads and feed-forward width do not enter."""
    units = layer_units(
        attention_term(model.num_heads, seq_len, model.d_model),
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    return LayerActivations(
        recompute=recompute,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        num_bytes=units * seq_len * microbatch_seqs * model.d_model,
        per_sbh=units,
    )
