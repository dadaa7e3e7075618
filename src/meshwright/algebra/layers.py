"""The lines of one transformer layer, for every family: attention with its norms, then dense or routed feed-forward.

Names say what a remat policy may keep: q, k, a, g, u, y and their like are what a matrix product leaves; qr, kr, v
and o are what attention takes and gives, whatever was done to them on the way. `parse_block` reads such lines.
"""

import re
from collections.abc import Mapping

import msgspec

from meshwright.algebra.notation import parse_array
from meshwright.algebra.program import Block, Op, Variable
from meshwright.core.errors import InputError
from meshwright.spec.model import Model

Lines = list[str]

ENCODER, CROSS = "encoder_", "cross_"
"""What names of an encoder's variables and of cross-attention's begin with; the rest is as in a decoder's layer."""

_LINE = re.compile(r"\s*(?P<out>[^=]+?)\s*=\s*(?P<rest>.+?)\s*")
_CALL = re.compile(r"(?P<kind>[a-z_]+)\((?P<args>[^;]*)(?:;(?P<attributes>.*))?\)")
_ARG = re.compile(r"[\w']+\s*\[[^\]]*\]")


class ProgramOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a job asks of the program of its model.

    ``documents``: rows hold several documents, and attention stays inside each. ``z_loss``, ``balance_loss`` and
    ``router_z_loss`` are the weights of these losses beside the cross entropy. ``capacity_factor`` bounds the slots
    of an expert to that many times the mean load; 0 drops nothing.
    """

    documents: bool = False
    z_loss: float = 0.0
    balance_loss: float = 0.0
    router_z_loss: float = 0.0
    capacity_factor: float = 0.0


PLAIN = ProgramOptions()


def layer_lines(model: Model, *, sliding: bool, routed: bool, options: ProgramOptions = PLAIN) -> Lines:
    """One layer from x to x2; ``sliding`` limits its attention to the window, ``routed`` gives it experts."""
    documents = options.documents
    if model.latent_attention:
        attention = latent_attention_lines(model, documents=documents)
    else:
        attention = attention_lines(model, sliding=sliding, documents=documents)
    cross = _cross_lines(model) if model.encoder else []
    lines = _attention_part(model, attention, result="x0" if cross else "x1")
    lines += [*cross, _norm(model, "h1", "x1", "mlp_norm")]
    return [*lines, *(_expert_lines(model, options) if routed else _dense_lines(model))]


def encoder_layer_lines(model: Model) -> Lines:
    """One layer of the encoder: every position sees every other, and the feed-forward is dense."""
    lines = _attention_part(model, attention_lines(model, sliding=False, causal=False), result="x1")
    return [*lines, _norm(model, "h1", "x1", "mlp_norm"), *_dense_lines(model)]


def _attention_part(model: Model, attention: Lines, *, result: str) -> Lines:
    """The stream after self-attention."""
    after, a = _after("a", model, bias="bo", norm="post_attn_norm", has_bias=model.out_bias)
    lines = [_norm(model, "h", "x", "attn_norm"), *attention, *after]
    return [*lines, f"{result}[B,T,D] = add(x[B,T,D], {a}[B,T,D])"]


def _cross_lines(model: Model) -> Lines:
    """Queries of the stream on keys and values of the encoder's result, from x0 to x1."""
    projections = [("q", "cross_h[B,T,D]", "N"), ("k", "encoded[B,S,D]", "K"), ("v", "encoded[B,S,D]", "K")]
    lines = [_norm(model, "cross_h", "x0", "cross_norm")]
    for name, source, heads in projections:
        dims, out = f"{source[source.index('B') : -2]}{heads},H", f"cross_{name}"
        lines.append(f"{out}{'0' * model.qkv_bias}[{dims}] = {source} * cross_w{name}[D,{heads},H]")
        lines += [f"{out}[{dims}] = bias_add({out}0[{dims}], cross_b{name}[{heads},H])"] if model.qkv_bias else []
    has_bias = model.out_bias
    capped = f", softcap={model.attention_softcap}" if model.attention_softcap else ""
    return [
        *lines,
        f"cross_o[B,T,N,H] = attention(cross_q[B,T,N,H], cross_k[B,S,K,H], cross_v[B,S,K,H]; sees_all{capped})",
        "cross_a[B,T,D] = cross_o[B,T,N,H] * cross_wo[N,H,D]",
        *(["cross_ab[B,T,D] = bias_add(cross_a[B,T,D], cross_bo[D])"] if has_bias else []),
        f"x1[B,T,D] = add(x0[B,T,D], cross_a{'b' * has_bias}[B,T,D])",
    ]


