"""One device against a formula in NumPy written on its own; `test_families` holds every family against transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.weights import init_params
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh

MODEL = Model(
    name="numerics",
    family="llama",
    num_layers=2,
    d_model=16,
    d_ff=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=20,
    norm_eps=1e-5,
)


def rms(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + MODEL.norm_eps) * scale


def rotate(x):
    """x[B,T,N,H]: pairs (i, i+H/2) turned by t * theta^(-2i/H)."""
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for t in range(x.shape[1]):
        for i in range(half):
            angle = t * MODEL.rope_theta ** (-2 * i / x.shape[-1])
            first, second = x[:, t, :, i], x[:, t, :, i + half]
            out[:, t, :, i] = first * np.cos(angle) - second * np.sin(angle)
            out[:, t, :, i + half] = second * np.cos(angle) + first * np.sin(angle)
    return out


def mean_loss(p, tokens, labels):
    """Cross-entropy of a llama in float64, loop by loop."""
    x = p["embed"][tokens]
    for layer in range(MODEL.num_layers):
        w = {n: v[layer] for n, v in p.items() if n not in ("embed", "unembed", "final_norm")}
        h = rms(x, w["attn_norm"])
        q = rotate(np.einsum("btd,dnh->btnh", h, w["wq"]))
        k = rotate(np.einsum("btd,dkh->btkh", h, w["wk"]))
        v = np.einsum("btd,dkh->btkh", h, w["wv"])
        mixed = np.zeros_like(q)
        group = MODEL.num_heads // MODEL.num_kv_heads
        for n in range(MODEL.num_heads):
            scores = np.einsum("bth,bsh->bts", q[:, :, n], k[:, :, n // group]) / np.sqrt(MODEL.head_dim)
            scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, :, n] = (weights / weights.sum(-1, keepdims=True)) @ v[:, :, n // group]
        x = x + np.einsum("btnh,nhd->btd", mixed, w["wo"])
        h = rms(x, w["mlp_norm"])
        gate = h @ w["w_gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["w_up"])) @ w["w_down"]
    logits = rms(x, p["final_norm"]) @ p["unembed"]
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probs, labels[..., None], -1).mean()


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(1)
    params = {n: jnp.asarray(rng.normal(size=p.shape) * 0.3, jnp.float32) for n, p in init_params(MODEL, 0).items()}
    rows = rng.integers(0, MODEL.vocab_size, (2, 8)).astype(np.int32)
    return params, {"tokens": jnp.asarray(rows[:, :-1]), "labels": jnp.asarray(rows[:, 1:])}


@pytest.mark.parametrize("remat", ["block", "full", "none"])
def test_loss_and_gradients_equal_the_formula(case, remat):
    params, batch = case
    step = TrainStep(MODEL, Strategy(mesh=make_mesh({}), remat=remat, state="fp32"))
    loss, grads = step.gradients(params, batch)
    wide = {n: np.asarray(p, np.float64) for n, p in params.items()}
    tokens, labels = (np.asarray(batch[n]) for n in ("tokens", "labels"))
    assert float(loss) == pytest.approx(mean_loss(wide, tokens, labels), rel=1e-5)

    rng = np.random.default_rng(2)
    for name, weight in wide.items():
        direction = rng.normal(size=weight.shape)
        moved = [mean_loss({**wide, name: weight + e * direction}, tokens, labels) for e in (1e-5, -1e-5)]
        slope = (moved[0] - moved[1]) / 2e-5
        assert float(np.sum(np.asarray(grads[name], np.float64) * direction)) == pytest.approx(
            slope, rel=2e-4, abs=1e-6
        )


def test_initial_loss_is_that_of_uniform_guesses():
    step = TrainStep(MODEL, Strategy(mesh=make_mesh({}), state="fp32"))
    rows = np.random.default_rng(3).integers(0, MODEL.vocab_size, (4, 16)).astype(np.int32)
    batch = {"tokens": jnp.asarray(rows[:, :-1]), "labels": jnp.asarray(rows[:, 1:])}
    loss, _ = step.gradients(step.init(0).params, batch)
    assert float(loss) == pytest.approx(np.log(MODEL.vocab_size), rel=0.02)
