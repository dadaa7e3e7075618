"""Settings of a training run, and the optimizer they describe."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import optax

from meshwright.core.errors import InputError, nearest
from meshwright.nn.weights import rows
from meshwright.spec.model import Model

PYDOC = "pydoc"
"""The name of the default text: the topics of Python's own documentation."""


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run does besides its model, strategy and job.

    ``data`` is "pydoc", a text file or a folder of them. The learning rate rises over ``warmup_steps`` and
    falls on a cosine to ``min_learning_rate_ratio`` of its peak at the last step. Gradients are scaled down to
    ``max_grad_norm``. ``log_every`` spaces the plain lines written where there is no terminal.
    """

    steps: int = 100
    seed: int = 0
    data: str = PYDOC
    learning_rate: float = 3e-3
    warmup_steps: int = 10
    min_learning_rate_ratio: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    log_every: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "log_every"):
            if getattr(self, name) < 1:
                raise InputError(f"train.{name}={getattr(self, name)} must be at least 1.")
        for name in ("seed", "warmup_steps", "weight_decay", "min_learning_rate_ratio"):
            if not getattr(self, name) >= 0:
                raise InputError(f"train.{name}={getattr(self, name)} must not be negative.")
        if self.seed >= 2**31:
            raise InputError(f"train.seed={self.seed} must be less than 2**31 = {2**31}.")
        for name in ("learning_rate", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"train.{name}={getattr(self, name)} must be a number above 0.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"train.{name}={getattr(self, name)} must be at least 0 and less than 1.")


def settings_from_table(table: Mapping[str, Any]) -> TrainSettings:
    """Settings from keys and values such as a ``[train]`` table; keys left out have their default.

    Raises InputError that names an unknown key with the nearest known one, or a value of the wrong type.
    """
    for key in table:
        if key not in TrainSettings.__struct_fields__:
            raise InputError(f"train.{key} is not a setting.{nearest(key, TrainSettings.__struct_fields__)}")
    try:
        return msgspec.convert(dict(table), TrainSettings)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise InputError(str(cause) if isinstance(cause, InputError) else _in_words(error)) from None


def _in_words(error: msgspec.ValidationError) -> str:
    """``train.steps: expected `int`, got `str`.`` from msgspec's message with a path."""
    text, _, path = str(error).partition(" - at `$.")
    return f"train.{path.rstrip('`')}: {text[0].lower()}{text[1:]}."


def learning_rate(settings: TrainSettings) -> optax.Schedule:
    """The rate of update number ``count`` (from 0): linear warmup to the peak, then a cosine."""
    rest = max(1, settings.steps - settings.warmup_steps)
    cosine = optax.cosine_decay_schedule(settings.learning_rate, rest, alpha=settings.min_learning_rate_ratio)
    if settings.warmup_steps == 0:
        return cosine
    # The first update counts too: a rate of 0 would waste its step.
    first = settings.learning_rate / settings.warmup_steps
    warmup = optax.linear_schedule(first, settings.learning_rate, max(1, settings.warmup_steps - 1))
    return optax.join_schedules([warmup, cosine], [settings.warmup_steps])


def make_optimizer(model: Model, settings: TrainSettings) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, 2019) with float32 moments; only matrices decay, norms do not."""
    decays = {name: weight.kind == "matrix" for name, weight in rows(model).items()}
    adamw = optax.adamw(
        learning_rate(settings),
        b1=settings.beta1,
        b2=settings.beta2,
        weight_decay=settings.weight_decay,
        mask=decays,
    )
    return in_float32(adamw)


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer computing, and keeping its moments, in float32 whatever the dtype of the weights."""

    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda a: a.astype(jnp.float32), tree)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(widen(grads), state, widen(params))
        return jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params), state

    return optax.GradientTransformation(lambda params: inner.init(widen(params)), update)