def _norm(model: Model, out: str, source: str, name: str) -> str:
    vectors = f"{name}[D], {name}_bias[D]" if model.norm == "layer_norm" else f"{name}[D]"
    return f"{out}[B,T,D] = {model.norm}({source}[B,T,D], {vectors})"


def head_norm_line(model: Model) -> str:
    """The norm before the loss head."""
    return _norm(model, "hf", "x", "final_norm")


def _after(out: str, model: Model, *, bias: str, norm: str, has_bias: bool) -> tuple[Lines, str]:
    """What a product that writes into the stream goes through, and the name it has then."""
    lines, name = [], out
    if has_bias:
        lines.append(f"{out}b[B,T,D] = bias_add({name}[B,T,D], {bias}[D])")
        name = f"{out}b"
    if model.post_norms:
        lines.append(_norm(model, f"{out}n", name, norm))
        name = f"{out}n"
    return lines, name


# -- attention --------------------------------------------------------------------------------------


def attention_lines(model: Model, *, sliding: bool, documents: bool = False, causal: bool = True) -> Lines:
    """Projections, what is done to queries and keys on the way, attention, and the projection back."""
    query, q = _on_the_way(model, "q", "N")
    key, k = _on_the_way(model, "k", "K")
    value = "v0" if model.qkv_bias else "v"
    lines = [
        "q[B,T,N,H] = h[B,T,D] * wq[D,N,H]",
        "k[B,T,K,H] = h[B,T,D] * wk[D,K,H]",
        f"{value}[B,T,K,H] = h[B,T,D] * wv[D,K,H]",
        *query,
        *key,
    ]
    if model.qkv_bias:
        lines.append("v[B,T,K,H] = bias_add(v0[B,T,K,H], bv[K,H])")
    lines += _attention_line(model, q, k, sliding=sliding, documents=documents, causal=causal)
    return [*lines, "a[B,T,D] = o[B,T,N,H] * wo[N,H,D]"]


def _on_the_way(model: Model, name: str, heads: str) -> tuple[Lines, str]:
    """Bias, norm and rotation of queries or keys, those that the model has; the last result is qr or kr."""
    rotates = not (model.learned_positions or model.relative_buckets) and model.family != "gpt2"
    stages = [
        (model.qkv_bias, f"{name}b", "bias_add", f"b{name}[{heads},H]"),
        (model.qk_norm, f"{name}n", "rms_norm", f"{name}_norm[H]"),
        (rotates, f"{name}r", "rope", "positions[B,T]"),
    ]
    used = [(out, kind, other) for has, out, kind, other in stages if has]
    if used:
        used[-1] = (f"{name}r", *used[-1][1:])
    lines, source = [], name
    for out, kind, other in used:
        lines.append(f"{out}[B,T,{heads},H] = {kind}({source}[B,T,{heads},H], {other})")
        source = out
    return lines, source


def _attention_line(model: Model, q: str, k: str, *, sliding: bool, documents: bool, causal: bool) -> Lines:
    relative = model.relative_buckets > 0
    arrays = [f"{q}[B,T,N,H]", f"{k}[B,T,K,H]", "v[B,T,K,H]"]
    arrays += ["positions[B,T]"] if causal or relative else []
    arrays += ["documents[B,T]"] if documents else []
    arrays += ["sinks[N]"] if model.attention_sinks and causal else []
    arrays += ["relative_bias[R,N]"] if relative else []
    attributes = [] if causal else ["sees_all"]
    attributes += [f"window={model.sliding_window}"] if sliding else []
    attributes += [f"softcap={model.attention_softcap}"] if model.attention_softcap else []
    attributes += [f"distance={model.relative_distance}"] if relative else []
    given = f"; {', '.join(attributes)}" if attributes else ""
    return [f"o[B,T,N,H] = {'relative_' * relative}attention({', '.join(arrays)}{given})"]


