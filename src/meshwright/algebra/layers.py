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


class _Lines(list[str]):
    """The lines of a block, written in order."""

    def through(self, name: str, dims: str, *changes: tuple[bool, str, str, str]) -> str:
        """Adds the changes of an array that the model has, and returns the name of the last.

        A change is whether the model has it, the name of its result, the kind of its op, and its further inputs.
        """
        for applies, out, kind, others in changes:
            if applies:
                self.append(f"{out}[{dims}] = {kind}({name}[{dims}], {others})")
                name = out
        return name

    def norm(self, model: Model, out: str, source: str, name: str) -> None:
        """Adds a norm of the stream."""
        self.through(source, "B,T,D", (True, out, *_norm(model, name)))

    def into_stream(self, model: Model, name: str, *, bias: str, norm: str, has_bias: bool) -> str:
        """Adds the bias and the norm of a product that writes into the stream; the name that it has then."""
        changes = (has_bias, f"{name}b", "bias_add", f"{bias}[D]"), (model.post_norms, f"{name}n", *_norm(model, norm))
        return self.through(name, "B,T,D", *changes)


def _norm(model: Model, name: str) -> tuple[str, str]:
    """The kind of a model's norms, and the vectors of the one of this name."""
    return model.norm, f"{name}[D], {name}_bias[D]" if model.norm == "layer_norm" else f"{name}[D]"


def layer_lines(model: Model, *, sliding: bool, routed: bool, options: ProgramOptions = PLAIN) -> Lines:
    """One layer from x to x2; ``sliding`` limits its attention to the window, ``routed`` gives it experts."""
    lines = _Lines()
    _self_attention(lines, model, "x0" if model.encoder else "x1", sliding=sliding, documents=options.documents)
    if model.encoder:
        _cross_attention(lines, model)
    lines.norm(model, "h1", "x1", "mlp_norm")
    if routed:
        _experts(lines, model, options)
    else:
        _dense(lines, model)
    return lines


def encoder_layer_lines(model: Model) -> Lines:
    """One layer of the encoder: every position sees every other, and the feed-forward is dense."""
    lines = _Lines()
    _self_attention(lines, model, "x1", causal=False)
    lines.norm(model, "h1", "x1", "mlp_norm")
    _dense(lines, model)
    return lines


def head_norm_line(model: Model) -> str:
    """The norm before the loss head."""
    lines = _Lines()
    lines.norm(model, "hf", "x", "final_norm")
    return lines[0]


def given_attributes(**attributes: float | bool | None) -> str:
    """The end of a call: those attributes that the model has, " ; window=128"; a flag by its name alone."""
    found = (name if value is True else f"{name}={value}" for name, value in attributes.items() if value)
    text = ", ".join(found)
    return f"; {text}" if text else ""


# -- attention --------------------------------------------------------------------------------------


def _self_attention(
    lines: _Lines, model: Model, result: str, *, sliding: bool = False, documents: bool = False, causal: bool = True
) -> None:
    """From the stream x to the result in the stream."""
    lines.norm(model, "h", "x", "attn_norm")
    if model.latent_attention:
        _latent_attention(lines, model, documents=documents)
    else:
        _plain_attention(lines, model, sliding=sliding, documents=documents, causal=causal)
    a = lines.into_stream(model, "a", bias="bo", norm="post_attn_norm", has_bias=model.out_bias)
    lines.append(f"{result}[B,T,D] = add(x[B,T,D], {a}[B,T,D])")


def _cross_attention(lines: _Lines, model: Model) -> None:
    """Queries of the stream on keys and values of the encoder's result, from x0 to x1."""
    lines.norm(model, "cross_h", "x0", "cross_norm")
    for name, source, heads in (
        ("q", "cross_h[B,T,D]", "N"),
        ("k", "encoded[B,S,D]", "K"),
        ("v", "encoded[B,S,D]", "K"),
    ):
        dims = f"B,{'T' if name == 'q' else 'S'},{heads},H"
        made = f"cross_{name}{'0' * model.qkv_bias}"
        lines.append(f"{made}[{dims}] = {source} * cross_w{name}[D,{heads},H]")
        lines.through(made, dims, (model.qkv_bias, f"cross_{name}", "bias_add", f"cross_b{name}[{heads},H]"))
    given = given_attributes(sees_all=True, softcap=model.attention_softcap)
    lines.append(f"cross_o[B,T,N,H] = attention(cross_q[B,T,N,H], cross_k[B,S,K,H], cross_v[B,S,K,H]{given})")
    lines.append("cross_a[B,T,D] = cross_o[B,T,N,H] * cross_wo[N,H,D]")
    a = lines.through("cross_a", "B,T,D", (model.out_bias, "cross_ab", "bias_add", "cross_bo[D]"))
    lines.append(f"x1[B,T,D] = add(x0[B,T,D], {a}[B,T,D])")


