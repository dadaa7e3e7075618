"""Models whose attention has a mask and a score rule by name: the same loss and gradients on every mesh."""

import sys
from functools import lru_cache

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.stored import generation_program
from meshwright.algebra.ops.attention import block_share
from meshwright.core.errors import CannotRunError, InputError
from meshwright.masks.mods import tree_walk
from meshwright.masks.names import example_data, mask_named
from meshwright.nn.weights import init_params
from meshwright.parallel.train_step import TrainStep
from tests.parallel import generate_cases
from tests.parallel.cases import RELATIVE, keep_gradients, strategy_of
from tests.parallel.small import MODEL
from tests.tier import sampled

BATCH_SEQS, SEQ_LEN = 8, 32

RULES = {
    "prefix": {"attention_mask": "prefix_lm"},
    "images": {"attention_mask": "transfusion", "attention_score": "alibi"},
    "tree": {"attention_mask": "tree"},
    "documents": {"attention_mask": "causal & document", "attention_score": "relative(0.2)"},
    "padded": {"attention_mask": "jagged & local(9)"},
    "canvas": {"attention_mask": "neighbourhood_2d(8,4,3)", "attention_softcap": 5.0},
    "everything": {"attention_mask": "noop"},
}
MESHES = {
    "gathered": ({"fsdp": 2, "context": 4}, {"context_attention": "gather"}),
    "ulysses": ({"tensor": 2, "context": 2}, {"context_attention": "ulysses"}),
    "ring": ({"context": 4, "data": 2}, {"context_attention": "ring"}),
    "tensor": ({"fsdp": 2, "tensor": 2}, {}),
    "pipeline": ({"pipeline": 2, "data": 2}, {"num_microbatches": 2}),
}
ALWAYS = {
    ("tree", "gathered"),
    ("prefix", "pipeline"),
}


def model_of(rule):
    return replace(MODEL, name=f"small with {rule}", **RULES[rule])


@lru_cache
def batch(rule):
    """Tokens, labels, and what the mask reads."""
    model = model_of(rule)
    draw = np.random.default_rng(1).integers
    found = {n: draw(0, model.vocab_size, (BATCH_SEQS, SEQ_LEN)).astype(np.int32) for n in ("tokens", "labels")}
    read = mask_named(model.attention_mask)
    data = example_data(read, length=SEQ_LEN, batch=BATCH_SEQS)
    return found | {n: np.asarray(x, np.int32) for n, x in zip(read.data, data, strict=True)}


@lru_cache
def found(rule, mesh=None):
    """The loss and the gradients on a mesh; None is one device."""
    model = model_of(rule)
    axes, choices = MESHES[mesh] if mesh else ({}, {})
    step = TrainStep(model, strategy_of(axes, **choices), optimizer=keep_gradients())
    params = jax.device_put(init_params(model, 0), step.state_shardings.params)
    loss, gradients = step.gradients(params, batch(rule))
    return float(loss), {name: np.asarray(value) for name, value in gradients.items()}