def latent_attention_lines(model: Model, *, documents: bool = False) -> Lines:
    """Queries, keys and values through low-rank latents; one rotated key part is shared by all heads.

    Source: DeepSeek-V2, section 2.1.
    """
    has_bias = model.qkv_bias
    more = ", documents[B,T]" if documents else ""
    query = ["q[B,T,N,H] = h[B,T,D] * wq[D,N,H]"]
    if model.q_lora_rank:
        query = [
            "cq[B,T,Rq] = h[B,T,D] * wq_a[D,Rq]",
            *_bias("cq", "Rq", "bq_a", has_bias=has_bias),
            f"cqn[B,T,Rq] = rms_norm({_biased('cq', has_bias)}[B,T,Rq], q_a_norm[Rq])",
            "q[B,T,N,H] = cqn[B,T,Rq] * wq_b[Rq,N,H]",
        ]
    return [
        *query,
        "ckv[B,T,Rkv] = h[B,T,D] * wkv_a[D,Rkv]",
        *_bias("ckv", "Rkv", "bkv_a", has_bias=has_bias),
        f"ckvn[B,T,Rkv] = rms_norm({_biased('ckv', has_bias)}[B,T,Rkv], kv_a_norm[Rkv])",
        "kp[B,T,Hr] = h[B,T,D] * wk_rope[D,Hr]",
        *_bias("kp", "Hr", "bk_rope", has_bias=has_bias),
        "kn[B,T,N,Hn] = ckvn[B,T,Rkv] * wk_b[Rkv,N,Hn]",
        "v[B,T,N,Hv] = ckvn[B,T,Rkv] * wv_b[Rkv,N,Hv]",
        "qr[B,T,N,H] = rope(q[B,T,N,H], positions[B,T])",
        f"kpr[B,T,Hr] = rope({_biased('kp', has_bias)}[B,T,Hr], positions[B,T])",
        "kr[B,T,N,H] = join_heads(kn[B,T,N,Hn], kpr[B,T,Hr])",
        f"o[B,T,N,Hv] = attention(qr[B,T,N,H], kr[B,T,N,H], v[B,T,N,Hv], positions[B,T]{more})",
        "a[B,T,D] = o[B,T,N,Hv] * wo[N,Hv,D]",
    ]


def _biased(name: str, has_bias: bool) -> str:
    return f"{name}b" if has_bias else name


def _bias(name: str, dim: str, bias: str, *, has_bias: bool) -> Lines:
    return [f"{name}b[B,T,{dim}] = bias_add({name}[B,T,{dim}], {bias}[{dim}])"] if has_bias else []


# -- feed-forward -----------------------------------------------------------------------------------


def _dense_lines(model: Model) -> Lines:
    has_bias = model.mlp_bias
    after, y = _after("y", model, bias="b_down", norm="post_mlp_norm", has_bias=has_bias)
    gate = ["g[B,T,F] = h1[B,T,D] * w_gate[D,F]"] if model.gated else []
    gate_bias = _bias("g", "F", "b_gate", has_bias=has_bias) if model.gated else []
    return [
        *gate,
        "u[B,T,F] = h1[B,T,D] * w_up[D,F]",
        *gate_bias,
        *_bias("u", "F", "b_up", has_bias=has_bias),
        _activation(model, "m", _biased("g", has_bias), _biased("u", has_bias), "B,T,F"),
        "y[B,T,D] = m[B,T,F] * w_down[F,D]",
        *after,
        f"x2[B,T,D] = add(x1[B,T,D], {y}[B,T,D])",
    ]


def _activation(model: Model, out: str, gate: str, up: str, dims: str) -> str:
    """Every activation but silu is priced as gelu: both stream their inputs once."""
    kind = "silu" if model.activation == "silu" else "gelu"
    if model.gated:
        return f"{out}[{dims}] = {kind}_mul({gate}[{dims}], {up}[{dims}])"
    return f"{out}[{dims}] = gelu({up}[{dims}])"


def _expert_lines(model: Model, options: ProgramOptions) -> Lines:
    """Routed experts, E of C slots each, beside the shared ones that see every token."""
    has_bias = model.mlp_bias
    shared, outputs = _shared_lines(model) if model.d_ff_shared else ([], [])
    after, y = _after("y", model, bias="", norm="post_mlp_norm", has_bias=False)
    return [
        *_router_lines(model, options),
        f"xe[E,C,D] = dispatch(h1[B,T,D], gates[B,T,Ea]{_given(capacity=options.capacity_factor)})",
        "ge[E,C,Fe] = xe[E,C,D] * experts_w_gate[E,D,Fe]",
        "ue[E,C,Fe] = xe[E,C,D] * experts_w_up[E,D,Fe]",
        *_expert_bias("ge", "Fe", "experts_b_gate", has_bias=has_bias),
        *_expert_bias("ue", "Fe", "experts_b_up", has_bias=has_bias),
        _activation(model, "me", _biased("ge", has_bias), _biased("ue", has_bias), "E,C,Fe"),
        "ye[E,C,D] = me[E,C,Fe] * experts_w_down[E,Fe,D]",
        *_expert_bias("ye", "D", "experts_b_down", has_bias=has_bias),
        f"y[B,T,D] = combine({_biased('ye', has_bias)}[E,C,D], gates[B,T,Ea])",
        *shared,
        *after,
        f"x2[B,T,D] = add({', '.join(f'{name}[B,T,D]' for name in ('x1', y, *outputs))})",
    ]


