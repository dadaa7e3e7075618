"""The lines of one transformer layer, for every family: attention with its norms, then dense or routed feed-forward.

Remat policies name results: q, k, a, g, u, y and so on are results of matrix products; qr, kr and v are the inputs of
attention, after bias, norm and rope, and o is its output. `transformer.parse_block` reads the lines.
"""

import re
from collections.abc import Collection, Mapping
from statistics import NormalDist

import msgspec

from meshwright.masks.names import mask_named
from meshwright.spec.model import MASK_DATA, Model
from meshwright.spec.weights import adapted, has_frozen_matrices, weight_table

ENCODER, CROSS = "encoder_", "cross_"
"""Prefixes of the variables of an encoder and of cross-attention; the rest of a name is as in a decoder's layer."""
ENCODER_END, ENCODED = f"{ENCODER}end", "encoded"
"""The last block of an encoder, and its result."""
EMBEDDED = ("embedded", "shared_layer_norm")
"""Results that the first block shares with layers, in models with per-layer embeddings."""
FULL = "_full"
"""Suffix of variables in layers without a window, where their dims differ from the dims in layers with one."""

FEATURES = f"{ENCODER}features"
"""The variable of an encoder's features, in place of its tokens."""

ENCODER_LENGTHS = f"{ENCODER}lengths"
"""The input [B] with the number of positions of each encoder row that are not padding, if rows are padded."""
PADDED = "padded"
"""The mask that hides the padding after `ENCODER_LENGTHS`."""

_PRODUCT = re.compile(r"(\w+)\[(.*)\] = (\w+)\[(.*)\] \* (\w+)\[(.*)\]")


class ProgramOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a job that change the program of its model.

    ``documents``: rows have several documents, and attention stays inside each. ``encoder_lengths``: an encoder's rows
    are padded, and only their first ``encoder_lengths``[B] positions are attended to. ``z_loss``, ``balance_loss`` and
    ``router_z_loss`` are the weights of these losses, added to the cross entropy. ``capacity_factor`` bounds the slots
    of an expert to that many times the mean load; 0 drops nothing. If the router has a correction, a step adds
    ``correction_rate`` to the correction of experts below the mean load and subtracts it from that of experts above.
    """

    documents: bool = False
    encoder_lengths: bool = False
    z_loss: float = 0.0
    balance_loss: float = 0.0
    router_z_loss: float = 0.0
    capacity_factor: float = 0.0
    correction_rate: float = 0.0


PLAIN = ProgramOptions()


# -- the text of every family -------------------------------------------------------------------------------

STREAMS = """
    xp[A,B,T,D] = mix_predict(streams[A,B,T,D], mix_norm[D], mix_router[D,Am], mix_predict[Am,Ao,A]) if num_streams
    x[B,T,D] = stream(xp[A,B,T,D]) if num_streams
"""
"""The first lines of a layer with several residual streams: it predicts all of them and reads one as x. Source: Gemma
3n, and Baykal et al., Alternating Updates for Efficient Transformers (2023)."""

ATTENTION = """
    h[B,T,D] = norm(x[B,T,D], attn_norm[D]) if pre_norms
    q~{bare}[B,T,N,H] = {h}[B,T,D] * wq[D,N,H]
    k~{bare_k}[B,T,K,H] = {h}[B,T,D] * wk[D,K,H]
    v~{zero}[B,T,K,H] = {h}[B,T,D] * wv[D,K,H] if !from_keys
    q~{bq}[B,T,N,H] = bias_add(q~[B,T,N,H], bq[N,H]) if qkv_bias
    q~{n}[B,T,N,H] = rms_norm(q~[B,T,N,H], q_norm[H]) if qk_norm !wide_qk_norm !qk_norm_last
    q~{n}[B,T,N,H] = wide_rms_norm(q~[B,T,N,H], q_norm[N,H]) if wide_qk_norm
    q~{n}[B,T,N,H] = norm(q~[B,T,N,H], q_norm[N,H]) if head_qk_norm
    q~{pq}[B,T,N,H] = rope(q~[B,T,N,H], positions[B,T]) if rotates
    q~r[B,T,N,H] = rms_norm(q~[B,T,N,H], q_norm[H]) if qk_norm_last
    q~r[B,T,N,H] = unit_norm(q~[B,T,N,H]) if has_unit_norm
    q~r[B,T,N,H] = tempered(q~[B,T,N,H], positions[B,T]) if tempers
    k~{b}[B,T,K,H] = bias_add(k~[B,T,K,H], bk[K,H]) if qkv_bias key_bias
    v~[B,T,K,H] = unit_norm(k~[B,T,K,H]) if from_keys
    k~{n}[B,T,K,H] = rms_norm(k~[B,T,K,H], k_norm[H]) if qk_norm !wide_qk_norm !qk_norm_last
    k~{n}[B,T,K,H] = wide_rms_norm(k~[B,T,K,H], k_norm[K,H]) if wide_qk_norm
    k~{n}[B,T,K,H] = norm(k~[B,T,K,H], k_norm[K,H]) if head_qk_norm
    k~{p}[B,T,K,H] = rope(k~[B,T,K,H], positions[B,T]) if rotates
    k~r[B,T,K,H] = rms_norm(k~[B,T,K,H], k_norm[H]) if qk_norm_last
    k~r[B,T,K,H] = unit_norm(k~[B,T,K,H]) if has_unit_norm
    v~{vb}[B,T,K,H] = bias_add(v~[B,T,K,H], bv[K,H]) if qkv_bias !from_keys
    v~[B,T,K,H] = unit_norm(v~[B,T,K,H]) if value_norm !from_keys
    o[B,T,N,H] = attention(q~[B,T,N,H], k~[B,T,K,H], v[B,T,K,H]{others})
    a[B,T,D] = o[B,T,N,H] * wo[N,H,D]
