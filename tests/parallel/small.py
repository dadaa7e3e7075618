"""One small llama, one global batch and one strategy maker for the tests of this folder and of `verify`."""

from collections.abc import Iterator, Mapping
from fractions import Fraction

import jax.numpy as jnp
import numpy as np

from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh

MODEL = Model(
    name="small",
    family="llama",
    num_layers=2,
    d_model=32,
    d_ff=64,
    num_heads=8,
    num_kv_heads=8,
    head_dim=4,
    vocab_size=64,
)
BATCH_SEQS, SEQ_LEN = 8, 16
POLICIES = ("block", "none", "matmuls", "selective", "full")


def mean_slots(model, num_microbatches=1):
    """Filled slots of an expert in the mean, exactly; 0 for a dense model."""
    tokens = BATCH_SEQS * SEQ_LEN // num_microbatches
    return Fraction(tokens * model.experts_per_token, model.num_experts) if model.num_experts else 0


def batch() -> dict[str, jnp.ndarray]:
    rows = np.random.default_rng(0).integers(0, MODEL.vocab_size, (BATCH_SEQS, SEQ_LEN + 1)).astype(np.int32)
    return {"tokens": jnp.asarray(rows[:, :-1]), "labels": jnp.asarray(rows[:, 1:])}


def strategy(axes: Mapping[str, int], *, remat: str = "block", num_microbatches: int = 1) -> Strategy:
    """Of two microbatches the first is no loop: XLA writes it out beside the second, and shares gathers between them.
    So that loops stay loops, their sums wait for the end."""
    sync = "naive" if num_microbatches == 2 else "overlapped"
    return Strategy(
        mesh=make_mesh(axes), remat=remat, num_microbatches=num_microbatches, state="fp32", gradient_sync=sync
    )


def meshes_of_eight() -> Iterator[dict[str, int]]:
    """All twenty ways to lay 8 devices on data x fsdp x context x tensor."""
    powers = (1, 2, 4, 8)
    for data in powers:
        for fsdp in powers:
            for context in powers:
                tensor = 8 // (data * fsdp * context) if 8 % (data * fsdp * context) == 0 else 0
                if tensor:
                    yield {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