def _router_lines(model: Model, options: ProgramOptions) -> Lines:
    given = _given(balance=options.balance_loss, z=options.router_z_loss, capacity=options.capacity_factor)
    scores = ["r[B,T,E] = h1[B,T,D] * router[D,E]"]
    scores += _bias("r", "E", "router_bias", has_bias=model.router_bias)
    return [*scores, f"gates[B,T,Ea] = route({_biased('r', model.router_bias)}[B,T,E]{given})"]


def _given(**attributes: float) -> str:
    """Those that are not 0, as they stand at the end of a call."""
    found = ", ".join(f"{name}={value}" for name, value in attributes.items() if value)
    return f"; {found}" if found else ""


def _expert_bias(name: str, dim: str, bias: str, *, has_bias: bool) -> Lines:
    return [f"{name}b[E,C,{dim}] = bias_add({name}[E,C,{dim}], {bias}[E,{dim}])"] if has_bias else []


def _shared_lines(model: Model) -> tuple[Lines, Lines]:
    """The shared experts as one dense feed-forward of their joint width, and the name of what they give."""
    lines = [
        "gs[B,T,Fs] = h1[B,T,D] * shared_w_gate[D,Fs]",
        "us[B,T,Fs] = h1[B,T,D] * shared_w_up[D,Fs]",
        _activation(model, "ms", "gs", "us", "B,T,Fs"),
        "ys[B,T,D] = ms[B,T,Fs] * shared_w_down[Fs,D]",
    ]
    if not model.shared_expert_gate:
        return lines, ["ys"]
    return [*lines, "ysg[B,T,D] = token_gate(ys[B,T,D], h1[B,T,D], shared_gate[D])"], ["ysg"]


# -- lines read -----------------------------------------------------------------------------------------------


def parse_block(
    name: str,
    text: str,
    variables: dict[str, Variable],
    *,
    repeat: int = 1,
    last_turn: int = 1,
    carry: str = "",
    result: str = "",
    renamed: Mapping[str, str] = {},
) -> Block:
    """The block written as lines ``q[B,T,N,H] = h[B,T,D] * wq[D,N,H]`` or ``o[..] = attention(q[..], ..; window=8)``.

    Every variable is entered in ``variables`` as an activation unless it is there already with its role.
    ``renamed`` gives names of the text another name in the program: weights of two blocks are two variables.
    Raises InputError when a line cannot be read or a variable is used with other dims than before.
    """
    ops = [_parse_line(line, variables, renamed) for line in text.strip().splitlines() if line.strip()]
    return Block(name, tuple(ops), repeat, carry, result, last_turn)


def _parse_line(line: str, variables: dict[str, Variable], renamed: Mapping[str, str]) -> Op:
    match = _LINE.fullmatch(line)
    if match is None:
        raise InputError(f"program line {line.strip()!r} is not 'out[dims] = ...'.")
    rest = match["rest"]
    call = _CALL.fullmatch(rest)
    kind, args = (call["kind"], call["args"]) if call else ("einsum", rest)
    inputs = tuple(_enter(found, variables, renamed) for found in _ARG.findall(args))
    if kind == "einsum" and len(inputs) != 2:
        raise InputError(f"program line {line.strip()!r} is not a product of two arrays.")
    attributes = _parse_attributes(call["attributes"] or "") if call else ()
    return Op(kind, inputs, _enter(match["out"], variables, renamed), attributes)


def _parse_attributes(text: str) -> tuple[tuple[str, str], ...]:
    """``"window=128, sinks"`` -> (("window", "128"), ("sinks", "true"))."""
    pairs = (part.strip().partition("=") for part in text.split(",") if part.strip())
    return tuple((name.strip(), value.strip() or "true") for name, _, value in pairs)


def _enter(text: str, variables: dict[str, Variable], renamed: Mapping[str, str]) -> str:
    array = parse_array(text)
    name = renamed.get(array.name, array.name)
    known = variables.get(name)
    if known is None:
        variables[name] = Variable(name, array.dims, "activation")
    elif known.dims != array.dims:
        raise InputError(f"{name} has dims {list(known.dims)} and is used as {text.strip()}.")
    return name
