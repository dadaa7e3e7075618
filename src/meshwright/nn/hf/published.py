"""Reads quantised matrices of published folders (`spec.hf.published`) as floats, only the part that is indexed.

A matrix [out, in] is (values - zero points) times scales. Values are stored one by one, or several in a word of 32
bits: along the inputs (compressed-tensors, GPTQ) or the outputs (AWQ), or as two 4-bit floats in a byte (nvfp4, mxfp4).
Sources: compressed-tensors 0.20 (compressors), AutoAWQ 0.2.9 (modules/linear/gemm.py), AutoGPTQ 0.7
(qlinear_cuda_old.py), transformers 5 (integrations/finegrained_fp8.py); for mxfp4 OCP Microscaling Formats 1.0 (2023),
section 5.3.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from meshwright.core.errors import InputError
from meshwright.nn.hf.files import DTYPES, Tensor, Tensors
from meshwright.nn.hf.format import Box, StoredPart, checked_parts
from meshwright.spec.hf.published import SCALES, Quantisation, Scheme
from meshwright.spec.model import Model
from meshwright.spec.weights import unsaved_tables

_VALUES, _ZEROS, _GROUPS = (
    (".weight_packed", ".qweight", ".weight"),
    (".weight_zero_point", ".qzeros"),
    (".g_idx", ".weight_g_idx"),
)
_ENDS = (*SCALES, *_VALUES[:2], *_ZEROS, *_GROUPS, ".weight_shape", ".weight_global_scale")
"""Suffixes of the names of tensors that belong to a quantised matrix."""
_UNUSED = (
    *(".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".output_zero_point"),
    *(".activation_scale", ".k_scale", ".v_scale", ".q_scale"),
)
"""Suffixes of the names of tensors that scale activations and caches, which are not used."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output i of a word of AWQ -> index of its four bits in the word, from the lowest."""
_SCALE_BIAS = 127
MX_BLOCK, MX_BLOCKS, MX_SCALES = 32, "_blocks", "_scales"
"""Values that share a scale of mxfp4, and the suffixes of gpt-oss's tensors."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.asarray([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
"""Four bits of a float (a sign, two of exponent, one of mantissa) -> value."""
AT_ONCE = 2**17
"""Most entries that are unpacked at once: unpacking needs several times the memory of its result."""


class Packing(NamedTuple):
    """Values of ``bits`` in words along a stored axis; ``order`` has their positions in a word, if not ascending."""

    bits: int
    axis: int
    order: tuple[int, ...] = ()

    def read(self, words: Tensor, box: tuple[slice, ...]) -> np.ndarray:
        """Reads a box of the unpacked matrix, as unsigned integers."""
        span, per_word = box[self.axis], 8 * words.dtype.itemsize // self.bits
        word_span = slice(span.start // per_word, -(-span.stop // per_word))
        packed = np.moveaxis(words[(*box[: self.axis], word_span, *box[self.axis + 1 :])], self.axis, 1)
        dtype = np.dtype(f"u{packed.dtype.itemsize}")
        bit_shifts = np.asarray(self.order or range(per_word), dtype) * dtype.type(self.bits)
        values = ((packed.view(dtype)[..., None] >> bit_shifts) & dtype.type(2**self.bits - 1)).astype(np.uint8)
        offset = span.start - word_span.start * per_word
        return np.moveaxis(values.reshape(len(packed), -1)[:, offset : offset + span.stop - span.start], 1, self.axis)


@dataclass(frozen=True)
class PublishedMatrix:
    """A quantised matrix, which indexing reads as floats [out, in], computed in float32 and rounded to ``dtype``; or by
    ``reads`` as its signed stored values, or as the scale of each entry.

    ``tensors`` are its parts by name suffix. If ``transposed``, as in AWQ and GPTQ, these are stored [in, out].
    """

    name: str
    tensors: Tensors
    scheme: Scheme
    quantisation: Quantisation
    dtype: np.dtype
    reads: Literal["floats", "values", "scales"] = "floats"

    def part(self, *ends: str) -> Tensor | None:
        """Returns the part with the first of these suffixes that exists; None if none does."""
        return next((self.tensors[end] for end in ends if end in self.tensors), None)

    @property
    def stored(self) -> Tensor:
        """The tensor of the values as stored."""
        tensor = self.part(*_VALUES)
        assert tensor is not None
        return tensor

    @property
    def transposed(self) -> bool:
        return ".qweight" in self.tensors

    @property
    def packing(self) -> Packing | None:
        """The packing of several values in a word; None if each value is an entry of the tensor."""
        bits = 4 if self.scheme.dtype in ("int4", "fp4") else 8
        if self.transposed:
            return Packing(bits, 1, _AWQ_ORDER) if self.quantisation.method == "awq" else Packing(bits, 0)
        return Packing(bits, 1) if ".weight_packed" in self.tensors else None

    @property
    def middle(self) -> int:
        """The zero point of a symmetric matrix, as stored."""
        return 2 ** (self.packing.bits - 1) if self.packing and self.scheme.dtype != "fp4" else 0

    @property
    def shape(self) -> tuple[int, ...]:
        dim_sizes = list(self.stored.shape)
        if self.packing:
            dim_sizes[self.packing.axis] *= 8 * self.stored.dtype.itemsize // self.packing.bits
        if (stated_shape := self.part(".weight_shape")) is not None:  # the last word may not be full
            dim_sizes = [int(size) for size in stated_shape[(slice(0, 2),)]]
        return tuple(dim_sizes[::-1] if self.transposed else dim_sizes)

    @property
    def group(self) -> tuple[int, int]:
        """Numbers of outputs and of inputs that share a scale."""
        outputs, inputs = self.shape
        return self.scheme.outputs or outputs, self.scheme.inputs or inputs

    @property
    def num_groups(self) -> tuple[int, ...]:
        """Numbers of scales along outputs and inputs."""
        return tuple(-(-size // group) for size, group in zip(self.shape, self.group, strict=True))

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        rows, columns = (slice(*dim_slice.indices(size)[:2]) for dim_slice, size in zip(box, self.shape, strict=True))
        zeros, scales, groups = self.zero_points(), self.scales(), self.groups(columns)
        if self.reads != "floats" and np.any(zeros != self.middle):
            raise InputError(f"{self.name} has zero points, and quantization_config says that it is symmetric. Give "
                             f"the config of these weights.")  # fmt: skip
        codes_dtype = np.dtype(np.int8) if self.packing else self.stored.dtype
        out_dtype = {"floats": self.dtype, "values": codes_dtype, "scales": np.dtype(np.float32)}[self.reads]
        box_values = np.empty((rows.stop - rows.start, columns.stop - columns.start), out_dtype)
        rows_at_once = max(8, AT_ONCE // max(box_values.shape[1], 1))
        for start_row in range(rows.start, rows.stop, rows_at_once):
            row_span = slice(start_row, min(start_row + rows_at_once, rows.stop))
            index = np.ix_(np.arange(row_span.start, row_span.stop) // self.group[0], groups)
            out = box_values[start_row - rows.start : row_span.stop - rows.start]
            if self.reads == "scales":
                out[:] = scales[index]
            elif self.reads == "floats":
                out[:] = (self.codes(row_span, columns) - np.broadcast_to(zeros, scales.shape)[index]) * scales[index]
            else:
                codes = self.codes(row_span, columns)
                out[:] = (codes - np.uint8(self.middle)).view(np.int8) if self.packing else codes
        return box_values

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """Reads unscaled values [out, in]: unsigned integers if packed, else as stored; 4-bit floats as floats."""
        box = (columns, rows) if self.transposed else (rows, columns)
        box_values = self.packing.read(self.stored, box) if self.packing else np.asarray(self.stored[box])
        box_values = box_values.T if self.transposed else box_values
        return VALUES[box_values] if self.scheme.dtype == "fp4" else box_values

    def groups(self, columns: slice) -> np.ndarray:
        """Returns the group of each input. Raises InputError if the checkpoint's list of groups is invalid."""
        regular, group_tensor = np.arange(columns.start, columns.stop) // self.group[1], self.part(*_GROUPS)
        if group_tensor is None:
            return regular
        numbers = _whole(group_tensor).astype(np.int64)
        groups, count = numbers[columns], self.num_groups[1]
        if not np.isin(numbers, range(count)).all() or (self.reads != "floats" and not np.array_equal(groups, regular)):
            raise InputError(f"{self.name}: the groups of its {self.shape[1]} inputs must be 0 to {count - 1}, "
                             f"and as its config says. Fetch both again.")  # fmt: skip
        return groups

    def scales(self) -> np.ndarray:
        """Reads the scales [groups of outputs, groups of inputs] in float32. Raises InputError if one is not finite."""
        scale_tensor, global_scale = self.part(*SCALES), self.part(".weight_global_scale")
        assert scale_tensor is not None
        scale = _whole(scale_tensor)
        is_exp = scale.dtype == np.uint8
        floats = np.ldexp(np.float32(1), scale.astype(np.int32) - _SCALE_BIAS) if is_exp else scale.astype(np.float32)
        floats = floats / _whole(global_scale).astype(np.float32).reshape(()) if global_scale is not None else floats
        if not np.isfinite(floats).all():
            raise InputError(f"{self.name} has scales that are not finite numbers. Fetch its files again.")
        return (floats.T if self.transposed else floats).reshape(self.num_groups)

    def zero_points(self) -> np.ndarray:
        """Reads the zero points, in the units of `codes`: one for each scale, or one number for all."""
        zeros_tensor, packing = self.part(*_ZEROS), self.packing
        if zeros_tensor is None or (self.scheme.symmetric and not self.transposed):
            return np.asarray(self.middle, np.float32)
        if packing is None:
            return _whole(zeros_tensor).astype(np.float32).reshape(self.num_groups)
        if not self.transposed:
            return packing._replace(axis=0).read(zeros_tensor, _all(self.num_groups)).astype(np.float32)
        stored_zeros = packing._replace(axis=1).read(zeros_tensor, _all(self.num_groups[::-1])).T
        return ((stored_zeros + self.quantisation.zeros_less_one) & (2**packing.bits - 1)).astype(np.float32)

    def require_whole(self) -> None:
        """Raises InputError if a part is missing, or has another shape or dtype than the scheme says."""
        scales, zeros_tensor, group_list = self.part(*SCALES), self.part(*_ZEROS), self.part(*_GROUPS)
        is_exp = scales is not None and scales.dtype == np.uint8
        has_global_scale = is_exp or ".weight_global_scale" in self.tensors
        is_missing = {
            "values": self.part(*_VALUES) is None,
            "scales": scales is None,
            "global scale": self.scheme.dtype == "fp4" and not has_global_scale,
            "zero points": not self.scheme.symmetric and zeros_tensor is None,
            "list of groups": not self.scheme.in_order and group_list is None,
        }
        if missing := [part_name for part_name, is_lacking in is_missing.items() if is_lacking]:
            raise InputError(f"{self.name}: the checkpoint lacks its {missing[0]}. Fetch it and its config again.")
        shape_part, advice = self.part(".weight_shape"), "Give the config of these weights."
        if len(sizes := tuple(self.stored.shape)) != 2 or (shape_part is not None and tuple(shape_part.shape) != (2,)):
            raise InputError(f"{self.name}: values of shape {sizes} are not a matrix. {advice}")
        assert scales is not None
        groups, per_word = self.num_groups, 1
        if self.packing and zeros_tensor is not None:
            per_word = 8 * zeros_tensor.dtype.itemsize // self.packing.bits
        part_of = {"scales": (scales, groups), "zero points": (zeros_tensor, (-(-groups[0] // per_word), groups[1]))}
        if self.packing and shape_part is not None:
            num_words = -(-self.shape[1] * self.packing.bits // (8 * self.stored.dtype.itemsize))
            part_of["values"] = self.stored, (self.shape[0], num_words)
        for part_name, (tensor, shape) in (part_of | {"list of groups": (group_list, self.shape[1:])}).items():
            shape = shape[::-1] if self.transposed else shape
            if tensor is not None and [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:
                raise InputError(
                    f"{self.name}: {part_name} of shape {tuple(tensor.shape)}; by quantization_config {self.shape} in "
                    f"{self.scheme.dtype}, groups of {self.group[0]} outputs x {self.group[1]} inputs, needs {shape}. "
                    f"{advice}"
                )
        if scales.dtype.kind in "iub" and not is_exp:
            raise InputError(f"{self.name}: scales in {scales.dtype.name} are not floats. {advice}")


def _all(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _whole(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor[_all(tuple(tensor.shape))])


class KeptPart(NamedTuple):
    """A part of a weight that is loaded as stored, not widened. ``steps`` has, for each dim of the weight, its entries
    per entry of the array: 2 for int4 pairs in a byte (`nn.quantisation.pairs`), whose groups have ``group`` values, 0
    for a dim that the array lacks. ``scales``: reads the scales, not the values."""

    part: StoredPart
    steps: tuple[int, ...]
    scales: bool
    group: int = 0

    def read(self, tensors: Tensors, box: Box) -> np.ndarray:
        """Reads a box of the array of values or of scales."""
        slices = iter(box)
        full_box = (slice(0, 1) if s == 0 else slice((b := next(slices)).start * s, b.stop * s) for s in self.steps)
        matrix = tensors[self.part.tensor]
        assert isinstance(matrix, PublishedMatrix)
        entry_matrix = replace(matrix, reads="scales" if self.scales else "values")
        box_values = self.part.read({self.part.tensor: entry_matrix}, tuple(full_box))
        if self.scales:
            return box_values[tuple(slice(None, None, s) if s else 0 for s in self.steps)]
        if not self.group:
            return box_values
        pair_axis = self.steps.index(2)
        dims_ahead, dims_behind = box_values.shape[:pair_axis], box_values.shape[pair_axis + 1 :]
        halves = box_values.reshape(*dims_ahead, -1, 2, self.group // 2, *dims_behind).view(np.uint8)
        low_halves, high_halves = halves.take(0, pair_axis + 1), halves.take(1, pair_axis + 1)
        return ((low_halves & 15) | (high_halves << 4)).reshape(*dims_ahead, -1, *dims_behind)


@dataclass(frozen=True)
class PublishedExperts:
    """gpt-oss's experts, which indexing reads as [E, in, out] in bf16. ``blocks`` [E, out, in / 32, 16] have two values
    per byte, the even one in the low half, times 2^(the scale's byte - 127); only the indexed blocks are read."""

    blocks: Tensor
    scales: Tensor
    dtype: np.dtype = DTYPES["bf16"]

    @property
    def shape(self) -> tuple[int, ...]:
        num_experts, num_outputs, num_blocks, _ = self.blocks.shape
        return num_experts, num_blocks * MX_BLOCK, num_outputs

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        expert_slice, input_slice, output_slice = box
        block_slice = slice(input_slice.start // MX_BLOCK, -(-input_slice.stop // MX_BLOCK))
        packed_bytes = self.blocks[expert_slice, output_slice, block_slice, slice(0, MX_BLOCK // 2)]
        scales = self.scales[expert_slice, output_slice, block_slice]
        first_input = input_slice.start - block_slice.start * MX_BLOCK
        floats = unpack(packed_bytes, scales)[..., first_input : first_input + input_slice.stop - input_slice.start]
        return floats.transpose(0, 2, 1)


def unpack(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Unpacks [..., blocks, 16] bytes with [..., blocks] scales to [..., blocks * 32] values in bf16."""
    float_pairs = np.stack([VALUES[packed & 0x0F], VALUES[packed >> 4]], axis=-1)
    scaled_pairs = np.ldexp(float_pairs, (scales.astype(np.int32) - _SCALE_BIAS)[..., None, None])
    return scaled_pairs.reshape(*packed.shape[:-2], -1).astype(DTYPES["bf16"])


def with_floats(tensors: Tensors, quantisation: Quantisation | None, dtype: np.dtype) -> Tensors:
    """Returns the tensors, with the parts of each quantised matrix as one tensor ``X.weight``. Raises InputError for a
    missing or misshapen part, and for 8-bit matrices whose scales are not found."""
    expert_stems = [stem for name in tensors if (stem := name.removesuffix(MX_BLOCKS)) + MX_SCALES in tensors]
    packed = {s: PublishedExperts(tensors[s + MX_BLOCKS], tensors[s + MX_SCALES]) for s in expert_stems}
    for stem, experts in packed.items():
        dims, scale_dims = tuple(experts.blocks.shape), tuple(experts.scales.shape)
        if len(dims) != 4 or dims != (*scale_dims, MX_BLOCK // 2):
            raise InputError(f"{stem}: blocks of shape {dims} and scales of shape {scale_dims}; each {MX_BLOCK // 2} "
                             f"bytes need a scale. Fetch its files again.")  # fmt: skip
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith((MX_BLOCKS, MX_SCALES))} | packed
    parts_of_module: dict[str, dict[str, Tensor]] = {}
    for name in sorted(tensors) if quantisation else ():
        for end in _ENDS:
            if name.endswith(end):
                parts_of_module.setdefault(name.removesuffix(end), {})[end] = tensors[name]
    tensor_by_name = {
        name: tensor for name, tensor in tensors.items() if not (quantisation and name.endswith((*_ENDS, *_UNUSED)))
    }
    for module, part_by_end in parts_of_module.items():
        assert quantisation is not None
        if (plain_weight := tensor_by_name.pop(f"{module}.weight", None)) is not None:
            part_by_end[".weight"] = plain_weight
        if (scheme := quantisation.scheme(module)) is None:
            raise InputError(f"{module} is quantised, and no group of quantization_config names it. Give the config of "
                             f"these weights.")  # fmt: skip
        matrix = PublishedMatrix(f"{module}.weight", part_by_end, scheme, quantisation, dtype)
        matrix.require_whole()
        tensor_by_name[matrix.name] = matrix
    for name, tensor in tensor_by_name.items():
        if not isinstance(tensor, PublishedMatrix) and name.endswith(".weight") and tensor.dtype.itemsize == 1:
            raise InputError(f"{name} is stored in {tensor.dtype.name} without scales. Give a folder with its scales, "
                             f"or in bf16, fp16 or fp32.")  # fmt: skip
    return tensor_by_name


def why_refused(model: Model, tensors: Tensors, quantisation: Quantisation | None) -> str:
    """Returns the error with which loading a folder's tensors would fail, by names, shapes and dtypes; "" if none."""
    try:
        tables = {row.hf_name: np.zeros(row.shape, np.float32) for row in unsaved_tables(model)}
        checked_parts(model, {**tables, **with_floats(tensors, quantisation, DTYPES["bf16"])})
    except InputError as error:
        return str(error)
    return ""
