"""Layout of each weight in a published checkpoint, used for reading and writing.

A `StoredPart` names the tensor that stores one layer (or one expert) of a weight, and the part of the tensor as a box
of a view of it: dims in their stored order, some of them merged into one, each sliced from ``start`` in steps, with a
run of entries at each step. Every layout of a family (linear layers stored [out, in], GPT-2's stored [in, out], fused
q/k/v and gate/up concatenated or interleaved, experts one by one or stacked) is such a box.
"""

import math
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from meshwright.algebra.transformer import local_name, rows
from meshwright.core.errors import InputError
from meshwright.nn.hf.files import Tensor, Tensors
from meshwright.spec.hf.families import formats
from meshwright.spec.model import Model
from meshwright.spec.weights import Weight, head_prefix, weight_table

Box = tuple[slice, ...]


ROWS_AT_ONCE = 4096


class StoredDim(NamedTuple):
    """One dim of a weight in a stored tensor: index in the weight, size as stored, start and step of its slice, and the
    number of consecutive entries at each step."""

    dim: int
    size: int
    start: int = 0
    step: int = 1
    run: int = 1

    def span(self, part: slice) -> tuple[int, int]:
        """Returns the range [first, end) of the stored dim that covers a slice of the weight's dim."""
        first, last = (self.start + i // self.run * self.step + i % self.run for i in (part.start, part.stop - 1))
        return first, last + 1

    def stored(self, part: slice, first: int = 0) -> slice | np.ndarray:
        """Returns the index, relative to entry ``first`` of the stored dim, of a slice of the weight's dim."""
        if self.run > 1:
            entries = np.arange(part.start, part.stop)
            return self.start - first + entries // self.run * self.step + entries % self.run
        start, stop = self.span(part)
        return slice(start - first, stop - first, self.step)


class StoredPart(NamedTuple):
    """One layer, or one expert of one layer, of a variable in a checkpoint.

    ``leading`` are the leading indices in the variable's array: of the layer, of the expert. ``axes`` has, for each dim
    of the stored tensor, the dims of the weight that are merged in it, major to minor; () for a dim of size 1.
    """

    variable: str
    leading: tuple[int, ...]
    tensor: str
    axes: tuple[tuple[StoredDim, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        return tuple(math.prod(dim.size for dim in axis) for axis in self.axes)

    def read(self, tensors: Tensors, box: Box) -> np.ndarray:
        """Reads a box of the weight; minor dims that are merged into another are read whole, then sliced."""
        stored_box = tensors[self.tensor][tuple(_narrowed(axis, box) for axis in self.axes)]
        dims = [dim for axis in self.axes for dim in axis]
        majors = {axis[0].dim for axis in self.axes if axis}
        spans = [a.span(box[a.dim]) if a.dim in majors else (0, a.size) for a in dims]
        index = tuple(a.stored(box[a.dim], first) for a, (first, _) in zip(dims, spans, strict=True))
        read_dims = stored_box.reshape([stop - first for first, stop in spans])
        return read_dims[index].transpose(np.argsort([a.dim for a in dims]))

    def put(self, stored: np.ndarray, value: np.ndarray) -> None:
        """Writes the weight ``value`` into its part of a stored tensor."""
        stored_dims = [dim for axis in self.axes for dim in axis]
        dim_slices = tuple(a.stored(slice(0, value.shape[a.dim])) for a in stored_dims)
        stored.reshape([a.size for a in stored_dims])[dim_slices] = value.transpose([a.dim for a in stored_dims])


def _narrowed(axis: tuple[StoredDim, ...], box: Box) -> slice:
    if not axis:
        return slice(0, 1)
    inner_size = math.prod(dim.size for dim in axis[1:])
    start, stop = axis[0].span(box[axis[0].dim])
    return slice(start * inner_size, stop * inner_size)


PREFIXES = (
    *("", "model.", "transformer.", "language_model.model.", "model.language_model.", "model.text_model."),
    *("thinker.model.", "thinker.model.language_model.", "gpt_neox.", "decoder.", "model.decoder."),
)
"""Prefixes of tensor names in checkpoints, some of which omit the model's own prefix."""

_HEAD = "lm_head.weight"
_HEADS = ("wq", "wk", "wv", "bq", "bk", "bv")
_STACKED = {"w_gate": "gate_up_proj", "w_up": "gate_up_proj", "w_down": "down_proj"}


def stored_parts(model: Model, names: Collection[str] = ()) -> Iterator[StoredPart]:
    """Yields the stored part of every layer of every variable, in the order of the weight table.

    The tensor ``names`` of a checkpoint determine which of several known layouts it has. Without names the layout is
    the published one, which is also the one written.
    """
    name_of = _naming(model, names)
    weights_by_pattern: dict[str, list[Weight]] = {}
    for weight in weight_table(model):
        if not weight.tied_to:
            weights_by_pattern.setdefault(name_of(weight), []).append(weight)
    for variable, weight in rows(model).items():
        tensor_pattern = name_of(weight)
        is_one_by_one = any(field in tensor_pattern for field in ("{expert}", "{head}"))
        joined_weights = [w for w in weights_by_pattern[tensor_pattern] if set(weight.layers) <= set(w.layers)]
        axes = _axes(model, weight, joined_weights, one_by_one=is_one_by_one)
        leading_sizes = ([len(weight.layers)] if weight.layers else []) + ([weight.shape[0]] if is_one_by_one else [])
        for leading in np.ndindex(*leading_sizes):
            layer = weight.layers[leading[0]] if weight.layers else 0
            numbers = (layer, leading[-1], leading[-1]) if leading else ()
            number_by_field = dict(zip(("layer", "expert", "head"), numbers, strict=False))
            in_all_layers = weight.layers and "{layer}" not in tensor_pattern
            part_axes = _of_layer(model, weight, axes, layer) if in_all_layers else axes
            yield StoredPart(variable, leading, tensor_pattern.format(**number_by_field), part_axes)


def _of_layer(
    model: Model, weight: Weight, axes: tuple[tuple[StoredDim, ...], ...], layer: int
) -> tuple[tuple[StoredDim, ...], ...]:
    """Returns the stored dims of a layer's part of an array in which all layers are concatenated along Dl."""
    num_layers, width = model.num_layers, model.layer_embed_dim
    packed_dims = {weight.dims.index("Dl"): {"size": num_layers * width, "start": layer * width}}
    return tuple(tuple(dim._replace(**packed_dims.get(dim.dim, {})) for dim in axis) for axis in axes)


def _naming(model: Model, names: Collection[str]) -> Callable[[Weight], str]:
    """Returns the function from a weight to its tensor's name, with placeholders for layer and expert.

    Checkpoints differ in the prefix of names. Some stack experts that are published one by one, as transformers 5 does
    in memory.
    """
    own_prefix = model.weights_prefix
    embed_name = rows(model)["embed"].hf_name.removeprefix(own_prefix)
    prefix = next((p for p in (own_prefix, *PREFIXES) if p + embed_name in names), own_prefix)
    own_head = head_prefix(own_prefix)
    heads = (own_head, *(p for p in map(head_prefix, PREFIXES) if f"{p}lm_head.weight" in names))
    head = heads[f"{own_head}lm_head.weight" not in names and len(heads) > 1]
    is_stacked = any(name.endswith(".experts.gate_up_proj") for name in names)
    renamed_parts = formats()[model.family].in_memory if is_stacked else {}

    def name_of(weight: Weight) -> str:
        if weight.name == "unembed" and _HEAD in names:  # as GPT-NeoX's embed_out is in the memory of transformers 5
            return _HEAD
        name = weight.stored_name(names)
        for published_part, part in renamed_parts.items():
            name = name.replace(published_part, part)
        if is_stacked and "{expert}" in name:
            name = name.partition(".experts.")[0] + ".experts." + _STACKED[weight.name.rpartition(".")[2]]
        if weight.part == "unembedding":
            return head + name.removeprefix(own_head)
        return prefix + name.removeprefix(own_prefix) if name.startswith(own_prefix) else name

    return name_of


def _axes(model: Model, weight: Weight, joined: list[Weight], *, one_by_one: bool) -> tuple[tuple[StoredDim, ...], ...]:
    """Returns the stored dims, in their order, of a weight that shares its tensor with ``joined``.

    Weights of one tensor are concatenated along a dim, or alternate: gate and up of each entry of gpt-oss, queries, key
    and value of each kv head.
    """
    has_experts = weight.part == "experts"
    first_dim = 1 if one_by_one else 0
    stored_dims = [StoredDim(dim, dim_size) for dim, dim_size in enumerate(weight.shape[first_dim:])]
    if len(joined) > 1:
        shared_dim = -2 if local_name(weight).removesuffix("_lora_b") in _HEADS else -1
        part_sizes = [part.shape[shared_dim] for part in joined]
        position = [part.name for part in joined].index(weight.name)
        start, step, run = sum(part_sizes[:position]), 1, 1
        if formats()[model.family].interleaved:
            num_groups = min(part_sizes)
            start, step, run = (size // num_groups for size in (start, sum(part_sizes), part_sizes[position]))
        stored_dims[shared_dim] = StoredDim(stored_dims[shared_dim].dim, sum(part_sizes), start, step, run)
    expert_dims = [(stored_dims.pop(0),)] if has_experts and not one_by_one else []
    dims = weight.dims[1:] if has_experts else weight.dims
    return (*expert_dims, *_stored_order(model, weight, stored_dims, dims, stacked=bool(expert_dims)))


def _stored_order(
    model: Model, weight: Weight, stored_dims: list[StoredDim], dims: tuple[str, ...], *, stacked: bool
) -> tuple[tuple[StoredDim, ...], ...]:
    """Groups dims by stored axis: [out, in] in a linear layer; [in, out] in GPT-2's layers and gpt-oss's experts."""
    is_row = weight.part == "buffer" and (model.family == "ernie4_5_moe" or weight.name == "unembed_bias")
    if weight.name == "layers.shared.gate" or is_row or not dims:
        return ((), *([tuple(stored_dims)] if dims else []))
    if weight.part == "embedding" or dims[0] == "R" or (weight.part == "norm" and model.head_qk_norm):  # tables
        return tuple((dim,) for dim in stored_dims)
    if weight.kind == "vector":
        return (tuple(stored_dims),)
    if dims[0] == "Ct":  # [out, in, taps]
        return tuple((dim,) for dim in reversed(stored_dims))
    # The last dims are outputs. A product that reads heads has two input dims.
    num_inputs = 2 if dims[0] in ("N", "Nx") else 1
    input_dims, output_dims = tuple(stored_dims[:num_inputs]), tuple(stored_dims[num_inputs:])
    inputs_first = (model.family == "gpt2" and bool(weight.layers) and weight.part != "adapter") or (
        model.family in ("gpt_oss", "llama4") and stacked
    )
    return (input_dims, output_dims) if inputs_first else (output_dims, input_dims)


def checked_parts(model: Model, tensors: Tensors) -> dict[str, dict[tuple[int, ...], StoredPart]]:
    """Returns stored parts by variable and leading indices. Raises InputError for tensors `load_params` refuses."""
    parts_of: dict[str, dict[tuple[int, ...], StoredPart]] = {}
    for part in _oriented(tensors, list(stored_parts(model, tensors))):
        if part.tensor not in tensors:
            suffixes = ("_blocks", "_scale_inv", ".qweight", ".SCB")
            if example := next((name for name in tensors if name.endswith(suffixes)), ""):
                raise InputError(f"the checkpoint is quantised (it has {example}), and no quantization_config of its "
                                 f"config.json says how. Add it, or give one in bf16, fp16 or fp32.")  # fmt: skip
            raise InputError(f"the checkpoint lacks {part.tensor} ({part.variable}). Give one made for this model.")
        tensor_shape = tuple(tensors[part.tensor].shape)
        if tensor_shape != part.shape:
            needs_text = f"{model.name} needs {part.shape}. Give the config of these weights."
            raise InputError(f"{part.tensor} has shape {tensor_shape}; {needs_text}")
        parts_of.setdefault(part.variable, {})[part.leading] = part
    _require_all_used(model, tensors, {part.tensor for by_index in parts_of.values() for part in by_index.values()})
    return parts_of


IGNORED = ("*.rotary_emb.*inv_freq", "*.e_score_correction_bias")
"""Tensors that follow from the config, and router corrections, which only models with such corrections read."""
_OTHER_PARTS = (
    *("*vision_tower.*", "*vision_model.*", "visual.*", "model.visual.*", "*audio_tower.*", "*image_newline"),
    *("*multi_modal_projector.*", "*mm_projector.*", "*connector.*", "thinker.visual.*", "talker.*", "*2wav.*"),
)
"""Parts of multimodal models other than the text decoder."""
_DECODERS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3", "glm4", "exaone4", "llama4")
IGNORED_OF = {
    **dict.fromkeys(("gpt2", "gptj", "gpt_bigcode"), ("*.attn.bias", "*.attn.masked_bias")),  # the causal mask
    "gpt_neox": ("*.attention.bias", "*.attention.masked_bias"),
    **dict.fromkeys(("t5", "mt5"), ("*.EncDecAttention.relative_attention_bias.weight",)),  # early files have it
    **dict.fromkeys(_DECODERS, _OTHER_PARTS),
    # multi-token-prediction layers, if they are not loaded
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "hy_v3"), ("*.layers.{num_layers}.*", *_OTHER_PARTS)),
    "gemma4": ("*.embed_vision.*", "*.embed_audio.*", *_OTHER_PARTS),
    # the scale of corrections is stored by files that do not use it, too
    "gemma3n": ("*.altup.correct_output_scale", "*.embed_vision.*", "*.embed_audio.*", *_OTHER_PARTS),
    "exaone_moe": ("mtp.*",),
    "ernie4_5_moe": ("model.mtp*",),
}
"""Tensors of a family that are not weights of its text model."""


def _require_all_used(model: Model, tensors: Tensors, used_names: set[str]) -> None:
    """Raises InputError for a tensor that the model lacks, or a tied unembedding that differs from the embedding."""
    ignored_forms = [form.format(num_layers=model.num_layers) for form in (*IGNORED, *IGNORED_OF.get(model.family, ()))]
    # published files have keys and values also for layers that read another layer's
    shared_layers = range(len(model.kv_layers), model.num_layers)
    ignored_forms += [
        f"*.layers.{n}.self_attn.{part}.weight" for n in shared_layers for part in ("[kv]_proj", "k_norm")
    ]
    variable_of_copy = {name: variable for variable, name in mtp_copies(model).items()}
    for name in tensors.keys() - used_names:
        is_tied = name.endswith(("lm_head.weight", "proj_out.weight")) and model.tied_embeddings
        is_table = model.encoder is not None and name.endswith((".embed_tokens.weight", "shared.weight"))
        if variable := "embed" if is_tied or is_table else variable_of_copy.get(name):
            source_name = next(part.tensor for part in stored_parts(model, tensors) if part.variable == variable)
            if not _equal(tensors[name], tensors[source_name]):
                advice = "Set tie_word_embeddings to false" if is_tied else "Leave mtp_weight out, or that layer"
                advice = "Give a model with one table of tokens" if is_table else advice
                raise InputError(f"{name} differs from {source_name}, to which the config ties it. {advice}.")
            continue
        box = tuple(slice(0, dim_size) for dim_size in tensors[name].shape)
        is_zero = name.endswith(".bias") and not tensors[name][box].any()  # AutoGPTQ writes one for every matrix
        if not (is_zero or any(fnmatchcase(name, form) for form in ignored_forms)):
            raise InputError(f"the checkpoint has {name}, which {model.name} has no place for. Give its own config.")


def _oriented(tensors: Tensors, parts: list[StoredPart]) -> list[StoredPart]:
    """Returns the parts, with inputs before outputs in stacked experts if the shapes say so (Qwen 3 VL)."""
    turned = {part: part._replace(axes=(part.axes[0], *part.axes[:0:-1])) for part in parts if len(part.axes) == 3}
    stored_shapes = {part: tuple(tensors[part.tensor].shape) for part in turned if part.tensor in tensors}
    if any(shape != part.shape and shape == turned[part].shape for part, shape in stored_shapes.items()):
        return [turned.get(part, part) for part in parts]
    return parts


def mtp_copies(model: Model) -> dict[str, str]:
    """Maps embedding and head to the names of their published copies in the multi-token-prediction layer."""
    names = {"embed": "embed_tokens", "unembed": "shared_head.head"}
    return {v: f"{model.weights_prefix}layers.{n}.{name}.weight" for n in model.mtp_layers for v, name in names.items()}


def _equal(tensor: Tensor, other_tensor: Tensor) -> bool:
    """True if two tensors are equal; at most `ROWS_AT_ONCE` rows are read at a time."""
    if tuple(tensor.shape) != tuple(other_tensor.shape):
        return False
    num_rows, num_columns = tensor.shape
    start_rows = range(0, num_rows, ROWS_AT_ONCE)
    boxes = ((slice(start, min(start + ROWS_AT_ONCE, num_rows)), slice(0, num_columns)) for start in start_rows)
    return all(np.array_equal(tensor[box], other_tensor[box]) for box in boxes)
