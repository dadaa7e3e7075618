"""A transformer layer of any family written plainly in NumPy, from the models' papers, not from the layer program."""

import numpy as np

from tests.algebra.numpy_ops import EPS, rope


def plain_layer(model, kind, w, x):
    """One layer of one sequence at a time, token by token where experts differ, from the papers and not the program."""

    def norm(rows, name):
        if model.norm == "layer_norm":
            rows = rows - rows.mean(-1, keepdims=True)
        rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPS)
        return rows * w[name] + w.get(f"{name}_bias", 0)

    def biased(rows, name):
        return rows + w.get(name, 0)

    def act(gate):
        return gate / (1 + np.exp(-gate)) if model.activation == "silu" else np.tanh(gate)

    def mlp(rows, prefix, up_bias="b_up", down_bias="b_down"):
        up = biased(rows @ w[f"{prefix}w_up"], up_bias)
        gate = biased(rows @ w[f"{prefix}w_gate"], "b_gate") if model.gated else up
        return biased((act(gate) * up) @ w[f"{prefix}w_down"], down_bias)

    def experts(rows):
        scores, out = biased(rows @ w["router"], "router_bias"), np.zeros_like(rows)
        for row, score, total in zip(rows, scores, out, strict=True):
            best = sorted(range(model.num_experts), key=lambda e: -score[e])[: model.experts_per_token]
            for e in best:
                share = 1 / np.exp(score[best] - score[e]).sum()
                parts = {n: w[f"experts_{n}"][e] for n in ("w_gate", "w_up", "w_down")}
                extra = {
                    n: w.get(f"experts_{n}", np.zeros((model.num_experts, 1)))[e] for n in ("b_gate", "b_up", "b_down")
                }
                hidden = act(row @ parts["w_gate"] + extra["b_gate"]) * (row @ parts["w_up"] + extra["b_up"])
                total += share * (hidden @ parts["w_down"] + extra["b_down"])
        return out

    def heads(rows):
        """q, k, v of every query head: [T, N, width]."""
        turned = rope if not model.learned_positions else (lambda y, positions: y)
        places, group = np.arange(len(rows)), model.num_heads // model.num_kv_heads
        if model.latent_attention:
            latent = norm(rows @ w["wkv_a"], "kv_a_norm")
            query = np.einsum("tr,rnh->tnh", norm(rows @ w["wq_a"], "q_a_norm"), w["wq_b"])
            turning = turned(rows @ w["wk_rope"], places)
            keys = [np.concatenate([latent @ w["wk_b"][:, n], turning], -1) for n in range(model.num_heads)]
            return turned(query, places), np.stack(keys, 1), np.einsum("tr,rnh->tnh", latent, w["wv_b"])
        q, k, v = (biased(np.einsum("td,dnh->tnh", rows, w[f"w{n}"]), f"b{n}") for n in "qkv")
        if model.qk_norm or model.head_qk_norm:
            q, k = norm(q, "q_norm"), norm(k, "k_norm")
        return turned(q, places), *(np.repeat(y, group, 1) for y in (turned(k, places), v))

    def attend(rows):
        q, k, v = heads(rows)
        out = np.zeros((*q.shape[:2], v.shape[-1]))
        for t in range(len(rows)):
            first = max(0, t + 1 - model.sliding_window) if kind.sliding else 0
            for n in range(model.num_heads):
                weights = np.exp(k[first : t + 1, n] @ q[t, n] / np.sqrt(q.shape[-1]))
                sink = np.exp(w["sinks"][n]) if model.attention_sinks else 0
                out[t, n] = weights @ v[first : t + 1, n] / (weights.sum() + sink)
        return biased(np.einsum("tnh,nhd->td", out, w["wo"]), "bo")

    after = norm if model.post_norms else (lambda rows, name: rows)
    result = []
    for rows in x:
        attended = rows + after(attend(norm(rows, "attn_norm")), "post_attn_norm")
        h = norm(rows if model.parallel_block else attended, "attn_norm" if model.shared_norm else "mlp_norm")
        y = experts(h) if kind.routed else mlp(h, "")
        shared = mlp(h, "shared_", up_bias="", down_bias="") if kind.routed and model.d_ff_shared else 0
        if kind.routed and model.shared_expert_gate:
            shared = shared / (1 + np.exp(-(h @ w["shared_gate"])))[:, None]
        result.append(attended + after(y, "post_mlp_norm") + shared)
    return np.stack(result)
