"""A model as a layer program: embedding, one block per kind of layer, loss head, and before them the blocks of its
encoder if it has one. Dims of weights are read off the weight table."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import structs
from msgspec.structs import replace

from meshwright.algebra.layers import (
    AFTER_MTP,
    BEFORE_MTP,
    EMBEDDED,
    ENCODED,
    ENCODER,
    ENCODER_LENGTHS,
    FEATURES,
    FINAL_NORM,
    PLAIN,
    LayerForm,
    ProgramOptions,
    embed_text,
    encoder_layer_text,
    layer_text,
    loss_text,
    mask_data,
    shared_keys,
    with_dims,
    without_keys,
    written,
)
from meshwright.algebra.notation import parse_array
from meshwright.algebra.program import Block, Op, Program, Stack, Variable, layers_dim
from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError
from meshwright.spec.model import MASK_DATA, Model
from meshwright.spec.weights import Weight, weight_table

_SPLIT_DIMS = ("N", "K", "Kf", "F", "Fw", "Fe", "Fs", "V", "Nx", "Kx", "Fx", "Dc")
"""A vector over one of these dims, or over several, is sharded as its matrix is; others are whole on every device."""

MAX_PATTERN = 16
"""Longest pattern of layers in one iteration of a loop: the compiled program grows with it."""


class LayerKind(LayerForm, frozen=True, kw_only=True):
    """The layers of one kind, which run one block, whatever their order in the model."""

    block: str
    suffix: str  # added to the names of this block's weights
    layers: tuple[int, ...]
    keys: str = ""  # "source": later layers read its keys and values, "shared": it reads an earlier layer's


@lru_cache(maxsize=256)
def layer_kinds(model: Model) -> tuple[LayerKind, ...]:
    """Returns the kinds of layers in order of their first layer: "layer", then _moe with routed experts, _sparse with
    bounded gates, _wide with the greater of two widths, _unrotated without rope, _source if later layers read its keys
    and values, _shared if it reads those of an earlier layer, _local with a window; at the end _mtp, the layer like the
    last one for the token after the next."""
    layers_by_form: dict[tuple[LayerForm, str], list[int]] = {}
    sources = {layer: model.kv_source(layer) for layer in range(model.num_layers)}
    shared_sources = {source for layer, source in sources.items() if source != layer}
    for layer, source in sources.items():
        keys = "shared" if source != layer else "source" * (layer in shared_sources)
        form = LayerForm(
            sliding=layer in model.sliding_layers,
            routed=layer in model.moe_layers,
            rotates=layer not in model.unrotated_layers,
            sparse=layer in model.sparse_layers,
            wide=layer in model.wide_layers,
        )
        layers_by_form.setdefault((form, keys), []).append(layer)
    kinds = []
    for (form, keys), layers in layers_by_form.items():
        kind_name = f"{'_moe' * form.routed}{'_sparse' * form.sparse}{'_wide' * form.wide}"
        kind_name += f"{'_unrotated' * (not form.rotates)}{f'_{keys}' * bool(keys)}{'_local' * form.sliding}"
        suffix = kind_name if len(layers_by_form) > 1 else ""
        flags: dict[str, Any] = structs.asdict(form) | {"keys": keys}
        kinds.append(LayerKind(block=f"layer{kind_name}", suffix=suffix, layers=tuple(layers), **flags))
    last_kind = next(kind for kind in kinds if model.num_layers - 1 in kind.layers)
    mtp = [replace(last_kind, block="layer_mtp", suffix="_mtp", layers=model.mtp_layers)] if model.mtp_layers else []
    return (*kinds, *mtp)


def layer_names(model: Model) -> tuple[str, ...]:
    """Returns the block of every layer of the main model, first to last."""
    block_of_layer = {layer: kind.block for kind in layer_kinds(model) for layer in kind.layers}
    return tuple(block_of_layer[layer] for layer in range(model.num_layers))


def stage_names(model: Model) -> tuple[str, ...]:
    """Returns the block of every layer that pipeline stages share out, encoder layers first."""
    return (f"{ENCODER}layer",) * (model.encoder.num_layers if model.encoder else 0) + layer_names(model)


def local_name(weight: Weight) -> str:
    """Returns the name of a weight inside its block: ``layers.wq`` -> ``wq``, ``layers.experts.w_up`` ->
    ``experts_w_up``, ``encoder.wq`` -> ``encoder_wq``."""
    return weight.name.removeprefix("layers.").replace(".", "_")


def weight_variables(model: Model) -> dict[str, tuple[Weight, int]]:
    """Maps each variable of the program to its row of the weight table, and the number of layers that have it.

    Where layers are of several kinds, each kind has separate variables: ``wq``, ``wq_moe``.
    """
    row_by_name: dict[str, tuple[Weight, int]] = {}
    for weight in (weight for weight in weight_table(model) if not weight.tied_to):
        if not weight.layers or local_name(weight).startswith(ENCODER):
            row_by_name[local_name(weight)] = (weight, weight.repeat)
            continue
        for kind in layer_kinds(model):
            num_layers = len(set(kind.layers) & set(weight.layers))
            if num_layers:
                row_by_name[local_name(weight) + kind.suffix] = (weight, num_layers)
    return row_by_name


@lru_cache(maxsize=64)
def transformer(model: Model, options: ProgramOptions = PLAIN) -> Program:
    """Returns the training program of a model: embed, layers, head, after the stack of an encoder if it has one.

    With ``mtp_weight`` the loss head is a separate stack, after the layer for the token after the next. Raises
    InputError for documents with an encoder."""
    if model.encoder and options.documents:
        raise InputError("a model with an encoder takes one document a row. Leave documents out.")
    role_by_name = {"tokens": "input", "labels": "input", "positions": "position"}
    variables = {name: Variable(name, MASK_DATA[name], "position") for name in mask_data(model, options)}
    variables |= {name: Variable(name, ("B", "T"), role) for name, role in role_by_name.items()}
    variables["logits"] = Variable("logits", ("B", "T", "V"), "activation")
    for name, (weight, _) in weight_variables(model).items():
        is_split = weight.kind == "matrix" or len(weight.dims) > 1 or not {*weight.dims}.isdisjoint(_SPLIT_DIMS)
        role = "weight" if is_split and weight.part != "buffer" else "vector"
        variables[name] = Variable(name, weight.dims, role, weight.dtype, weight.inputs, weight.frozen)
    encoder_blocks, stacks = _encoder(model, variables, options)
    bias_blocks, bias_stacks = _bias_table(model, variables)
    names, norm_text, loss_lines = layer_names(model), written(model, FINAL_NORM), loss_text(model, options)
    kinds = (kind for kind in layer_kinds(model) if kind.layers != model.mtp_layers)
    blocks = (
        *encoder_blocks,
        *bias_blocks,
        replace(parse_block("embed", embed_text(model), variables), shares=EMBEDDED if model.layer_embed_dim else ()),
        *(_layer_block(model, kind, variables, options, names) for kind in kinds),
    )
    inputs = (*((ENCODED,) if encoder_blocks else ()), *_shared_bias(model).values())
    last_name = "final" if model.mtp_layers else "head"
    decoder = Stack(first="embed", layers=names, last=last_name, carry=carry_of(model), inputs=inputs)
    if not model.mtp_layers:
        return Program(
            (*blocks, parse_block("head", norm_text + loss_lines, variables)),
            variables,
            (*stacks, *bias_stacks, decoder),
        )
    final_block = parse_block("final", norm_text, variables)
    mtp_blocks, mtp_stack = _mtp(model, variables, options)
    head_stack = Stack(first="", layers=(), last="head", carry="hf")
    last_blocks = (final_block, *mtp_blocks, parse_block("head", loss_lines, variables))
    return Program((*blocks, *last_blocks), variables, (*bias_stacks, decoder, mtp_stack, head_stack))


def carry_of(model: Model) -> str:
    """Returns the variable that each layer updates: the residual stream x, or ``streams`` if there are several."""
    return "streams" if model.num_streams else "x"


def _shared_bias(model: Model, prefix: str = "") -> dict[str, str]:
    """Maps a table of biases that all layers of a stack share to the name under which layers read it, from an earlier
    stack that prepares it; {} if each layer has a table."""
    return {f"{prefix}relative_bias": f"{prefix}shared_bias"} if model.relative_shared else {}


def _bias_table(
    model: Model, variables: dict[str, Variable], prefix: str = ""
) -> tuple[tuple[Block, ...], tuple[Stack, ...]]:
    """Returns the block and the stack that prepare the table of biases of all layers of the next stack, if any. Layers
    add to its cotangent, which is summed over devices once."""
    names = _shared_bias(model, prefix).items()
    blocks = [parse_block(f"{prefix}bias", f"{name}[R,N] = copy({table}[R,N])", variables) for table, name in names]
    return tuple(blocks), tuple(Stack(first="", layers=(), last=block.name, carry="") for block in blocks)


def _mtp(
    model: Model, variables: dict[str, Variable], options: ProgramOptions
) -> tuple[tuple[Block, Block, Block], Stack]:
    """Returns the blocks and the stack of the layer for the token after the next: the embedding of the next token is
    its stream, and every layer reads the main model's result hf."""
    variables |= {name: Variable(name, ("B", "T"), "input") for name in ("mtp_tokens", "mtp_labels")}
    renamed = {"tokens": "mtp_tokens", "x": "xm", "hf": "xm", "hfs": "xms", "labels": "mtp_labels", "loss": "mtp_loss"}
    blocks = (
        parse_block("mtp_embed", embed_text(model), variables, renamed=renamed),
        _layer_block(model, layer_kinds(model)[-1], variables, options, ("layer_mtp",)),
        parse_block("mtp_head", loss_text(model, options), variables, renamed=renamed),
    )
    return blocks, Stack(first="mtp_embed", layers=("layer_mtp",), last="mtp_head", carry="xm", inputs=("hf",))