"""

LATENT_ATTENTION = """
    h[B,T,D] = norm(x[B,T,D], attn_norm[D]) if pre_norms
    q[B,T,N,H] = {h}[B,T,D] * wq[D,N,H] if !q_lora_rank
    cq[B,T,Rq] = {h}[B,T,D] * wq_a[D,Rq] if q_lora_rank
    cq~b[B,T,Rq] = bias_add(cq~[B,T,Rq], bq_a[Rq]) if q_lora_rank qkv_bias
    cqn[B,T,Rq] = rms_norm(cq~[B,T,Rq], q_a_norm[Rq]) if q_lora_rank
    q[B,T,N,H] = cqn[B,T,Rq] * wq_b[Rq,N,H] if q_lora_rank
    ckv[B,T,Rkv] = {h}[B,T,D] * wkv_a[D,Rkv]
    ckv~b[B,T,Rkv] = bias_add(ckv~[B,T,Rkv], bkv_a[Rkv]) if qkv_bias
    ckvn[B,T,Rkv] = rms_norm(ckv~[B,T,Rkv], kv_a_norm[Rkv])
    kp[B,T,Hr] = {h}[B,T,D] * wk_rope[D,Hr]
    kp~b[B,T,Hr] = bias_add(kp~[B,T,Hr], bk_rope[Hr]) if qkv_bias
    kn[B,T,N,Hn] = ckvn[B,T,Rkv] * wk_b[Rkv,N,Hn]
    v[B,T,N,Hv] = ckvn[B,T,Rkv] * wv_b[Rkv,N,Hv]
    q~{pq}[B,T,N,H] = rope(q~[B,T,N,H], positions[B,T])
    q~r[B,T,N,H] = tempered(q~[B,T,N,H], positions[B,T]) if query_temper
    kpr[B,T,Hr] = rope(kp~[B,T,Hr], positions[B,T])
    kr[B,T,N,H] = join_heads(kn[B,T,N,Hn], kpr[B,T,Hr])
    o[B,T,N,Hv] = attention(q~[B,T,N,H], kr[B,T,N,H], v[B,T,N,Hv]{others})
    a[B,T,D] = o[B,T,N,Hv] * wo[N,Hv,D]
"""
"""Queries, keys and values through low-rank latents; one rotated key part is shared by all heads.

Source: DeepSeek-AI, DeepSeek-V2 (2024), section 2.1."""

AFTER_ATTENTION = """
    a~b[B,T,D] = bias_add(a~[B,T,D], bo[D]) if out_bias !joins
    a~n[B,T,D] = norm(a~[B,T,D], post_attn_norm[D]) if post_norms
    a~s[B,T,D] = scaled(a~[B,T,D]; by={residual}) if scales !joins
    {sum}[B,T,D] = add(x[B,T,D], a~[B,T,D]) if !joins !laurel_rank
    {x1}[B,T,D] = norm({sum}[B,T,D], attn_norm[D]) if sum_norms
    lr[B,T,Rl] = h[B,T,D] * laurel_in[D,Rl] if laurel_rank
    ly[B,T,D] = lr[B,T,Rl] * laurel_out[Rl,D] if laurel_rank
    ly~n[B,T,D] = norm(ly~[B,T,D], laurel_norm[D]) if laurel_rank
    ly~h[B,T,D] = add(h[B,T,D], ly~[B,T,D]) if laurel_rank
    x1l[B,T,D] = add(x[B,T,D], a~[B,T,D], ly~[B,T,D]) if laurel_rank
    {x1}[B,T,D] = scaled(x1l[B,T,D]; by={half}) if laurel_rank
