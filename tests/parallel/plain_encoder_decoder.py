"""An encoder and a decoder written plainly in JAX, from the papers and not from the layer program."""

import math

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from meshwright.spec.model import Encoder, Model

T5 = Model(
    name="t5-like",
    family="llama",
    num_layers=3,
    d_model=32,
    d_ff=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=64,
    tied_embeddings=True,
    activation="relu",
    gated=False,
    query_pre_attn_scalar=1.0,
    relative_buckets=8,
    relative_distance=12,
    encoder=Encoder(num_layers=4, length=24),
)
"""RMS norms before, relu, no biases, no scale of scores, positions as buckets of distances."""

SHARED = msgspec.structs.replace(T5, name="t5-shared", relative_shared=True)
"""One table of biases for the layers of each stack."""

WHISPER = Model(
    name="whisper-like",
    family="gpt2",
    num_layers=4,
    d_model=32,
    d_ff=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=64,
    max_positions=16,
    norm="layer_norm",
    activation="gelu",
    gated=False,
    learned_positions=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    encoder=Encoder(num_layers=3, length=24),
)
"""Layer norms, gelu, biases everywhere, a table of positions for each stack, tables of tokens and of the head apart."""

BATCH_SEQS, SEQ_LEN = 8, 16


def batch(model):
    """Rows of the encoder and of the decoder; some labels count nothing."""
    draw = np.random.default_rng(1).integers
    shape, longer = (BATCH_SEQS, SEQ_LEN), (BATCH_SEQS, model.encoder.length)
    rows = {"tokens": shape, "labels": shape, "encoder_tokens": longer}
    found = {name: draw(0, model.vocab_size, size).astype(np.int32) for name, size in rows.items()}
    found["labels"][:, -2:] = -1
    return found


def padded(model):
    """The batch with rows of the encoder of several lengths."""
    return batch(model) | {"encoder_lengths": np.array([24, 1, 5, 17, 23, 2, 9, 24], np.int32)}


def plain_loss(model, params, given):
    """The mean loss of a batch."""
    heads, width = model.num_heads, model.head_dim

    def norm(x, name):
        if model.norm == "rms_norm":
            return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + model.norm_eps) * params_of(name)
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + model.norm_eps)
        return x * params_of(name) + params_of(f"{name}_bias")

    layer = {"number": None}

    def params_of(name):
        return params[name] if layer["number"] is None else params[name][layer["number"]]

    def heads_of(x, prefix, letter):
        weight, bias = f"{prefix}w{letter}", f"{prefix}b{letter}"
        found = x @ params_of(weight).reshape(-1, heads * width)
        found = found + (params_of(bias).reshape(-1) if model.qkv_bias else 0)
        return found.reshape(*x.shape[:-1], heads, width).transpose(0, 2, 1, 3)

    def attend(x, other, prefix, *, causal, table=None):
        q, k, v = heads_of(x, prefix, "q"), heads_of(other, prefix, "k"), heads_of(other, prefix, "v")
        scores = q @ k.transpose(0, 1, 3, 2)
        scores = scores if table is not None or model.relative_buckets else scores / math.sqrt(width)
        if table is not None:
            rows, columns = scores.shape[-2:]
            numbers = [[t5_bucket(j - i, not causal, model) for j in range(columns)] for i in range(rows)]
            scores = scores + table[np.array(numbers)].transpose(2, 0, 1)
        if not causal and "encoder_lengths" in given:
            is_there = np.arange(scores.shape[-1]) < given["encoder_lengths"][:, None, None, None]
            scores = jnp.where(is_there, scores, -1e30)
        if causal:
            scores = jnp.where(np.tri(scores.shape[-1], dtype=bool), scores, -1e30)
        mixed = (jax.nn.softmax(scores, -1) @ v).transpose(0, 2, 1, 3).reshape(*x.shape[:-1], -1)
        out = mixed @ params_of(f"{prefix}wo").reshape(heads * width, -1)
        return out + (params_of(f"{prefix}bo") if model.out_bias else 0)

    def feed_forward(x, prefix):
        act = jax.nn.relu if model.activation == "relu" else lambda y: jax.nn.gelu(y, approximate=False)
        up = x @ params_of(f"{prefix}w_up") + (params_of(f"{prefix}b_up") if model.mlp_bias else 0)
        return act(up) @ params_of(f"{prefix}w_down") + (params_of(f"{prefix}b_down") if model.mlp_bias else 0)

    def stack(tokens, prefix, num_layers, encoded=None):
        layer["number"] = None
        x = params["embed"][tokens]
        x = x + (params[f"{prefix}position_table"][: tokens.shape[1]] if model.learned_positions else 0)
        for number in range(num_layers):
            layer["number"] = number
            h = norm(x, f"{prefix}attn_norm")
            table_of = params.get if model.relative_shared else params_of
            table = table_of(f"{prefix}relative_bias") if model.relative_buckets else None
            x = x + attend(h, h, prefix, causal=encoded is not None, table=table)
            if encoded is not None:
                x = x + attend(norm(x, "cross_norm"), encoded, "cross_", causal=False)
            x = x + feed_forward(norm(x, f"{prefix}mlp_norm"), prefix)
        layer["number"] = None
        return norm(x, f"{prefix}final_norm")

    encoded = stack(given["encoder_tokens"], "encoder_", model.encoder.num_layers)
    x = stack(given["tokens"], "", model.num_layers, encoded)
    logits = x @ (params["embed"].T if model.tied_embeddings else params["unembed"])
    labels = given["labels"]
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.where(labels >= 0, losses, 0).sum() / (labels >= 0).sum()


def t5_bucket(distance, both_ways, model):
    """The bucket of one distance, number by number, after Mesh TensorFlow's ``_relative_position_bucket``."""
    count, found, away = model.relative_buckets, 0, -distance
    if both_ways:
        count //= 2
        found += count if away < 0 else 0
        away = abs(away)
    else:
        away = max(away, 0)
    if away < count // 2:
        return found + away
    far = math.log(np.float32(away / (count // 2))) / math.log(model.relative_distance / (count // 2))
    return found + min(count // 2 + int(far * (count - count // 2)), count - 1)
