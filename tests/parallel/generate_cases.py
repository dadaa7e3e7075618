"""Tiny models of every family, and one run of prompts with a cache beside the same rows without one."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from meshwright.algebra.generation.program import Storage, WeightDtype
from meshwright.algebra.generation.stored import quantised_weights
from meshwright.batching.limits import SchedulerLimits
from meshwright.nn.weights import Params, param_shapes
from meshwright.parallel.generation.packed_step import PackedRows, PackedShape, PackedStep, slots_of
from meshwright.serve.engine import Engine
from meshwright.spec.model import Model
from meshwright.spec.strategy import DEFAULT_ASSIGNMENT, LAYOUTS, Strategy, make_mesh
from tests.logits import logits_fn
from tests.nn import families

RELATIVE = 1e-5  # float32, of the largest logit
MAX_LEN, NUM_STEPS = 24, 5
LENGTHS = np.array([9, 1, 4, 6], np.int32)
"""Some are shorter than the windows of 6 positions, and rows of 9 and 6 grow beyond them."""

LLAMA = replace(families.LLAMA, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8, max_positions=2048)
"""Heads enough for ``tensor`` of 4."""
_OTHERS = (
    *("gemma2", "gpt_oss", "mixtral", "mistral", "qwen2", "qwen3", "gemma3", "gpt2"),
    *("phi3-longrope", "qwen2_moe", "deepseek_v2", "deepseek_v3"),
    *("olmo2", "smollm3", "glm4", "granite", "cohere", "phi", "opt", "llama4"),
)
FAMILIES: dict[str, Model] = {"llama": LLAMA} | {name: families.FAMILIES[name] for name in _OTHERS}
DEFAULT = ("llama", "gemma2", "gpt_oss")
"""Families of the default tier; mixtral is there on a mesh."""


def with_groups(model: Model) -> Model:
    """The model with widths of several groups of inputs, which two devices share evenly."""
    widths = ("d_ff", "d_ff_expert", "d_ff_shared", *(["d_model"] if model.name == LLAMA.name else []))
    return replace(model, **{width: 128 for width in widths if getattr(model, width)})


def float_params(model: Model, seed: int = 0) -> Params:
    """Weights large enough that every part of the model shows in the logits."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in param_shapes(model).items():
        centre = 1.0 if "norm" in name and not model.norm_unit_offset and "bias" not in name else 0.0
        found[name] = jnp.asarray(centre + 0.3 * rng.normal(size=shape.shape), jnp.float32)
    return found