"""
"""A low-rank product may run parallel to attention on its input: Menghani et al., LAuReL (2024), as in Gemma 3n."""

CROSS_ATTENTION = """
    cross_h[B,T,D] = norm(x0[B,T,D], cross_norm[D]) if pre_norms
    cross_q{zero}[B,T,N,H] = {cross_h}[B,T,D] * cross_wq[D,N,H]
    cross_q[B,T,N,H] = bias_add(cross_q0[B,T,N,H], cross_bq[N,H]) if qkv_bias
    cross_k{zero_k}[B,S,K,H] = encoded[B,S,D] * cross_wk[D,K,H]
    cross_k[B,S,K,H] = bias_add(cross_k0[B,S,K,H], cross_bk[K,H]) if qkv_bias key_bias
    cross_v{zero}[B,S,K,H] = encoded[B,S,D] * cross_wv[D,K,H]
    cross_v[B,S,K,H] = bias_add(cross_v0[B,S,K,H], cross_bv[K,H]) if qkv_bias
    cross_o[B,T,N,H] = attention(cross_q[B,T,N,H], cross_k[B,S,K,H], cross_v[B,S,K,H]{given})
    cross_a[B,T,D] = cross_o[B,T,N,H] * cross_wo[N,H,D]
    cross_a~b[B,T,D] = bias_add(cross_a~[B,T,D], cross_bo[D]) if out_bias
    {sum}[B,T,D] = add(x0[B,T,D], cross_a~[B,T,D])
    x1[B,T,D] = norm({sum}[B,T,D], cross_norm[D]) if sum_norms
"""
"""Cross-attention: queries from the decoder's stream, keys and values from the encoder's result."""

DENSE = """
    h1[B,T,D] = norm({mlp_x}[B,T,D], mlp_norm[D]) if pre_norms !shared_norm
    g[B,T,F] = {h1}[B,T,D] * w_gate[D,F] if gated
    u[B,T,F] = {h1}[B,T,D] * w_up[D,F]
    g~b[B,T,F] = bias_add(g~[B,T,F], b_gate[F]) if gated mlp_bias
    u~b[B,T,F] = bias_add(u~[B,T,F], b_up[F]) if mlp_bias
    g~t[B,T,F] = sparse_gate(g~[B,T,F]; by={bound}) if sparse
    m[B,T,F] = {activation}_mul(g~[B,T,F], u~[B,T,F]) if gated
    m[B,T,F] = gelu(u~[B,T,F]) if !gated
    {y}[B,T,D] = m[B,T,F] * w_down[F,D]
    {y}~o[B,T,D] = bias_add({y}~[B,T,D], bo[D]) if joins out_bias
    {y}~b[B,T,D] = bias_add({y}~[B,T,D], b_down[D]) if mlp_bias
    {y}~n[B,T,D] = norm({y}~[B,T,D], post_mlp_norm[D]) if post_norms
    {y}~s[B,T,D] = scaled({y}~[B,T,D]; by={residual}) if scales
    {sum}[B,T,D] = add({before}[B,T,D], {y}~[B,T,D])
    {x2}[B,T,D] = norm({sum}[B,T,D], mlp_norm[D]) if sum_norms
