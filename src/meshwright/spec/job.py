"""A job: the work of one step, before any sharding."""

from typing import Literal, get_args

from meshwright.core.errors import InputError, require_known
from meshwright.core.fields import LARGEST, Checked
from meshwright.core.units import counted, format_count, parse_count
from meshwright.spec.strategy import MAX_SEQUENCES

OptimizerKind = Literal["adamw", "adafactor", "lion", "muon"]
OPTIMIZERS: tuple[OptimizerKind, ...] = get_args(OptimizerKind)

JobKind = Literal["train", "prefill", "decode"]
JOB_KINDS: tuple[str, ...] = get_args(JobKind)


class Job(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The work of one step on ``batch_seqs`` sequences.

    A step of kind "train" trains on ``seq_len`` tokens of each, and updates the weights by the ``optimizer``; all steps
    together train on ``train_tokens``. ``weights`` is the folder with the weights before the first step, "" for random
    ones. "prefill" runs prompts of ``seq_len`` tokens and leaves their keys and values in a cache. "decode" runs one
    more token of each sequence against a cache of ``seq_len`` positions.
    """

    kind: str = "train"
    batch_seqs: int
    seq_len: int
    train_tokens: int | None = None
    optimizer: str = "adamw"
    weights: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known("job.kind", self.kind, JOB_KINDS)
        if self.kind != "train" and self.train_tokens is not None:
            raise InputError(f"job.train_tokens is for jobs of kind train. Leave it out of a job of kind {self.kind}.")
        require_known("job.optimizer", self.optimizer, OPTIMIZERS)
        for name in ("batch_seqs", "seq_len"):
            if not 1 <= getattr(self, name) <= MAX_SEQUENCES:
                raise InputError(f"job.{name}={getattr(self, name)} must be between 1 and {MAX_SEQUENCES}.")

    @property
    def trains(self) -> bool:
        """True if a step has a backward pass and an update."""
        return self.kind == "train"

    @property
    def has_prompts(self) -> bool:
        """True for kind "prefill": a step runs whole prompts."""
        return self.kind == "prefill"

    @property
    def step_len(self) -> int:
        """Positions of each sequence that one step runs."""
        return 1 if self.kind == "decode" else self.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step runs in all sequences."""
        return self.batch_seqs * self.step_len


def require_training(job: Job, verb: str) -> None:
    """Raises InputError if the job is not training and ``verb`` takes training only."""
    if not job.trains:
        raise InputError(
            f"{verb} takes jobs of kind train, but this job is of kind {job.kind}. `verify` and `profile` take it with "
            f"--step {job.kind}, and `meshwright.cost.train_step.price_strategy` prices it."
        )


def optimizer_words(job: Job) -> str:
    """Returns ", optimizer lion" for a training job with another optimizer than AdamW, else the empty text."""
    return f", optimizer {job.optimizer}" if job.trains and job.optimizer != "adamw" else ""


def parse_batch(text: str, *, seq_len: int) -> int:
    """Returns the sequences per step from ``"4Mi"`` (tokens) or ``"1024seq"``.

    Raises InputError if the tokens are not a whole number of sequences, and names a near batch that is.
    """
    if seq_len < 1:
        raise InputError(f"seq={seq_len} must be at least 1 token.")
    if text.strip().endswith("seq"):
        return parse_count(text.strip().removesuffix("seq"), what="batch", least=1, most=LARGEST)
    tokens = parse_count(text, what="batch", least=1, most=LARGEST)
    if tokens > MAX_SEQUENCES * seq_len:
        raise InputError(f"batch {text} is {tokens:.3g} tokens. Give at most {MAX_SEQUENCES} sequences of {seq_len}.")
    if tokens < seq_len:
        raise InputError(
            f"batch {text} is {tokens} tokens, less than one sequence of {seq_len}. Use at least {seq_len} tokens."
        )
    if tokens % seq_len:
        # the power of two of sequences within 10%, else the nearest whole number
        exact_seqs = tokens / seq_len
        power = 1 << round(exact_seqs).bit_length()
        powers = (n for n in (power // 2, power) if abs(n / exact_seqs - 1) <= 0.1)
        seqs = next(powers, max(1, round(exact_seqs)))
        label = format_count(seqs * seq_len).replace(" ", "")
        exact = parse_count(label, what="batch", most=LARGEST) == seqs * seq_len
        advice = f"{label} ({counted(seqs, 'sequence')})" if exact else f"{seqs}seq ({seqs * seq_len:,} tokens)"
        raise InputError(
            f"batch {text} is {tokens} tokens, not a whole number of sequences of {seq_len} "
            f"({tokens // seq_len}, remainder {tokens % seq_len}). Use {advice}."
        )
    return tokens // seq_len