CONVOLUTIONS = """
    f1[B,Sf,Ct,M] = unfold(features[B,M,Sf])
    c1[B,Sf,Dc] = f1[B,Sf,Ct,M] * conv1[Ct,M,Dc]
    c1b[B,Sf,Dc] = bias_add(c1[B,Sf,Dc], conv1_bias[Dc])
    c1m[B,Sf,Dc] = gelu(c1b[B,Sf,Dc])
    f2[B,T,Ct,Dc] = unfold(c1m[B,Sf,Dc]; stride=2)
    c2[B,T,D] = f2[B,T,Ct,Dc] * conv2[Ct,Dc,D]
    c2b[B,T,D] = bias_add(c2[B,T,D], conv2_bias[D])
    e[B,T,D] = gelu(c2b[B,T,D])
"""
"""Two convolutions over three neighbours, as products of unfolded arrays: Radford et al., Whisper (2022)."""


def _encoder(
    model: Model, variables: dict[str, Variable], options: ProgramOptions
) -> tuple[tuple[Block, ...], tuple[Stack, ...]]:
    """Returns the blocks of an encoder and their stack, built from the decoder's lines, renamed, over positions S."""
    if model.encoder is None:
        return (), ()
    tokens, features = Variable(f"{ENCODER}tokens", ("B", "S"), "input"), Variable(FEATURES, ("B", "M", "Sf"), "input")
    positions = Variable(f"{ENCODER}positions", ("B", "S"), "position")
    variables |= {v.name: v for v in (features if model.encoder.features else tokens, positions)}
    if options.encoder_lengths:
        variables[ENCODER_LENGTHS] = Variable(ENCODER_LENGTHS, ("B",), "position")
    first_name, layer_name, last_name, x_name = (f"{ENCODER}{name}" for name in ("embed", "layer", "end", "x"))
    bias_blocks, bias_stacks = _bias_table(model, variables, ENCODER)
    shared_bias = _shared_bias(model, ENCODER)
    embed_lines, depth = embed_text(model), model.encoder.num_layers
    if model.encoder.features:
        embed_lines = written(model, CONVOLUTIONS) + embed_lines.partition("\n")[2]
    decoder_texts = (embed_lines, encoder_layer_text(model, options), written(model, FINAL_NORM))
    embed_lines, layer_lines, end_lines = (_of_encoder(model, text) for text in decoder_texts)
    blocks = (
        *bias_blocks,
        parse_block(first_name, embed_lines, variables),
        parse_block(
            layer_name,
            layer_lines,
            variables,
            repeat=depth,
            carry=x_name,
            result=f"{x_name}2",
            renamed=shared_bias,
        ),
        parse_block(last_name, end_lines, variables, renamed={f"{ENCODER}hf": ENCODED}),
    )
    stack_inputs = tuple(shared_bias.values())
    encoder = Stack(first=first_name, layers=(layer_name,) * depth, last=last_name, carry=x_name, inputs=stack_inputs)
    return blocks, (*bias_stacks, encoder)