def dequantise_params(model: Model, dtype: WeightDtype, params: Params) -> Params:
    """Float weights that stand for those stored in ``dtype``, by NumPy: every value times the scale of its group."""
    found = {name: np.asarray(array) for name, array in params.items()}
    for name, (weight, scale) in quantised_weights(model, dtype).items():
        values, factors = found[name], found.pop(scale.name)
        for axis, dim in enumerate(weight.dims, start=values.ndim - len(weight.dims)):
            if f"{dim}g" in scale.dims:
                values = unpaired(values, axis, factors.shape[axis])
                factors = np.repeat(factors, values.shape[axis] // factors.shape[axis], axis)
            elif dim not in scale.dims:
                factors = np.expand_dims(factors, axis)
        found[name] = values.astype(np.float32) * factors
    return {name: jnp.asarray(array) for name, array in found.items()}


def unpaired(values: np.ndarray, axis: int, groups: int) -> np.ndarray:
    """The signed numbers of bytes: of each group the low halves, then the high ones."""
    halves = np.stack([values & 15, values >> 4]).astype(np.int8)
    halves = np.where(halves > 7, halves - 16, halves)
    parts = [part for half in zip(*(np.split(h, groups, axis) for h in halves), strict=True) for part in half]
    return np.concatenate(parts, axis)


def step_of(model: Model, axes: dict[str, int], *, layout: str = "", **stored: Any) -> PackedStep:
    """``layout`` is one of an engine, "" for the standard assignment."""
    assignment = LAYOUTS[layout] if layout else DEFAULT_ASSIGNMENT
    strategy = Strategy(mesh=make_mesh(axes), state="fp32", assignment=assignment)
    storage = Storage(**{"page_len": 4, "cache_dtype": "fp32", **stored})
    return PackedStep(model, strategy, max_len=MAX_LEN, max_seqs=len(LENGTHS), storage=storage)


def place_of(step, sequence):
    """The owner of a sequence, and its slot."""
    owner, place = sequence % step.num_owners, sequence // step.num_owners
    return owner, owner * (step.max_seqs // step.num_owners) + place


def packed(step, parts, rows, pages, size, longest=1, **data):
    """The arrays of a step of ``size`` rows, and as many sequences, of each owner, and where its parts have logits.

    A part is a sequence and the positions from here to there; ``data`` is what the mask reads of each sequence.
    """
    owners, last = [], {}
    for owner in range(step.num_owners):
        own = [part for part in parts if part[0] % step.num_owners == owner]
        last |= {part: owner * size + at for at, part in enumerate(own)}
        counts = np.array([end - start for _, start, end in own], int)
        whose = np.repeat(np.arange(len(own)), counts)
        positions = np.concatenate([np.arange(start, end) for _, start, end in own] or [np.zeros(0, int)])
        tokens = np.concatenate([rows[s, start:end] for s, start, end in own] or [np.zeros(0, int)])
        table = pages[[s for s, *_ in own]]
        found = PackedRows(
            tokens=tokens,
            sources=np.full(len(tokens), -1),
            positions=positions,
            slots=slots_of(positions, table, whose, step.storage.page_len),
            first=np.cumsum(counts) - counts,
            counts=counts,
            lengths=np.array([end for *_, end in own], int),
            pages=table,
            last=np.cumsum(counts) - 1,
            **{name: data[name][[s for s, *_ in own]] for name in step.mask_fields},
        )
        if step.has_windows:  # pages of a sequence come round
            each = step.storage.window_pages // step.max_seqs
            table = np.array([place_of(step, s)[1] * each + np.arange(pages.shape[1]) % each for s, *_ in own])
            slots = slots_of(positions, table, whose, step.storage.page_len)
            found = found._replace(window_pages=table, window_slots=slots)
        owners.append(found)
    shape = PackedShape(*[size * step.num_owners] * 3, longest)
    return PackedRows.joined(owners, shape), [last[part] for part in parts]


def rows_of(model: Model) -> np.ndarray:
    """Tokens of whole rows: prompts of `LENGTHS`, and what comes after them."""
    return np.random.default_rng(1).integers(0, model.vocab_size, (len(LENGTHS), MAX_LEN)).astype(np.int32)


def logits_after(step: PackedStep, placed: Params, prompts: np.ndarray) -> np.ndarray:
    """Logits [B, V] after prompts [B, T] of one length, in one step."""
    (count, length), each, latest = prompts.shape, step.cache_sizes["Bp"], np.zeros(step.max_seqs, np.int32)
    parts = [(number, 0, length) for number in range(count)]
    pages = np.array([place_of(step, number)[1] * each + np.arange(each) for number in range(count)])
    given, last = packed(step, parts, prompts, pages, length * (count // step.num_owners), max(2, length))
    logits, _ = step.step(placed, step.init_cache(), latest, given, max(2, length))
    return np.asarray(logits)[last]


def engine_on(step: PackedStep, placed: Params, **limits: Any) -> Engine:
    """An engine of a step, with room for prompts in one step."""
    storage, budget = step.storage, step.max_seqs * step.max_len
    own = {"max_requests": step.max_seqs, "page_len": storage.page_len, "num_pages": step.cache_sizes["Pg"]}
    return Engine(step, placed, SchedulerLimits(**{**own, "token_budget": budget, **limits}))


class Run(NamedTuple):
    """Logits after every prompt and after each further token, [1 + steps, B, V], and the cache in the end."""

    logits: np.ndarray
    cache: dict[str, np.ndarray]


def with_cache(step: PackedStep, params: Params, *, num_steps: int = NUM_STEPS, **data: np.ndarray) -> Run:
    """Prompts of unequal lengths, then the rows' own tokens one by one; ``data`` is what the mask reads."""
    rows, each = rows_of(step.model), step.cache_sizes["Bp"]
    placed, cache, latest = step.place(params), step.init_cache(), np.zeros(step.max_seqs, np.int32)
    pages = np.array([place_of(step, s)[1] * each + np.arange(each) for s in range(len(LENGTHS))])
    data = {"prefix": LENGTHS, **data}
    found, starts = [], 0 * LENGTHS
    for count in range(1 + num_steps):
        ends = LENGTHS + count
        parts = list(zip(range(len(LENGTHS)), starts.tolist(), ends.tolist(), strict=True))
        size, longest = (32, 16) if count == 0 else (len(LENGTHS), 1)
        given, last = packed(step, parts, rows, pages, size, longest, **data)
        logits, cache = step.step(placed, cache, latest, given, longest)
        found.append(np.asarray(logits)[last])
        starts = ends
    arrays = {name: np.stack(a) if isinstance(a, tuple) else np.asarray(a) for name, a in cache.items()}
    return Run(np.stack(found), arrays)


def without_cache(model: Model, params: Params, *, num_steps: int = NUM_STEPS, **data: np.ndarray) -> np.ndarray:
    """The same logits from the forward pass over whole rows."""
    every = np.asarray(jax.jit(logits_fn(model))(params, jnp.asarray(rows_of(model)), **data))
    numbers = np.arange(len(LENGTHS))
    return np.stack([every[numbers, LENGTHS - 1 + count] for count in range(1 + num_steps)])


def likeliest(model: Model, params: Params, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The likeliest tokens after a prompt, each from a forward pass over all before it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        padded = jnp.asarray([tokens + [0] * (32 - len(tokens))], jnp.int32)
        tokens.append(int(jnp.argmax(_logits(model)(params, padded)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@lru_cache
def _logits(model: Model) -> Callable[..., jax.Array]:
    return jax.jit(logits_fn(model))


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """By the largest entry."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=RELATIVE * np.abs(expected).max())
