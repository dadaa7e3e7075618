"""Settings of a training run: plain data, validated on creation."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.algebra.layers import ProgramOptions
from meshwright.core.errors import InputError
from meshwright.core.fields import Checked, convert_fields
from meshwright.nn.hf.tokenizer import TOKENIZER
from meshwright.spec.hf.gguf import is_gguf
from meshwright.spec.job import OptimizerKind
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy
from meshwright.spec.weights import has_frozen_matrices

PYDOC = "pydoc"
"""The name of the default text: the topics of Python's own documentation."""

ScheduleKind = Literal["cosine", "linear", "constant", "wsd", "rsqrt"]
Rounding = Literal["nearest", "stochastic"]
LossOn = Literal["completion", "assistant", "all"]
BadLoss = Literal["stop", "skip", "rollback"]
TrackerKind = Literal["tensorboard", "wandb"]

_NOT_NEGATIVE = (
    *("seed", "warmup_steps", "weight_decay", "min_learning_rate_ratio", "z_loss", "balance_loss", "router_z_loss"),
    *(
        "correction_rate",
        "checkpoint_every",
        "keep_every",
        "local_every",
        "evaluate_every",
        "compare_every",
        "loss_spike",
    ),
)
_BOUNDS: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (("steps", "log_every", "keep_checkpoints", "evaluate_batches"), lambda n: n >= 1, "be at least 1"),
    (_NOT_NEGATIVE, lambda n: 0 <= n < math.inf, "not be negative"),
    (("seed",), lambda n: n < 2**31, f"be less than 2**31 = {2**31}"),
    (("learning_rate", "max_grad_norm", "epsilon", "outer_rate"), lambda n: 0 < n < math.inf, "be a number above 0"),
    (
        ("beta1", "beta2", "momentum", "average", "held_out", "outer_momentum"),
        lambda n: 0 <= n < 1,
        "be at least 0 and less than 1",
    ),
    (("decay_fraction",), lambda n: 0 < n <= 1, "be above 0 and at most 1"),
    (("noise_density",), lambda n: 0 < n < 1, "be above 0 and less than 1"),
    (("mean_span",), lambda n: 1 <= n < math.inf, "be at least 1"),
)
"""Names of settings, the test of a value, and the words of its error."""