"""
"""The dense feed-forward block. If it ``joins`` attention, it reads attention's input, and the last products of both
are summed in one result, ``a``, whose partial sums over devices are reduced once."""

EXPERTS = """
    h1[B,T,D] = norm({mlp_x}[B,T,D], mlp_norm[D]) if pre_norms !shared_norm
    hr[B,T,D] = norm({mlp_x}[B,T,D], router_norm[D]) if branch_norms
    hr~s[B,T,D] = scaled(hr~[B,T,D]; by={root}) if branch_norms
    he[B,T,D] = norm({mlp_x}[B,T,D], expert_norm[D]) if branch_norms
    r[B,T,E] = {hr}[B,T,D] * router[D,E]
    r~b[B,T,E] = bias_add(r~[B,T,E], router_bias[E]) if router_bias
    gates[B,T,Ea] = route(r~[B,T,E]{correction}{routing})
    gates~s[B,T,Ea] = expert_scaled(gates~[B,T,Ea], expert_scale[E]{capacity}) if expert_scale
    we[E,C] = dispatch_gates(gates~[B,T,Ea]{capacity})
    xe[E,C,D] = dispatch({he}[B,T,D], gates~[B,T,Ea], we[E,C]{capacity})
    xe~w[E,C,D] = weighted(xe[E,C,D], we[E,C]) if weighted_inputs
    ge[E,C,Fe] = xe~[E,C,D] * experts_w_gate[E,D,Fe]
    ue[E,C,Fe] = xe~[E,C,D] * experts_w_up[E,D,Fe]
    ge~b[E,C,Fe] = bias_add(ge~[E,C,Fe], experts_b_gate[E,Fe]) if mlp_bias
    ue~b[E,C,Fe] = bias_add(ue~[E,C,Fe], experts_b_up[E,Fe]) if mlp_bias
    me[E,C,Fe] = {activation}_mul(ge~[E,C,Fe], ue~[E,C,Fe]) if gated
    me[E,C,Fe] = gelu(ue~[E,C,Fe]) if !gated
    me~w[E,C,Fe] = weighted(me~[E,C,Fe], we[E,C]) if !mlp_bias !weighted_inputs
    ye[E,C,D] = me~[E,C,Fe] * experts_w_down[E,Fe,D]
    ye~b[E,C,D] = bias_add(ye~[E,C,D], experts_b_down[E,D]) if mlp_bias
    ye~w[E,C,D] = weighted(ye~[E,C,D], we[E,C]) if mlp_bias !weighted_inputs
    y[B,T,D] = combine(ye~[E,C,D], gates~[B,T,Ea], we[E,C])
    gs[B,T,Fs] = {h1}[B,T,D] * shared_w_gate[D,Fs] if d_ff_shared
    us[B,T,Fs] = {h1}[B,T,D] * shared_w_up[D,Fs] if d_ff_shared
    ms[B,T,Fs] = {activation}_mul(gs[B,T,Fs], us[B,T,Fs]) if d_ff_shared gated
    ms[B,T,Fs] = gelu(us[B,T,Fs]) if d_ff_shared !gated
    ys[B,T,D] = ms[B,T,Fs] * shared_w_down[Fs,D] if d_ff_shared
    ys~g[B,T,D] = token_gate(ys~[B,T,D], {h1}[B,T,D], shared_gate[D]) if d_ff_shared shared_expert_gate
    ys~n[B,T,D] = norm(ys~[B,T,D], post_shared_norm[D]) if branch_norms
    y~p[B,T,D] = norm(y~[B,T,D], post_expert_norm[D]) if branch_norms
    y~b[B,T,D] = add(y~[B,T,D], ys~[B,T,D]) if branch_norms
    ys~s[B,T,D] = scaled(ys~[B,T,D]; by={residual}) if d_ff_shared scales
    y~n[B,T,D] = norm(y~[B,T,D], post_mlp_norm[D]) if post_norms
    y~s[B,T,D] = scaled(y~[B,T,D]; by={residual}) if scales
    {x2}[B,T,D] = add(x1[B,T,D], y~[B,T,D]) if !adds_shared
    {x2}[B,T,D] = add(x1[B,T,D], y~[B,T,D], ys~[B,T,D]) if adds_shared
"""
"""E routed experts of C slots each; shared experts see every token, as one feed-forward of their joint width.

The weights of slots move to expert devices and are applied before the last product, so that the backward pass need not
keep or move its result; if a bias follows that product, they are applied after it."""

LAYER_END = """
    xc[A,B,T,D] = mix_correct(xp[A,B,T,D], x3[B,T,D], mix_norm[D], mix_router[D,Am], mix_correct[Am,A]) if num_streams
    x3~c[B,T,D] = stream(xc[A,B,T,D]) if num_streams
    x3~s[B,T,D] = scaled_by(x3~[B,T,D], mix_scale[D]) if stream_scale
    pe[B,T,Dl] = embed(tokens[B,T], layer_embed[{vl},Dl]; scale=sqrt(Dl)) if layer_embed_dim
    pp[B,T,Dl] = embedded[B,T,D] * layer_proj[D,Dl] if layer_embed_dim
    pp~s[B,T,Dl] = scaled(pp~[B,T,Dl]; by={root}) if layer_embed_dim
    pp~n[B,T,Dl] = norm(pp~[B,T,Dl], shared_layer_norm[Dl]) if layer_embed_dim
    pl[B,T,Dl] = add(pe[B,T,Dl], pp~[B,T,Dl]) if layer_embed_dim
    pl~s[B,T,Dl] = scaled(pl~[B,T,Dl]; by={half}) if layer_embed_dim
    pg[B,T,Dl] = x3~[B,T,D] * layer_gate[D,Dl] if layer_embed_dim
    pm[B,T,Dl] = {activation}_mul(pg[B,T,Dl], pl~[B,T,Dl]) if layer_embed_dim
    po[B,T,D] = pm[B,T,Dl] * layer_out[Dl,D] if layer_embed_dim
    po~n[B,T,D] = norm(po~[B,T,D], post_layer_norm[D]) if layer_embed_dim
    {x4}[B,T,D] = add(x3[B,T,D], po~[B,T,D]) if layer_embed_dim !num_streams
    streams2[A,B,T,D] = add_later(xc[A,B,T,D], po~[B,T,D]) if num_streams
    x2[B,T,D] = scaled_by({x4}[B,T,D], layer_scale[]) if layer_scale