def test_a_users_mask_trains_and_is_counted_apart(tmp_path, monkeypatch):
    """``module:function``: the loss and gradients of the catalogue's; plans do not import it."""
    (tmp_path / "own_masks.py").write_text(
        "def band(b, h, q_idx, kv_idx):\n    return (q_idx >= kv_idx) & (q_idx - kv_idx < 8)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    masks = {"own": "own_masks:band", "band": "sliding_window(8)"}
    shares = {name: block_share(mask, None, 1000) for name, mask in masks.items()}
    assert shares["own"] == shares["band"] < 0.3
    assert "own_masks" not in sys.modules
    for name, mask in masks.items():
        monkeypatch.setitem(RULES, name, {"attention_mask": mask})
    for value, one in zip(*(jax.tree.leaves(found(name)) for name in masks), strict=True):
        generate_cases.assert_close(value, one)
    generation_program(model_of("own"))


@pytest.mark.parametrize(
    ("rule", "mesh"),
    [
        pytest.param(r, m, id=f"{r}, {m}", marks=[] if (r, m) in ALWAYS else pytest.mark.slow)
        for r in RULES
        for m in MESHES
    ],
)
def test_every_mesh_gives_what_one_device_gives(rule, mesh):
    loss, gradients = found(rule, mesh)
    expected, wanted = found(rule)
    assert abs(loss / expected - 1) < RELATIVE
    for name, value in wanted.items():
        np.testing.assert_allclose(gradients[name], value, rtol=0, atol=RELATIVE * np.abs(value).max(), err_msg=name)


def test_masks_and_scores_make_a_difference():
    losses = [found(rule)[0] for rule in ("prefix", "images", "everything")]
    assert len({round(loss, 5) for loss in losses}) == 3


def test_what_a_mask_reads_must_be_in_the_batch():
    step = TrainStep(model_of("prefix"), strategy_of({}), optimizer=keep_gradients())
    params = jax.device_put(init_params(step.model, 0), step.state_shardings.params)
    given = {name: value for name, value in batch("prefix").items() if name != "prefix"}
    with pytest.raises(InputError, match="reads prefix of each sequence, which the batch does not have"):
        step.gradients(params, given)


def test_masks_that_no_batch_describes_are_refused():
    with pytest.raises(InputError, match=r"attention_mask='graph\(2\)' reads distances, which no batch has"):
        replace(MODEL, attention_mask="graph(2)")
    with pytest.raises(InputError, match="reads table, which no batch has"):
        replace(MODEL, attention_score="graph_bias")
    with pytest.raises(InputError, match="there is no 'causl'"):
        replace(MODEL, attention_mask="causl")


# -- generation -------------------------------------------------------------------------------------------

AT = np.arange(generate_cases.MAX_LEN)
ROWS = np.ones((len(generate_cases.LENGTHS), 1), np.int32)
SPANS = np.where((AT >= 1) & (generate_cases.LENGTHS[:, None] > AT + 1), 1, 0).astype(np.int32)
"""An image in each prompt, but for its first and last token."""
ENTER, LEAVE = tree_walk(ROWS * np.maximum(AT - 2, -1))
GENERATED = {
    "prefix": ({"attention_mask": "prefix_lm", "attention_score": "alibi"}, {}),
    "window": ({"attention_mask": "sliding_window(3)", "attention_softcap": 5.0}, {}),
    "global": ({"attention_mask": "causal & global_sliding(2)"}, {"is_global": ROWS * (AT % 5 == 0)}),
    "images": ({"attention_mask": "transfusion", "attention_score": "relative(0.1)"}, {"spans": SPANS}),
    "documents": ({"attention_mask": "causal & document"}, {"documents": ROWS * (AT // 4)}),
    "tree": ({"attention_mask": "tree"}, {"enter": ENTER, "leave": LEAVE}),
}
OTHERS = {
    "sinks": ({"attention_mask": "causal & global_sliding(4)"}, GENERATED["global"][1]),  # and windows of layers
    "latent": ({"attention_mask": "prefix_lm & sliding_window(4)", "attention_score": "alibi"}, {}),
}
OF_FAMILY = {"latent": generate_cases.FAMILIES["deepseek_v2"], "sinks": generate_cases.FAMILIES["gpt_oss"]}


def generated(rule, axes, layout=""):
    """Logits of prompts and of one token after the other, and those of the forward pass over whole rows."""
    changes, data = (GENERATED | OTHERS)[rule]
    model = replace(OF_FAMILY.get(rule, generate_cases.LLAMA), **changes)
    data = {name: array.astype(np.int32) for name, array in data.items()}
    params = generate_cases.float_params(model)
    whole = data | ({"prefix": generate_cases.LENGTHS} if "prefix_lm" in model.attention_mask else {})
    return generate_cases.with_cache(
        generate_cases.step_of(model, axes, layout=layout), params, **data
    ).logits, generate_cases.without_cache(model, params, **whole)


@pytest.mark.parametrize("rule", sampled(GENERATED | OTHERS, next(iter(GENERATED)), next(iter(OTHERS))))
def test_a_cache_changes_nothing_under_a_mask(rule):
    generate_cases.assert_close(*generated(rule, {}))


@pytest.mark.parametrize(
    ("rule", "axes", "layout"),
    [
        ("prefix", {"data": 2, "tensor": 2}, ""),
        pytest.param("images", {"context": 2, "tensor": 2}, "", marks=pytest.mark.slow),
        ("global", {"context": 2, "tensor": 2}, "positions"),
        pytest.param("tree", {"context": 2, "tensor": 2}, "sequences", marks=pytest.mark.slow),
        pytest.param("latent", {"fsdp": 2, "tensor": 2}, "", marks=pytest.mark.slow),
    ],
)
def test_no_mesh_changes_what_a_mask_generates(rule, axes, layout):
    generate_cases.assert_close(*generated(rule, axes, layout))


def test_what_a_mask_reads_changes_what_is_generated():
    model = replace(generate_cases.LLAMA, **GENERATED["images"][0])
    step, params = generate_cases.step_of(model, {}), generate_cases.float_params(model)
    found = [generate_cases.with_cache(step, params, num_steps=1, spans=spans).logits for spans in (SPANS, 0 * SPANS)]
    assert not np.allclose(*found, atol=1e-3)


def test_masks_that_look_ahead_do_not_generate():
    for rule in ("noop", "local(3)", "document", "jagged", "global_sliding(3)"):
        with pytest.raises(CannotRunError, match="a position sees later ones"):
            generation_program(replace(MODEL, attention_mask=rule))