class TrainSettings(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choices of a run besides its model, strategy and job.

    ``weights`` is a folder of weights to start from, "" for random ones of ``seed``.

    Data: ``data`` is "pydoc", a file, a folder of files, or several of these with their shares of the samples,
    "a.jsonl:0.7,b.parquet:0.3". ``tokenizer`` is a tokenizer's file; "" takes that of the ``weights``, or without
    weights trains one on the text. With ``packing`` no attention crosses from one document into the next, and every
    token is in at most one row. Without it rows are cut blindly, for which GPUs have a faster attention.
    ``skip_bad_records`` leaves out records that cannot be read, and counts them. ``held_out`` is the share of tokens
    for evaluation only. Records that are chats (``messages``), or a ``prompt`` and its ``completion``, stay whole: a
    row has as many as fit, or one without ``packing``, and a longer record is cut. ``loss_on`` says which of their
    tokens are predicted: "completion": completions, and all tokens of chats without one; "assistant": only what the
    assistant says, by the template's ``{% generation %}``; or "all". An encoder reads the ``source`` of a record, or
    its prompt, and the decoder predicts the ``target``, or completion. Of text it reads all but spans of noise, which
    the decoder predicts: ``noise_density`` of the tokens in spans of ``mean_span`` on average.

    Rate: it rises over ``warmup_steps`` to ``learning_rate``, then follows ``schedule`` towards
    ``min_learning_rate_ratio`` of that, one update after the last; "wsd" stays at the peak and falls
    over the last ``decay_fraction`` of the steps ("rsqrt" and "constant" use neither).

    Update: ``beta1`` and ``beta2`` are decays of the moments of AdamW and Lion (with Muon, of the weights that AdamW
    updates), ``momentum`` is the decay of Muon's. ``epsilon`` is AdamW's. Adafactor multiplies the rate by the RMS of
    each matrix: 1e-2 is usual; Lion needs about a tenth of AdamW's rate. ``weight_decay`` applies to matrices only.
    Larger gradients are scaled down to ``max_grad_norm``. ``rounding`` is for two-byte weights without a float32 copy.
    ``average`` is the decay of the weights' running mean, 0 for none. ``z_loss`` weighs the squared log-sum of the
    logits, ``balance_loss`` the load balance of experts, ``router_z_loss`` the squared log-sum of a router's scores.
    ``correction_rate`` moves the correction of DeepSeek-V3's routers towards equal load after each step (the paper:
    0.001). ``outer_rate`` and ``outer_momentum`` are of the outer optimizer of islands (DiLoCo: Nesterov's momentum).

    Run: a checkpoint is written every ``checkpoint_every`` steps (0: only at the end). The newest
    ``keep_checkpoints`` stay, and all at multiples of ``keep_every`` (0: none). A checkpoint without digests is not
    read, except with ``trust_checkpoints``. Every ``local_every`` steps the state is also written to
    ``local_folder``, a disk or memory (/dev/shm) that all processes of an island share: a restart reads the newer
    state, and the end of the run removes the folder's. Evaluation is on at most ``evaluate_batches`` batches
    every ``evaluate_every`` steps (0: only at the end). Islands compare the bits of their states every
    ``compare_every`` steps (0: never): an island that differs copies the majority's state; without a majority
    all go back to the newest checkpoint. ``on_bad_loss`` is the reaction to a loss or gradient that is not finite:
    "stop", "skip" (no update) or "rollback" (to the newest checkpoint, continuing with the data after the bad
    step). With ``loss_spike`` a loss more than that many standard deviations above the mean of 50 steps is bad too; it
    is noticed after the update, so "skip" is refused. ``log_every`` is the number of steps between plain lines without
    a terminal; ``track`` names services that get the metrics too.
    """

    steps: int = 100
    seed: int = 0
    weights: str = ""
    data: str = PYDOC
    tokenizer: str = ""
    packing: bool = True
    loss_on: LossOn = "completion"
    skip_bad_records: bool = False
    noise_density: float = 0.15
    mean_span: float = 3.0
    held_out: float = 0.05
    learning_rate: float = 3e-3
    schedule: ScheduleKind = "cosine"
    warmup_steps: int = 10
    min_learning_rate_ratio: float = 0.1
    decay_fraction: float = 0.2
    optimizer: OptimizerKind = "adamw"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.95
    max_grad_norm: float = 1.0
    rounding: Rounding = "nearest"
    average: float = 0.0
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    z_loss: float = 0.0
    balance_loss: float = 0.01
    router_z_loss: float = 0.0
    correction_rate: float = 0.0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    keep_every: int = 0
    local_every: int = 0
    local_folder: str = ""
    compare_every: int = 50
    on_bad_loss: BadLoss = "stop"
    loss_spike: float = 0.0
    trust_checkpoints: bool = False
    evaluate_every: int = 0
    evaluate_batches: int = 16
    log_every: int = 10
    track: tuple[TrackerKind, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for names, is_allowed, demand_text in _BOUNDS:
            for name in names:
                if not is_allowed(getattr(self, name)):
                    raise InputError(f"train.{name}={getattr(self, name)} must {demand_text}.")
        if bool(self.local_every) != bool(self.local_folder):
            raise InputError("train.local_every and train.local_folder go together. Set both, or none.")
        if self.loss_spike and self.on_bad_loss == "skip":
            raise InputError("train.loss_spike is noticed after the update. Use on_bad_loss=stop or rollback with it.")


FULL_RATE, ADAPTER_RATE = 2e-5, 2e-4
"""Default learning rates to fine-tune all weights (TRL 1.16, torchtune's llama3_1/8B_full), and adapters
(Axolotl's llama-3/lora-8b). The default in `TrainSettings` is for random weights."""


def fine_tuning_rate(model: Model) -> float:
    """Returns the default learning rate to fine-tune a model: for adapters if its matrices are frozen."""
    return ADAPTER_RATE if has_frozen_matrices(model) else FULL_RATE


def data_sources(data: str) -> dict[str, float]:
    """Returns the share of each source that ``data`` names: "FILE" or "FILE:0.7,FILE:0.3"; 1 where it says none.

    A file whose name has a comma is one source. Raises InputError for a share that is not above 0.
    """
    share_by_name: dict[str, float] = {}
    for part in [data] if Path(data).expanduser().exists() else data.split(","):
        name, colon, share_text = part.strip().rpartition(":")
        try:
            fraction = float(share_text) if colon else 1.0
        except ValueError:
            name, fraction = part.strip(), 1.0
        name = name if colon else share_text
        if name in share_by_name or not 0 < fraction < math.inf:
            raise InputError(f"train.data {data!r} names a source twice or with a share that is not above 0: {part!r}.")
        share_by_name[name] = fraction
    return share_by_name


def with_whole_paths(settings: TrainSettings) -> TrainSettings:
    """Returns the settings with absolute paths, and with the tokenizer of the weights if no other is given.

    Raises InputError for weights without a tokenizer: one trained on other text would number tokens differently.
    """

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute()) if path else path

    sources = {PYDOC if name == PYDOC else absolute(name): share for name, share in data_sources(settings.data).items()}
    data_text = ",".join(f"{name}:{share:g}" if len(sources) > 1 else name for name, share in sources.items())
    weights_path, tokenizer_path = absolute(settings.weights), absolute(settings.tokenizer)
    local_path = absolute(settings.local_folder)
    if weights_path and not tokenizer_path:
        tokenizer_path = weights_path if is_gguf(Path(weights_path)) else str(Path(weights_path) / TOKENIZER)
        if tokenizer_path != weights_path and Path(weights_path).is_dir() and not Path(tokenizer_path).is_file():
            raise InputError(
                f"{weights_path} has weights and no {TOKENIZER}. Name the one they were trained with, --set "
                f"train.tokenizer=FILE, or start without weights: --from-scratch."
            )
    paths = {"weights": weights_path, "tokenizer": tokenizer_path, "local_folder": local_path}
    return msgspec.structs.replace(settings, data=data_text, **paths)


def settings_from_table(table: Mapping[str, Any]) -> TrainSettings:
    """Returns settings from keys and values, such as a ``[train]`` table; missing keys have their defaults.

    ``track`` may be one text, "tensorboard,wandb". Raises InputError that names unknown keys, with the nearest known
    ones, and values of the wrong type.
    """
    values = dict(table)
    for key in values.keys() - {*TrainSettings.__struct_fields__}:
        if key in Strategy.__struct_fields__:
            raise InputError(f"train.{key} is not a field. It is strategy.{key}.")
    if isinstance(values.get("track"), str):
        values["track"] = [word.strip() for word in values["track"].split(",") if word.strip()]
    return convert_fields(values, TrainSettings, section="train")


def program_options(
    settings: TrainSettings, strategy: Strategy, *, several_documents: bool, is_padded: bool = False
) -> ProgramOptions:
    """Returns the options of the model's program. With one document per row attention needs no document numbers, and
    with full rows of an encoder no lengths."""
    setting_names = ("z_loss", "balance_loss", "router_z_loss", "correction_rate")
    return ProgramOptions(
        documents=settings.packing and several_documents,
        encoder_lengths=is_padded,
        capacity_factor=strategy.capacity_factor,
        **{name: getattr(settings, name) for name in setting_names},
    )