"""
"""Lines after the feed-forward block, whose result is then x3: the layer's own embedding of the token, gated by the
stream and added; a learnt scale. Several streams are corrected first, and all but the first get the embedding added.
Source: Gemma 3n and Gemma 4, per-layer embeddings."""

EMBED = """
    {first}[B,T,D] = embed(tokens[B,T], embed[V,D]{scale})
    shared_layer_norm[Dl] = copy(layer_norm[Dl]) if layer_embed_dim
    {embedded}[B,T,D] = copy(embedded[B,T,D]) if layer_embed_dim
    p[B,T,D] = embed(positions[B,T], position_table[P,D]) if learned_positions
    {sum}[B,T,D] = add(e[B,T,D], p[B,T,D]) if learned_positions
    x[B,T,D] = norm({sum}[B,T,D], embed_norm[D]) if embed_norm
    xa[An,B,T,Do] = x[B,T,D] * stream_in[An,D,Do] if num_streams
    streams[A,B,T,D] = into_streams(x[B,T,D], xa[An,B,T,Do]) if num_streams
"""

FINAL_NORM = """
    xo[An,B,T,D] = stream(streams[A,B,T,D]) if num_streams
    xa[An,B,T,Do] = xo[An,B,T,D] * stream_out[An,D,Do] if num_streams
    x[B,T,D] = mean_stream(streams[A,B,T,D], xa[An,B,T,Do]) if num_streams
    hf[B,T,D] = norm(x[B,T,D], final_norm[D]) if final_norm
    hf[B,T,D] = copy(x[B,T,D]) if !final_norm
"""

BEFORE_MTP = """
    en[B,T,D] = norm(xm[B,T,D], token_norm[D])
    hn[B,T,D] = norm(hf[B,T,D], stream_norm[D])
    j[B,T,Dj] = join(en[B,T,D], hn[B,T,D])
    x[B,T,D] = j[B,T,Dj] * w_join[Dj,D]
"""
AFTER_MTP = """
    hm[B,T,D] = norm(x2[B,T,D], end_norm[D])
"""
"""The lines before and after the layer that predicts the token after the next, from the embedding xm of the next token
and the main model's result hf. Source: DeepSeek-V3, section 2.2, with the parts in the order of published weights."""

LOSS = """
    hf~s[B,T,D] = scaled(hf[B,T,D]; by={by}) if divided
    loss[] = linear_cross_entropy(hf~[B,T,D], {table}, labels[B,T]{bias}{given})
"""


