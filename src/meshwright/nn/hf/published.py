"""Reads matrices as published folders quantise them (`spec.hf.published`) as floats, the part that is read alone.

A matrix [out, in] is values times scales, from which zero points are taken off first. Values are stored one by one, or
several in a word of 32 bits: along the inputs (compressed-tensors, GPTQ) or the outputs (AWQ), or as two 4-bit floats
in a byte (nvfp4, mxfp4). Sources: compressed-tensors 0.20 (compressors), AutoAWQ 0.2.9 (modules/linear/gemm.py),
AutoGPTQ 0.7 (qlinear_cuda_old.py), transformers 5 (integrations/finegrained_fp8.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from meshwright.core.errors import InputError
from meshwright.nn.hf.files import Tensor, Tensors
from meshwright.nn.hf.format import Box, StoredPart
from meshwright.nn.hf.mxfp4 import VALUES
from meshwright.spec.hf.published import SCALES, Quantisation, Scheme

_VALUES = (".weight_packed", ".qweight", ".weight")
_ENDS = (
    *(*SCALES, ".weight_packed", ".qweight", ".qzeros", ".g_idx", ".weight_zero_point", ".weight_g_idx"),
    *(".weight_shape", ".weight_global_scale"),
)
"""Ends of the tensors that make a quantised matrix."""
_UNUSED = (
    *(".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".output_zero_point"),
    *(".activation_scale", ".k_scale", ".v_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale"),
)
"""Ends of the tensors that scale activations and caches, which are not executed."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output of a word of AWQ -> its four bits, from the lowest."""
_SCALE_BIAS = 127