def _plain_attention(lines: _Lines, model: Model, *, sliding: bool, documents: bool, causal: bool) -> None:
    """Projections, what is done to queries and keys on the way, attention, and the projection back."""
    value = "v0" if model.qkv_bias else "v"
    lines += [
        "q[B,T,N,H] = h[B,T,D] * wq[D,N,H]",
        "k[B,T,K,H] = h[B,T,D] * wk[D,K,H]",
        f"{value}[B,T,K,H] = h[B,T,D] * wv[D,K,H]",
    ]
    q, k = (_rotated(lines, model, *one) for one in (("q", "N"), ("k", "K")))
    lines.through(value, "B,T,K,H", (model.qkv_bias, "v", "bias_add", "bv[K,H]"))
    relative = model.relative_buckets > 0
    others = {
        "positions[B,T]": causal or relative,
        "documents[B,T]": documents,
        "sinks[N]": model.attention_sinks and causal,
        "relative_bias[R,N]": relative,
    }
    arrays = [
        f"{q}[B,T,N,H]",
        f"{k}[B,T,K,H]",
        "v[B,T,K,H]",
        *(array for array, is_there in others.items() if is_there),
    ]
    given = given_attributes(
        sees_all=not causal,
        window=model.sliding_window if sliding else None,
        softcap=model.attention_softcap,
        distance=model.relative_distance if relative else None,
    )
    lines.append(f"o[B,T,N,H] = {'relative_' * relative}attention({', '.join(arrays)}{given})")
    lines.append("a[B,T,D] = o[B,T,N,H] * wo[N,H,D]")


def _rotated(lines: _Lines, model: Model, name: str, heads: str) -> str:
    """Bias, norm and rotation of queries or keys, those that the model has; the last result is qr or kr."""
    rotates = not (model.learned_positions or model.relative_buckets) and model.family != "gpt2"
    return lines.through(
        name,
        f"B,T,{heads},H",
        (model.qkv_bias, f"{name}{'b' if model.qk_norm or rotates else 'r'}", "bias_add", f"b{name}[{heads},H]"),
        (model.qk_norm, f"{name}{'n' if rotates else 'r'}", "rms_norm", f"{name}_norm[H]"),
        (rotates, f"{name}r", "rope", "positions[B,T]"),
    )


def _latent_attention(lines: _Lines, model: Model, *, documents: bool) -> None:
    """Queries, keys and values through low-rank latents; one rotated key part is shared by all heads.

    Source: DeepSeek-V2, section 2.1.
    """
    has_bias = model.qkv_bias
    if model.q_lora_rank:
        lines.append("cq[B,T,Rq] = h[B,T,D] * wq_a[D,Rq]")
        bias = (has_bias, "cqb", "bias_add", "bq_a[Rq]")
        lines.through("cq", "B,T,Rq", bias, (True, "cqn", "rms_norm", "q_a_norm[Rq]"))
        lines.append("q[B,T,N,H] = cqn[B,T,Rq] * wq_b[Rq,N,H]")
    else:
        lines.append("q[B,T,N,H] = h[B,T,D] * wq[D,N,H]")
    lines.append("ckv[B,T,Rkv] = h[B,T,D] * wkv_a[D,Rkv]")
    bias = (has_bias, "ckvb", "bias_add", "bkv_a[Rkv]")
    lines.through("ckv", "B,T,Rkv", bias, (True, "ckvn", "rms_norm", "kv_a_norm[Rkv]"))
    lines.append("kp[B,T,Hr] = h[B,T,D] * wk_rope[D,Hr]")
    kp = lines.through("kp", "B,T,Hr", (has_bias, "kpb", "bias_add", "bk_rope[Hr]"))
    lines += [
        "kn[B,T,N,Hn] = ckvn[B,T,Rkv] * wk_b[Rkv,N,Hn]",
        "v[B,T,N,Hv] = ckvn[B,T,Rkv] * wv_b[Rkv,N,Hv]",
        "qr[B,T,N,H] = rope(q[B,T,N,H], positions[B,T])",
        f"kpr[B,T,Hr] = rope({kp}[B,T,Hr], positions[B,T])",
        "kr[B,T,N,H] = join_heads(kn[B,T,N,Hn], kpr[B,T,Hr])",
        "o[B,T,N,Hv] = attention(qr[B,T,N,H], kr[B,T,N,H], v[B,T,N,Hv], positions[B,T]"
        f"{', documents[B,T]' * documents})",
        "a[B,T,D] = o[B,T,N,Hv] * wo[N,Hv,D]",
    ]


