"""DeepSeek-V3 with its multi-token prediction, written plainly from the papers and not from the layer program."""

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.spec.model import Model

MODEL = Model(
    name="deepseek-like",
    family="deepseek_v3",
    num_layers=3,
    d_model=32,
    d_ff=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=12,
    vocab_size=64,
    num_experts=4,
    experts_per_token=2,
    d_ff_expert=16,
    d_ff_shared=16,
    num_shared_experts=1,
    router_scores="sigmoid",
    router_correction=True,
    gates_sum_to_one=True,
    routed_scale=2.5,
    expert_groups=1,
    groups_per_token=1,
    dense_layers=(0,),
    num_mtp_layers=1,
    mtp_weight=0.3,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
)
BATCH_SEQS, SEQ_LEN = 8, 16


def batch():
    """Rows of two documents, of which the second begins at position 10; two labels of the first count nothing."""
    rows = np.random.default_rng(0).integers(0, MODEL.vocab_size, (BATCH_SEQS, SEQ_LEN + 1)).astype(np.int32)
    tokens, labels = rows[:, :-1], rows[:, 1:].copy()
    labels[:, [2, 3, 9]] = -1
    documents = np.broadcast_to((np.arange(SEQ_LEN) >= 10).astype(np.int32), tokens.shape)
    positions = np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32) - 10 * (np.arange(SEQ_LEN) >= 10), tokens.shape)
    return {"tokens": tokens, "labels": labels, "documents": documents, "positions": positions.astype(np.int32)}


def _losses(params, given):
    """Returns L_main and L_mtp: cross entropies of t_{i+1} and t_{i+2}, each a mean over its own labels."""
    tokens, labels, documents, positions = (given[n] for n in ("tokens", "labels", "documents", "positions"))
    sees = (documents[:, :, None] == documents[:, None, :]) & np.tril(np.ones((SEQ_LEN, SEQ_LEN), bool))
    x = params["embed"][tokens]
    x = _layer({n: params[n][0] for n in params if "_mtp" not in n and params[n].shape[0] == 1}, x, sees, positions)
    for number in range(2):
        own = {n.removesuffix("_moe"): params[n][number] for n in params if n.endswith("_moe")}
        x = _layer(own, x, sees, positions)
    h = _norm(x, params["final_norm"])
    # h'_i = M [RMSNorm(Emb(t_{i+1})); RMSNorm(h_i)]: the published M has the columns of the embedding first
    own = {n.removesuffix("_mtp"): params[n][0] for n in params if n.endswith("_mtp")}
    ahead = jnp.asarray(tokens)[:, np.minimum(np.arange(SEQ_LEN) + 1, SEQ_LEN - 1)]
    both = [_norm(params["embed"][ahead], own["token_norm"]), _norm(h, own["stream_norm"])]
    second = _norm(_layer(own, jnp.concatenate(both, -1) @ own["w_join"], sees, positions), own["end_norm"])
    # the label of i is t_{i+2}: that of i + 1, in the same row and document
    later = np.full_like(labels, -1)
    later[:, :-1] = np.where(documents[:, 1:] == documents[:, :-1], labels[:, 1:], -1)
    return _cross_entropy(h @ params["unembed"], labels), _cross_entropy(second @ params["unembed"], later)


def plain_loss(params, given):
    """Returns L_main + lambda L_mtp, and both losses."""
    main, second = _losses(params, given)
    return main + MODEL.mtp_weight * second, (main, second)


def _cross_entropy(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), np.maximum(labels, 0)[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(labels >= 0, picked, 0.0)) / np.count_nonzero(labels >= 0)


def _norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + MODEL.norm_eps) * scale


def _layer(w, x, sees, positions):
    """One layer: latent attention, then a dense feed-forward or experts."""
    x = x + _attention(w, _norm(x, w["attn_norm"]), sees, positions)
    h = _norm(x, w["mlp_norm"])
    return x + (_experts(w, h) if "router" in w else _mlp(h, w["w_gate"], w["w_up"], w["w_down"]))


def _attention(w, h, sees, positions):
    nope = MODEL.qk_nope_head_dim
    q = jnp.einsum("btr,rnh->btnh", _norm(h @ w["wq_a"], w["q_a_norm"]), w["wq_b"])
    latent = _norm(h @ w["wkv_a"], w["kv_a_norm"])
    shared = _rotated((h @ w["wk_rope"])[:, :, None], positions)
    q = jnp.concatenate([q[..., :nope], _rotated(q[..., nope:], positions)], -1)
    k = jnp.einsum("btr,rnh->btnh", latent, w["wk_b"])
    k = jnp.concatenate([k, jnp.broadcast_to(shared, (*k.shape[:3], shared.shape[-1]))], -1)
    v = jnp.einsum("btr,rnh->btnh", latent, w["wv_b"])
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / MODEL.head_dim**0.5
    shares = jax.nn.softmax(jnp.where(sees[:, None], scores, -jnp.inf), -1)
    return jnp.einsum("bnts,bsnh,nhd->btd", shares, v, w["wo"])


def _rotated(x, positions):
    """Turns the pairs (2 i, 2 i + 1) of each head."""
    width = x.shape[-1]
    angles = positions[..., None, None] * MODEL.rope_theta ** (-np.arange(0, width, 2) / width)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = even * np.cos(angles) - odd * np.sin(angles), even * np.sin(angles) + odd * np.cos(angles)
    return jnp.stack(turned, -1).reshape(x.shape)


def _experts(w, h):
    """Every expert on every token, times its weight: zero for those that a token does not choose."""
    scores = jax.nn.sigmoid(h @ w["router"])
    chosen = jax.lax.top_k(scores + w["router_correction"], MODEL.experts_per_token)[1]
    kept = scores * jnp.sum(jax.nn.one_hot(chosen, MODEL.num_experts), -2)
    gates = MODEL.routed_scale * kept / jnp.sum(kept, -1, keepdims=True)
    matrices = (w[f"experts_{name}"] for name in ("w_gate", "w_up", "w_down"))
    each = jax.vmap(lambda *own: _mlp(h, *own))(*matrices)
    shared = _mlp(h, *(w[f"shared_{name}"] for name in ("w_gate", "w_up", "w_down")))
    return jnp.einsum("ebtd,bte->btd", each, gates) + shared


def _mlp(h, gate, up, down):
    return (jax.nn.silu(h @ gate) * (h @ up)) @ down