class Packing(NamedTuple):
    """Values of ``bits`` in words along a stored axis; ``order`` are their places in a word, if not in order."""

    bits: int
    axis: int
    order: tuple[int, ...] = ()

    def read(self, words: Tensor, box: tuple[slice, ...]) -> np.ndarray:
        """Reads a box of the unpacked array, as unsigned numbers."""
        per_word = self.per_word(words)
        along = box[self.axis]
        whole = slice(along.start // per_word, -(-along.stop // per_word))
        found = words[(*box[: self.axis], whole, *box[self.axis + 1 :])]
        places = np.asarray(self.order or range(per_word), f"u{found.dtype.itemsize}") * self.bits
        shifts = places.reshape(-1, *(1,) * (found.ndim - 1 - self.axis)).astype(f"u{found.dtype.itemsize}")
        split = np.expand_dims(found.view(f"u{found.dtype.itemsize}"), self.axis + 1) >> shifts
        values = (split & (2**self.bits - 1)).astype(np.uint8)
        first = along.start - whole.start * per_word
        flat = values.reshape(*found.shape[: self.axis], -1, *found.shape[self.axis + 1 :])
        return flat[(*(slice(None),) * self.axis, slice(first, first + along.stop - along.start))]

    def per_word(self, words: Tensor) -> int:
        return 8 * words.dtype.itemsize // self.bits

    def shape(self, words: Tensor) -> tuple[int, ...]:
        """Returns the shape of the unpacked array."""
        return tuple(n * (self.per_word(words) if at == self.axis else 1) for at, n in enumerate(words.shape))


@dataclass(frozen=True)
class PublishedMatrix:
    """A quantised matrix that is read as floats [out, in], computed in float32 and rounded to ``dtype``.

    ``tensors`` are its parts by their ends. Where ``transposed``, as in AWQ and GPTQ, these are stored [in, out].
    """

    name: str
    tensors: Tensors
    scheme: Scheme
    quantisation: Quantisation
    dtype: np.dtype

    def read_in(self, dtype: DTypeLike) -> "PublishedMatrix":
        """Returns the same matrix, read in a dtype."""
        return replace(self, dtype=np.dtype(dtype))

    @property
    def values(self) -> Tensor:
        return next(self.tensors[end] for end in _VALUES if end in self.tensors)

    @property
    def transposed(self) -> bool:
        return ".qweight" in self.tensors

    @property
    def packing(self) -> Packing | None:
        """How several values share a word; None if each is an element."""
        bits = 4 if self.scheme.dtype in ("int4", "fp4") else 8
        if self.transposed:
            return Packing(bits, 1, _AWQ_ORDER) if self.quantisation.method == "awq" else Packing(bits, 0)
        return Packing(bits, 1) if ".weight_packed" in self.tensors else None

    @property
    def shape(self) -> tuple[int, ...]:
        stored = self.packing.shape(self.values) if self.packing else tuple(self.values.shape)
        if (given := self.tensors.get(".weight_shape")) is not None:  # the last word may not be full
            return tuple(int(size) for size in given[(slice(0, 2),)])
        return stored[::-1] if self.transposed else stored

    @property
    def num_groups(self) -> tuple[int, int]:
        """Numbers of scales along outputs and inputs."""
        outputs, inputs = self.shape
        return -(-outputs // (self.scheme.outputs or outputs)), -(-inputs // (self.scheme.inputs or inputs))

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        zero, scale = self.zero_points(), self.scales()

        def read(rows: slice, columns: slice) -> np.ndarray:
            at = np.ix_(*self.groups(rows, columns))
            return (self.codes((rows, columns)) - np.float32(zero if isinstance(zero, int) else zero[at])) * scale[at]

        return _by_rows(read, box, self.dtype)

    def codes(self, box: tuple[slice, slice]) -> np.ndarray:
        """Reads a box of the values before scaling, [out, in]: unsigned whole numbers where packed, else as stored."""
        stored = box[::-1] if self.transposed else box
        if self.packing is None:
            return np.asarray(self.values[stored])
        found = self.packing.read(self.values, stored)
        found = found.T if self.transposed else found
        return VALUES[found] if self.scheme.dtype == "fp4" else found

    def groups(self, rows: slice, columns: slice) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row and column of the scale of each output and input."""
        outputs, inputs = self.shape
        listed = next((self.tensors[end] for end in (".g_idx", ".weight_g_idx") if end in self.tensors), None)
        along = np.arange(columns.start, columns.stop) // (self.scheme.inputs or inputs)
        if listed is not None and listed.shape[0] == inputs:
            along = listed[(columns,)].astype(np.int64)
        if (listed is not None and listed.shape[0] != inputs) or not np.isin(along, range(self.num_groups[1])).all():
            raise InputError(f"{self.name}: the list of the groups of its {inputs} inputs does not name one of "
                             f"{self.num_groups[1]} groups for each. Fetch its files again.")  # fmt: skip
        return np.arange(rows.start, rows.stop) // (self.scheme.outputs or outputs), along

    def scales(self) -> np.ndarray:
        """Reads the scales [groups of outputs, groups of inputs] in float32."""
        tensor = next(self.tensors[end] for end in SCALES if end in self.tensors)
        scale = _whole(tensor)
        wide = np.ldexp(np.float32(1), scale.astype(np.int32) - _SCALE_BIAS) if scale.dtype == np.uint8 else scale
        wide = wide.astype(np.float32)
        if (overall := self.tensors.get(".weight_global_scale")) is not None:
            wide = wide / _whole(overall).astype(np.float32).reshape(())
        return (wide.T if self.transposed else wide).reshape(self.num_groups)

    def zero_points(self) -> np.ndarray | int:
        """Reads the zero points of the values as `codes` has them: one for each scale, or one number for all."""
        middle = 2 ** (self.packing.bits - 1) if self.packing and self.scheme.dtype != "fp4" else 0
        if self.transposed:
            zeros, packing = self.tensors.get(".qzeros"), self.packing
            assert packing is not None
            if zeros is None:
                return middle
            along_outputs = packing._replace(axis=1)
            found = along_outputs.read(zeros, _all(along_outputs.shape(zeros))).T
            return (found + self.quantisation.zeros_less_one) & (2**packing.bits - 1)
        zeros = self.tensors.get(".weight_zero_point")
        if zeros is None or self.scheme.symmetric:
            return middle
        if self.packing:
            return self.packing._replace(axis=0).read(zeros, _all(self.num_groups))
        return _whole(zeros).astype(np.float32).reshape(self.num_groups)

    def require_whole(self) -> None:
        """Raises InputError if a part is missing or has another shape than the scheme says."""
        scale = next((self.tensors[end] for end in SCALES if end in self.tensors), None)
        if scale is None or not any(end in self.tensors for end in _VALUES):
            missing = "values" if scale is not None else "scales"
            raise InputError(f"{self.name}: the checkpoint has no {missing} of it. Fetch its files again.")
        outputs, inputs = self.shape
        needed = self.num_groups[::-1] if self.transposed else self.num_groups
        if self.packing and ".weight_shape" in self.tensors:
            words = -(-inputs // self.packing.per_word(self.values))
            if tuple(self.values.shape) != (outputs, words):
                raise InputError(f"{self.name}: weight_packed has shape {tuple(self.values.shape)}; weight_shape "
                                 f"{self.shape} in {self.scheme.dtype} needs {(outputs, words)}. Refetch.")  # fmt: skip
        if tuple(scale.shape) != needed and (len(scale.shape) > 1 or np.prod(scale.shape) != np.prod(needed)):
            raise InputError(
                f"{self.name}: scales of shape {tuple(scale.shape)}; by quantization_config {self.shape} in groups of "
                f"{self.scheme.outputs or outputs} outputs x {self.scheme.inputs or inputs} inputs needs {needed}. "
                f"Give the config of these weights."
            )
        if not (self.scheme.symmetric or {".weight_zero_point", ".qzeros"} & self.tensors.keys()):
            raise InputError(f"{self.name}: the checkpoint has no zero points of it, and quantization_config says that "
                             f"it is not symmetric. Give the config of these weights.")  # fmt: skip


@dataclass(frozen=True)
class KeptEntries:
    """A quantised matrix that is read as its values, signed, or as the scale of each of its entries."""

    matrix: PublishedMatrix
    scales: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    @property
    def dtype(self) -> np.dtype:
        return self.matrix.dtype

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        matrix, zero, scale = self.matrix, self.matrix.zero_points(), self.matrix.scales()
        middle = 2 ** (matrix.packing.bits - 1) if matrix.packing else 0
        if np.any(np.asarray(zero) != middle):
            raise InputError(f"{matrix.name} has zero points, and quantization_config says that it is symmetric. Give "
                             f"the config of these weights.")  # fmt: skip

        def read(rows: slice, columns: slice) -> np.ndarray:
            if self.scales:
                return scale[np.ix_(*matrix.groups(rows, columns))]
            codes = matrix.codes((rows, columns))
            return (codes - np.uint8(middle)).view(np.int8) if matrix.packing else codes

        own = np.dtype(np.int8) if matrix.packing else matrix.values.dtype
        return _by_rows(read, box, np.dtype(np.float32) if self.scales else own)


class KeptPart(NamedTuple):
    """A part of a weight that is read as it is stored: for each of its dims ``steps`` has the entries of the weight
    for one of the array's, 0 for a dim that the array lacks. Values of int4 are pairs in bytes along the dim of step 2,
    whose groups have ``group`` values (`nn.quantisation.pairs`)."""

    part: StoredPart
    steps: tuple[int, ...]
    scales: bool
    group: int = 0

    def read(self, tensors: Tensors, box: Box) -> np.ndarray:
        """Reads a box of the array."""
        given = iter(box)
        whole = (slice(0, 1) if s == 0 else slice((b := next(given)).start * s, b.stop * s) for s in self.steps)
        matrix = tensors[self.part.tensor]
        assert isinstance(matrix, PublishedMatrix)
        found = self.part.read({self.part.tensor: KeptEntries(matrix, self.scales)}, tuple(whole))
        if self.scales:
            return found[tuple(slice(None, None, s) if s else 0 for s in self.steps)]
        if not self.group:
            return found
        axis = self.steps.index(2)
        ahead, behind = found.shape[:axis], found.shape[axis + 1 :]
        halves = found.reshape(*ahead, -1, 2, self.group // 2, *behind).view(np.uint8)
        low, high = halves.take(0, axis + 1), halves.take(1, axis + 1)
        return ((low & 15) | (high << 4)).reshape(*ahead, -1, *behind)


AT_ONCE = 2**17
"""Entries that are unpacked at once: what they need besides is several times what is kept of them."""


def _by_rows(read: Callable[[slice, slice], np.ndarray], box: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """Reads a box some rows at a time."""
    rows, columns = box
    found = np.empty((rows.stop - rows.start, columns.stop - columns.start), dtype)
    step = max(8, AT_ONCE // max(found.shape[1], 1))
    for start in range(rows.start, rows.stop, step):
        part = slice(start, min(start + step, rows.stop))
        found[start - rows.start : part.stop - rows.start] = read(part, columns)
    return found


def _all(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _whole(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor[_all(tuple(tensor.shape))])


def with_floats(tensors: Tensors, quantisation: Quantisation | None, dtype: np.dtype) -> Tensors:
    """Returns the tensors with those of each quantised matrix as one, ``X.weight``. Raises InputError for a part that
    is missing or misshapen, and for narrow matrices of which the config does not say how they are scaled."""
    modules: dict[str, dict[str, Tensor]] = {}
    for name in sorted(tensors) if quantisation else ():
        for end in _ENDS:
            if name.endswith(end):
                modules.setdefault(name.removesuffix(end), {})[end] = tensors[name]
    found = {
        name: tensor for name, tensor in tensors.items() if not (quantisation and name.endswith((*_ENDS, *_UNUSED)))
    }
    for module, parts in modules.items():
        assert quantisation is not None
        if (plain := found.pop(f"{module}.weight", None)) is not None:
            parts[".weight"] = plain
        if (scheme := quantisation.scheme(module)) is None:
            raise InputError(f"{module} is quantised, and no group of quantization_config names it. Give the config of "
                             f"these weights.")  # fmt: skip
        one = PublishedMatrix(f"{module}.weight", parts, scheme, quantisation, dtype)
        one.require_whole()
        found[one.name] = one
    for name, tensor in found.items():
        if not isinstance(tensor, PublishedMatrix) and name.endswith(".weight") and tensor.dtype.itemsize == 1:
            raise InputError(f"{name} is stored in {tensor.dtype.name} without scales. Give a folder with its scales, "
                             f"or in bf16, fp16 or fp32.")  # fmt: skip
    return found