def written(model: Model, text: str, **names: str | bool) -> str:
    """Returns the lines of a text that apply to a model, with its names filled in.

    A line may end in ``if`` and words, fields of the model or flags among ``names``: each must be true, or false after
    ``!``. ``{name}`` stands for one of ``names``; ``{h}`` and ``{h1}`` for the stream after its norm, or the stream
    itself in a model without ``pre_norms``; ``{mlp_x}`` for the stream that the feed-forward block reads. On the left
    ``q~b`` is the variable qb; on the right ``q~`` is the last variable made from q so far, or q. ``norm`` becomes the
    model's kind of norm, with a bias in a layer norm that has one.
    """
    mlp_x = "x" if model.parallel_block else "x1"
    h1 = "h" if model.shared_norm else "h1" if model.pre_norms else mlp_x
    names = {
        "h": "h" if model.pre_norms else "x",
        "h1": h1,
        "hr": "hrs" if model.branch_norms else h1,
        "he": "he" if model.branch_norms else h1,
        "root": f"{model.d_model**-0.5}",
        "adds_shared": model.d_ff_shared > 0 and not model.branch_norms,
        "mlp_x": mlp_x,
        "residual": f"{model.residual_multiplier}",
        "scales": model.residual_multiplier != 1,
        "x2": "x3" if model.layer_scale or model.layer_embed_dim else "x2",
        "x4": "x2" if not model.layer_scale else "x4" if model.layer_embed_dim else "x3",
        "half": f"{2**-0.5}",
        "vl": "Vl" if model.layer_vocab_size else "V",
        "activation": "silu" if model.activation == "silu" else "gelu",  # other activations move as many bytes
        "cross_h": "cross_h" if model.pre_norms else "x0",
        "zero": "0" * model.qkv_bias,
        "zero_k": "0" * (model.qkv_bias and model.key_bias),
        **names,
    }
    last_name_of: dict[str, str] = {}
    lines = []
    for line in filter(None, map(str.strip, text.splitlines())):
        content, _, condition = line.partition(" if ")
        truths = ((word.removeprefix("!"), not word.startswith("!")) for word in condition.split())
        if not all(bool(names[word] if word in names else getattr(model, word)) == truth for word, truth in truths):
            continue
        lhs, rhs = content.format(**names).split(" = ")
        rhs = re.sub(r"(\w+)~", lambda match: last_name_of.get(match[1], match[1]), rhs)
        if model.norm == "layer_norm" and model.norm_bias:
            rhs = re.sub(r"\bnorm\((.*), (\w+)\[D\]", r"norm(\1, \2[D], \2_bias[D]", rhs)
        name, dims = lhs.replace("~", "").split("[")
        last_name_of[lhs.split("~")[0]] = name
        lines.append(f"{name}[{dims} = {re.sub(r'^norm', model.norm, rhs)}\n")
    return "".join(lines)


def embed_text(model: Model) -> str:
    """Returns the lines of the embedding, from tokens to x."""
    multiplier = model.embed_multiplier if model.embed_multiplier != 1 else ""
    names = {"sum": "es" if model.embed_norm else "x"}
    names["embedded"] = "e" if model.learned_positions else names["sum"]
    names["first"] = EMBEDDED[0] if model.layer_embed_dim else names["embedded"]
    scale_text = given_attributes(scale="sqrt(D)" if model.embed_scale else multiplier)
    return written(model, EMBED, scale=scale_text, **names)


def loss_text(model: Model, options: ProgramOptions) -> str:
    """Returns the lines of the loss head, from the stream hf after its norm to the loss."""
    table_text = "embed[V,D]" if model.tied_embeddings else "unembed[D,V]"
    attribute_text = given_attributes(softcap=model.logit_softcap, z_loss=options.z_loss)
    bias_text, factor = ", unembed_bias[V]" * model.logit_bias, model.logit_multiplier / model.logit_divisor
    names = {"table": table_text, "bias": bias_text, "given": attribute_text, "by": f"{factor}"}
    return written(model, LOSS, **names, divided=factor != 1)


def mask_data(model: Model, options: ProgramOptions) -> tuple[str, ...]:
    """Returns the names of the arrays that the decoder's mask reads of each sequence, such as document numbers."""
    data_names = mask_named(model.attention_mask).data if model.attention_mask else ()
    return data_names if "documents" in data_names or not options.documents else (*data_names, "documents")