def _of_encoder(model: Model, text: str) -> str:
    """Returns a decoder's lines with the encoder's names and dims; both share the table of tokens."""
    letters = {"T": "S", "P": "Ps", **model.encoder_letters}

    def renamed(found: re.Match[str]) -> str:
        name = found[1] if found[1] == "embed" else f"{ENCODER}{found[1]}"
        return f"{name}[{','.join(letters.get(dim, dim) for dim in found[2].split(','))}]"

    return re.sub(r"(\w+)\[([^\]]*)\]", renamed, text)


def layer_dims(model: Model) -> dict[str, int]:
    """Returns, for each kind of layer, the sizes of its dim of layers and of its dim of layers times experts."""
    num_by_dim = {layers_dim(kind.block): len(kind.layers) for kind in layer_kinds(model)}
    if model.encoder:
        num_by_dim[layers_dim(f"{ENCODER}layer")] = model.encoder.num_layers
    return num_by_dim | {f"{dim}E": num * max(model.num_experts, 1) for dim, num in num_by_dim.items()}


def _layer_block(
    model: Model, kind: LayerKind, variables: dict[str, Variable], options: ProgramOptions, names: Sequence[str]
) -> Block:
    """Returns the block of a kind of layers in a stack with layers of these ``names``."""
    text = layer_text(model, kind, options)
    text = without_keys(text) if kind.keys == "shared" else text
    weight_names = {local_name(weight) for weight in weight_table(model) if weight.layers}
    text = with_dims(text, model.dims_of_layer(kind.layers[0]), but=weight_names)
    is_mtp = kind.layers == model.mtp_layers
    name_of_keys = shared_keys(kind.sliding) if kind.keys else {}
    block = parse_block(
        kind.block,
        written(model, BEFORE_MTP) + text + written(model, AFTER_MTP) if is_mtp else text,
        variables,
        repeat=len(kind.layers),
        num_in_last_iterations=sum(span.pattern.count(kind.block) for span in spans(names)),
        carry="xm" if is_mtp else carry_of(model),
        result="hm" if is_mtp else f"{carry_of(model)}2",
        renamed={name: name + kind.suffix for name in weight_names} | _shared_bias(model) | name_of_keys,
    )
    return replace(block, shares=tuple(dict.fromkeys(name_of_keys.values()))) if kind.keys == "source" else block