# -- feed-forward -----------------------------------------------------------------------------------


def _dense(lines: _Lines, model: Model) -> None:
    """The feed-forward of every token, from h1 to x2."""
    has_bias = model.mlp_bias
    if model.gated:
        lines.append("g[B,T,F] = h1[B,T,D] * w_gate[D,F]")
    lines.append("u[B,T,F] = h1[B,T,D] * w_up[D,F]")
    gate = lines.through("g", "B,T,F", (has_bias and model.gated, "gb", "bias_add", "b_gate[F]"))
    up = lines.through("u", "B,T,F", (has_bias, "ub", "bias_add", "b_up[F]"))
    lines.append(_activation(model, "m", gate, up, "B,T,F"))
    lines.append("y[B,T,D] = m[B,T,F] * w_down[F,D]")
    y = lines.into_stream(model, "y", bias="b_down", norm="post_mlp_norm", has_bias=has_bias)
    lines.append(f"x2[B,T,D] = add(x1[B,T,D], {y}[B,T,D])")


def _activation(model: Model, out: str, gate: str, up: str, dims: str) -> str:
    """Every activation but silu is priced as gelu: both stream their inputs once."""
    kind = "silu" if model.activation == "silu" else "gelu"
    if model.gated:
        return f"{out}[{dims}] = {kind}_mul({gate}[{dims}], {up}[{dims}])"
    return f"{out}[{dims}] = gelu({up}[{dims}])"


def _experts(lines: _Lines, model: Model, options: ProgramOptions) -> None:
    """Routed experts, E of C slots each, beside the shared ones that see every token."""
    has_bias, capacity = model.mlp_bias, options.capacity_factor
    lines.append("r[B,T,E] = h1[B,T,D] * router[D,E]")
    r = lines.through("r", "B,T,E", (model.router_bias, "rb", "bias_add", "router_bias[E]"))
    given = given_attributes(balance=options.balance_loss, z=options.router_z_loss, capacity=capacity)
    lines += [
        f"gates[B,T,Ea] = route({r}[B,T,E]{given})",
        f"xe[E,C,D] = dispatch(h1[B,T,D], gates[B,T,Ea]{given_attributes(capacity=capacity)})",
        "ge[E,C,Fe] = xe[E,C,D] * experts_w_gate[E,D,Fe]",
        "ue[E,C,Fe] = xe[E,C,D] * experts_w_up[E,D,Fe]",
    ]
    gate = lines.through("ge", "E,C,Fe", (has_bias, "geb", "bias_add", "experts_b_gate[E,Fe]"))
    up = lines.through("ue", "E,C,Fe", (has_bias, "ueb", "bias_add", "experts_b_up[E,Fe]"))
    lines.append(_activation(model, "me", gate, up, "E,C,Fe"))
    lines.append("ye[E,C,D] = me[E,C,Fe] * experts_w_down[E,Fe,D]")
    ye = lines.through("ye", "E,C,D", (has_bias, "yeb", "bias_add", "experts_b_down[E,D]"))
    lines.append(f"y[B,T,D] = combine({ye}[E,C,D], gates[B,T,Ea])")
    shared = _shared_experts(lines, model) if model.d_ff_shared else ""
    y = lines.into_stream(model, "y", bias="", norm="post_mlp_norm", has_bias=False)
    lines.append(f"x2[B,T,D] = add(x1[B,T,D], {y}[B,T,D]{f', {shared}[B,T,D]' if shared else ''})")


def _shared_experts(lines: _Lines, model: Model) -> str:
    """The shared experts as one dense feed-forward of their joint width; the name of what they give."""
    lines += [
        "gs[B,T,Fs] = h1[B,T,D] * shared_w_gate[D,Fs]",
        "us[B,T,Fs] = h1[B,T,D] * shared_w_up[D,Fs]",
        _activation(model, "ms", "gs", "us", "B,T,Fs"),
        "ys[B,T,D] = ms[B,T,Fs] * shared_w_down[Fs,D]",
    ]
    gate = (model.shared_expert_gate, "ysg", "token_gate", "h1[B,T,D], shared_gate[D]")
    return lines.through("ys", "B,T,D", gate)


# -- lines read -----------------------------------------------------------------------------------------------


def parse_block(
    name: str,
    lines: str | Lines,
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
    text = lines if isinstance(lines, str) else "\n".join(lines)
    ops = [_parse_line(line, variables, renamed) for line in text.splitlines() if line.strip()]
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