class LayerForm(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between layers: ``sliding`` limits attention to the window, ``routed`` makes the feed-forward block
    experts, ``rotates`` adds rope, ``sparse`` bounds gates; ``wide`` gives the feed-forward block the larger width."""

    sliding: bool
    routed: bool
    rotates: bool
    sparse: bool = False
    wide: bool = False


def layer_text(model: Model, form: LayerForm, options: ProgramOptions) -> str:
    """Returns the lines of one layer, from x to x2, or from and to all residual streams."""
    sliding, routed, rotates = form.sliding, form.routed, form.rotates
    data_text = "".join(f", {name}[{','.join(MASK_DATA[name])}]" for name in mask_data(model, options))
    # norms and adapters come between the products and their sum
    joins = model.parallel_block and not (routed or model.post_norms or model.sum_norms or model.lora or model.encoder)
    if model.latent_attention:
        attribute_text = given_attributes(mask=_quoted(model.attention_mask), score=_quoted(model.attention_score))
        names = {"others": data_text + attribute_text, "pq": "p" if model.query_temper else "r", **sums(model, "x1")}
        text = written(model, LATENT_ATTENTION + AFTER_ATTENTION, **names, joins=joins)
    else:
        result_name = "" if joins else "x0" if model.encoder else "x1"
        text = _attention(model, result_name, sliding=sliding, data=data_text, rotates=rotates)
    if model.encoder:
        mask, lengths_text = PADDED * options.encoder_lengths, f", {ENCODER_LENGTHS}[B]" * options.encoder_lengths
        given_text = lengths_text + given_attributes(sees_all=True, softcap=model.attention_softcap, mask=mask)
        text += written(model, CROSS_ATTENTION, given=given_text, **sums(model, "x1"))
    if not routed:
        text = written(model, STREAMS) + text + _dense(model, joins, sparse=form.sparse)
        return with_adapters(model, text + written(model, LAYER_END))
    capacity_factor = options.capacity_factor
    is_corrected = model.router_correction
    correction_rate = options.correction_rate if is_corrected and not has_frozen_matrices(model) else 0.0
    loss_weights = {"balance": options.balance_loss, "z": options.router_z_loss}
    routing_text = given_attributes(**loss_weights, capacity=capacity_factor, correction_rate=correction_rate)
    attribute_text = given_attributes(capacity=capacity_factor)
    texts = {"correction": ", router_correction[E]" * is_corrected, "routing": routing_text, "capacity": attribute_text}
    text += written(model, EXPERTS + LAYER_END, **texts)
    return with_adapters(model, text)


def with_dims(text: str, dim_of: Mapping[str, str], *, but: Collection[str]) -> str:
    """Returns the lines of a layer with dims renamed by ``dim_of``. Arrays with such a dim get the suffix `FULL`,
    k_full[Hf] for k[H], as k is a variable of layers with the old dims; names in ``but``, of weights, stay."""

    def renamed(match: re.Match[str]) -> str:
        dims = match[2].split(",")
        has_other = match[1] not in but and not dim_of.keys().isdisjoint(dims)
        return f"{match[1]}{FULL * has_other}[{','.join(dim_of.get(dim, dim) for dim in dims)}]"

    return re.sub(r"(\w+)\[([^\]]*)\]", renamed, text) if dim_of else text


def without_keys(text: str) -> str:
    """Returns the lines of a layer without its own keys and values, for a layer that reads an earlier layer's."""
    return re.sub(r"^([kv]\w*|w[kv]_lora_\w*)\[.*\n", "", text, flags=re.MULTILINE)


def shared_keys(sliding: bool) -> dict[str, str]:
    """Maps the names of attention's keys and values in a layer's lines to the names under which layers share them."""
    kind_name = "_local" * sliding
    return {f"{name}{full}": f"shared_{name[0]}{kind_name}" for name in ("kr", "v") for full in ("", FULL)}


ADAPTER = """
    {a}_low[B,T,Ra] = {x}[{x_dims}] * {a}[{inputs},Ra]
    {a}_scaled[B,T,Ra] = scaled({a}_low[B,T,Ra]; by={scale})
"""

ADAPTED = """
    {out}_base[{out_dims}] = {x}[{x_dims}] * {w}[{w_dims}]
    {out}_up[{out_dims}] = {a}_scaled[B,T,Ra] * {w}_lora_b[Ra,{outputs}]
    {out}[{out_dims}] = add({out}_base[{out_dims}], {out}_up[{out_dims}])
"""
"""A product whose weight has an adapter: y = x W + (alpha / r) (x A) B. Source: Hu et al., LoRA (2021)."""


def with_adapters(model: Model, text: str) -> str:
    """Returns the lines of a layer with the adapters of the model. Products with a quantised base become the op
    quantised_einsum; products that share an A compute x A once."""
    adapter_of, lines = adapted(model), list[str]()
    for line in text.splitlines(keepends=True):
        match = _PRODUCT.match(line)
        if match is None or match[5] not in adapter_of:
            lines.append(line)
            continue
        out, out_dims, x, x_dims, w, w_dims = match.groups()
        in_dims = [dim for dim in w_dims.split(",") if dim in x_dims.split(",")]
        text_by_name: dict[str, str] = {
            "outputs": ",".join(dim for dim in w_dims.split(",") if dim not in in_dims),
            **{"out": out, "out_dims": out_dims, "x": x, "x_dims": x_dims, "w": w, "w_dims": w_dims},
            **{"a": adapter_of[w], "inputs": ",".join(in_dims), "scale": repr(model.lora.scale if model.lora else 1.0)},
        }
        if f"{adapter_of[w]}_low[" not in "".join(lines):
            lines.append(written(model, ADAPTER, **text_by_name))
        lines.append(written(model, ADAPTED, **text_by_name))
    scale_weight_by_name = {row.name.removeprefix("layers."): row for row in weight_table(model) if row.part == "scale"}

    def quantised(found: re.Match[str]) -> str:
        scale_row = scale_weight_by_name.get(f"{found[5]}_scale")
        if scale_row is None:
            return found[0]
        operands_text = f"{found[3]}[{found[4]}], {found[5]}[{found[6]}], {found[5]}_scale[{','.join(scale_row.dims)}]"
        return f"{found[1]}[{found[2]}] = quantised_einsum({operands_text})"

    return _PRODUCT.sub(quantised, "".join(lines))


def encoder_layer_text(model: Model, options: ProgramOptions) -> str:
    """Returns the lines of one layer of the encoder: every position sees every other, and the feed-forward is dense."""
    attention_text = _attention(model, "x1", data=", lengths[B]" * options.encoder_lengths, causal=False)
    return attention_text + _dense(model, joins=False)


def _attention(
    model: Model,
    result_name: str,
    *,
    sliding: bool = False,
    data: str = "",
    causal: bool = True,
    rotates: bool = True,
) -> str:
    """Returns the lines of attention from the stream x to the stream ``result_name``, or if that is "" to the output
    projection; qr, kr and v enter attention."""
    # where neither bias nor norm nor rope follows, the products themselves have the names that policies keep
    has_qk_norm = model.qk_norm or model.head_qk_norm
    rotates = rotates and model.rotated_width > 0
    tempers = model.query_temper > 0 and not (model.temper_unrotated and rotates)
    has_unit_norm = model.qk_unit_norm and rotates
    is_bare = not (rotates or has_qk_norm)
    is_relative = model.relative_buckets > 0
    operand_text = data + ", sinks[N]" * (model.attention_sinks and causal) + ", relative_bias[R,N]" * is_relative
    attribute_text = given_attributes(
        sees_all=not causal,
        window=model.sliding_window if sliding else None,
        chunked=model.chunked_windows and sliding,
        softcap=model.attention_softcap,
        mask=_quoted(model.attention_mask) if causal else PADDED * bool(data),
        score=_quoted(model.attention_score) if causal else None,
        distance=model.relative_distance if is_relative else None,
    )
    return written(
        model,
        ATTENTION + AFTER_ATTENTION,
        zero="0" * (model.qkv_bias or model.value_norm),
        vb="b" * model.value_norm,
        from_keys=model.values_from_keys and not sliding,
        bare="r" * (is_bare and not (model.qkv_bias or tempers)),
        bare_k="r" * (is_bare and not (model.qkv_bias and model.key_bias)),
        b="b" if has_qk_norm or rotates else "r",
        bq="b" if has_qk_norm or rotates or tempers else "r",
        n="n" if rotates else "r",
        p="p" if model.qk_norm_last or has_unit_norm else "r",
        pq="p" if model.qk_norm_last or has_unit_norm or tempers else "r",
        rotates=rotates,
        tempers=tempers,
        has_unit_norm=has_unit_norm,
        others=operand_text + attribute_text,
        **sums(model, result_name),
        joins=not result_name,
    )


def _quoted(rule: str) -> str:
    """Returns a rule as the value of an attribute: without spaces, and with : for commas, which separate attributes."""
    return rule.replace(" ", "").replace(",", ":")


def _dense(model: Model, joins: bool, *, sparse: bool = False) -> str:
    names = {"y": "a", "before": "x"} if joins else {"y": "y", "before": "x1"}
    names |= sums(model, "x3" if model.layer_scale or model.layer_embed_dim else "x2")
    names["bound"] = f"{NormalDist().inv_cdf(model.gate_sparsity)}" if sparse else ""
    return written(model, DENSE, joins=joins, sparse=sparse, **names)


def sums(model: Model, result_name: str) -> dict[str, str]:
    """Maps "x1" to the name of a stream, "sum" to the name of its residual sum: another one if a norm follows it."""
    return {"x1": result_name, "sum": f"{result_name}s" if model.sum_norms else result_name}


def given_attributes(**attributes: float | bool | str | None) -> str:
    """Returns the attributes of a call, "; window=128", without None, 0 and False; a True one is only its name."""
    text = ", ".join(name if value is True else f"{name}={value}" for name, value in attributes.items() if value)
    return f"; {text}" if text else ""
