"""A job: what is to be done, before anything is split."""

from typing import Literal, get_args

import msgspec

from meshwright.core.errors import InputError, nearest
from meshwright.core.units import format_count, parse_count
from meshwright.spec.strategy import MAX_SEQUENCES

OptimizerKind = Literal["adamw", "adafactor", "lion", "muon"]
OPTIMIZERS: tuple[OptimizerKind, ...] = get_args(OptimizerKind)


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training job: ``batch_seqs`` sequences of ``seq_len`` tokens a step, ``train_tokens`` in all; the ``optimizer``
    that updates the weights."""

    kind: str = "train"
    batch_seqs: int
    seq_len: int
    train_tokens: int | None = None
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        if self.kind != "train":
            raise InputError(f"job.kind {self.kind!r} is not known. This version plans 'train'.")
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"job.optimizer {self.optimizer!r} is not known.{nearest(self.optimizer, OPTIMIZERS)}")
        for name in ("batch_seqs", "seq_len"):
            if not 1 <= getattr(self, name) <= MAX_SEQUENCES:
                raise InputError(f"job.{name}={getattr(self, name)} must be between 1 and {MAX_SEQUENCES}.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.batch_seqs * self.seq_len


def parse_batch(text: str, *, seq_len: int) -> int:
    """Sequences per step from ``"4Mi"`` (tokens) or ``"1024seq"``.

    Raises InputError when the tokens are not a whole number of sequences, naming the nearest that are.
    """
    if seq_len < 1:
        raise InputError(f"seq={seq_len} must be at least 1 token.")
    if text.strip().endswith("seq"):
        return parse_count(text.strip().removesuffix("seq"), what="batch")
    tokens = parse_count(text, what="batch")
    if tokens < seq_len:
        raise InputError(
            f"batch {text} is {tokens} tokens, less than one sequence of {seq_len}. Use at least {seq_len} tokens."
        )
    if tokens % seq_len:
        near = _nearest_batch(tokens, seq_len)
        short = format_count(near * seq_len).replace(" ", "")
        exact = parse_count(short, what="batch") == near * seq_len
        advice = f"{short} ({near} sequences)" if exact else f"{near}seq ({near * seq_len:,} tokens)"
        raise InputError(
            f"batch {text} is {tokens} tokens, not a whole number of sequences of {seq_len} "
            f"({tokens / seq_len:.2f}). Use {advice}."
        )
    return tokens // seq_len


def _nearest_batch(tokens: int, seq_len: int) -> int:
    """The power of two of sequences within 10%, else the nearest whole number."""
    exact = tokens / seq_len
    power = 1 << round(exact).bit_length()
    for candidate in (power // 2, power):
        if abs(candidate / exact - 1) <= 0.1:
            return candidate
    return max(1, round(exact))