# -- layers as loops ----------------------------------------------------------------------


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """``pattern`` (names of blocks, one per layer) run ``repeats`` times.

    ``starts`` says for each block of the pattern how many layers of its kind come before the span.
    """

    pattern: tuple[str, ...]
    repeats: int
    starts: dict[str, int]

    @property
    def num_layers(self) -> int:
        """Layers of the span: pattern length x repeats."""
        return len(self.pattern) * self.repeats

    def iterations(self, layers: int) -> int:
        """Returns how many iterations of the pattern fit in a segment of at most ``layers`` layers: at least 1."""
        return min(max(1, layers // len(self.pattern)), self.repeats)

    def row(self, position: int, number: Number) -> Number:
        """Returns the index, among all layers of its kind, of the layer at ``position`` in iteration ``number``."""
        kind = self.pattern[position]
        return self.starts[kind] + number * self.pattern.count(kind) + self.pattern[:position].count(kind)


MAX_WRITTEN_OUT = 16
"""Most iterations of a loop that is unrolled on a CPU device: on two cores 8 layers of 1.8M weights compile in 12 s
instead of 7 and run a tenth faster, since nothing is copied into and out of stacked arrays (2026-11-21)."""


def spans(names: Sequence[str]) -> tuple[Span, ...]:
    """Returns layers as spans, in order: the repeating pattern at the front that covers most layers, then the spans of
    the remaining layers."""
    next_row_of = dict.fromkeys(names, 0)
    spans_found: list[Span] = []
    names_left = tuple(names)
    while names_left:
        pattern, repeats = _leading(names_left)
        row_starts = {name: next_row_of[name] for name in dict.fromkeys(pattern)}
        spans_found.append(Span(pattern=pattern, repeats=repeats, starts=row_starts))
        for name in pattern:
            next_row_of[name] += repeats
        names_left = names_left[len(pattern) * repeats :]
    return tuple(spans_found)


def _leading(names: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """Returns the pattern at the front that covers most layers, and its repeats; the shorter of two that cover as
    many."""
    best_pair, num_covered = (names[:1], _repeats(names, 1)), 0
    for pattern_len in range(1, min(MAX_PATTERN, len(names)) + 1):
        num_repeats = _repeats(names, pattern_len)
        if (num_repeats > 1 or pattern_len == 1) and num_repeats * pattern_len > num_covered:
            best_pair, num_covered = (names[:pattern_len], num_repeats), num_repeats * pattern_len
    return best_pair


def _repeats(names: tuple[str, ...], pattern_len: int) -> int:
    """Returns how often the first ``pattern_len`` names repeat in sequence."""
    num_repeats = 1
    while names[num_repeats * pattern_len : (num_repeats + 1) * pattern_len] == names[:pattern_len]:
        num_repeats += 1
    return num_repeats


def rows(model: Model) -> dict[str, Weight]:
    """Returns, for each weight of the program (tied ones appear once), its row of the weight table, with the layers of
    that variable only."""
    layers_by_suffix = {kind.suffix: kind.layers for kind in layer_kinds(model)}
    row_of = {}
    for name, (weight, _) in weight_variables(model).items():
        if not weight.layers or name.startswith(ENCODER):
            row_of[name] = weight
            continue
        kind_layers = layers_by_suffix[name.removeprefix(local_name(weight))]
        row_of[name] = replace(weight, layers=tuple(layer for layer in kind_layers if layer in set(weight.layers)))
    return row_of


# -- lines read -----------------------------------------------------------------------------------------------

_LINE = re.compile(r"\s*(?P<out>[^=]+?)\s*=\s*(?P<rest>.+?)\s*")
_CALL = re.compile(r"(?P<kind>[a-z_]+)\((?P<args>[^;]*)(?:;(?P<attributes>.*))?\)")
_ARG = re.compile(r"[\w']+\s*\[[^\]]*\]")


def parse_block(
    name: str,
    text: str,
    variables: dict[str, Variable],
    *,
    repeat: int = 1,
    num_in_last_iterations: int = 1,
    carry: str = "",
    result: str = "",
    renamed: Mapping[str, str] = {},
) -> Block:
    """Returns the block written as lines ``q[B,T,N,H] = h[B,T,D] * wq[D,N,H]`` or ``o[..] = attention(q[..], ..;
    window=8)``.

    Every variable is entered in ``variables`` as an activation unless it is there already with its role.
    ``renamed`` gives names of the text another name in the program; the other arguments are fields of `Block`.
    Raises InputError when a line cannot be read or a variable is used with other dims than before.
    """

    def entered(text: str) -> str:
        array = parse_array(text)
        name = renamed.get(array.name, array.name)
        variable = variables.setdefault(name, Variable(name, array.dims, "activation"))
        if variable.dims != array.dims:
            raise InputError(f"{name} has dims {list(variable.dims)} and is used as {text.strip()}.")
        return name

    ops = list[Op]()
    for line in (line for line in text.splitlines() if line.strip()):
        match = _LINE.fullmatch(line)
        if match is None:
            raise InputError(f"program line {line.strip()!r} is not 'out[dims] = ...'.")
        call_match = _CALL.fullmatch(match["rest"])
        kind, args_text, options_text = call_match.groups("") if call_match else ("einsum", match["rest"], "")
        inputs = tuple(map(entered, _ARG.findall(args_text)))
        if kind == "einsum" and len(inputs) != 2:
            raise InputError(f"program line {line.strip()!r} is not a product of two arrays.")
        # "window=128, sees_all" has the pairs (window, 128) and (sees_all, true)
        pairs = (part.strip().partition("=") for part in options_text.split(",") if part.strip())
        attributes = tuple((key.strip(), value.strip() or "true") for key, _, value in pairs)
        ops.append(Op(kind, inputs, entered(match["out"]), attributes))
    return Block(name, tuple(ops), repeat, carry, result, num_in_last_iterations)
