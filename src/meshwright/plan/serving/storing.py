"""The dtypes in which a served model may store its weights and its caches, as choices of a search."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from meshwright.algebra.generation.program import Storage
from meshwright.core.errors import InputError, nearest
from meshwright.spec.chip import Chip
from meshwright.spec.strategy import Precision

STORED = "stored"
"""Name for weights in the quantised format in which a model's folder stores them (`Model.stored`)."""

WEIGHT_DTYPES: dict[str, Precision | Literal[""]]
WEIGHT_DTYPES = {"bf16": "", STORED: "", "int8": "", "fp8": "fp8", "int4": "", "fp4": "fp4"}
"""Dtype of stored weights -> dtype of their products; "" for the state's dtype, to which integers are widened."""

SERVED_CACHES: tuple[str, ...] = ("bf16", "fp8", "int8")
"""Dtypes in which a KV cache may be stored."""


class StoredDtypes(msgspec.Struct, frozen=True):
    """The dtypes in which an engine stores weights and KV caches."""

    weights: str
    cache: str

    @property
    def words(self) -> str:
        """The dtypes as words: ``"int8"`` if both are int8, else such as ``"int8, KV bf16"``."""
        return self.weights if self.weights == self.cache else f"{self.weights}, KV {self.cache}"

    @property
    def storage(self) -> Storage:
        """The `Storage` with which `algebra.generation` derives steps for these dtypes."""
        weights_dtype = "" if self.weights in ("bf16", STORED) else self.weights
        return Storage(cache_dtype=self.cache, weights=weights_dtype)  # type: ignore[arg-type]

    @property
    def precision(self) -> Precision | Literal[""]:
        """The dtype of matrix products with the weights; "" for the state's dtype."""
        return WEIGHT_DTYPES[self.weights]


TRIED = ("bf16", "int8", "fp8")
"""Dtypes of weights and of caches that are tried by default; fp8 only on chips that multiply in it."""


def stored_dtypes(
    weights: Sequence[str] = (), caches: Sequence[str] = (), *, chip: Chip | None = None
) -> tuple[StoredDtypes, ...]:
    """Returns every pair of the given dtypes of weights and caches; `TRIED` where none is given.

    Leaves out int8 with fp8 unless both weights and caches are given. Raises InputError for an unknown dtype, and for
    fp8 or fp4 on a chip without products in it.
    """
    peak_by_dtype = chip.peak_flops if chip and chip.peak_flops else {"fp8": 1.0, "fp4": 1.0}
    tried_names = [name for name in TRIED if name != "fp8" or name in peak_by_dtype]
    dtypes_of_kind = [
        _known(names or [name for name in tried_names if name in options], options, what)
        for names, options, what in ((weights, WEIGHT_DTYPES, "weights"), (caches, SERVED_CACHES, "KV caches"))
    ]
    for name in (*weights, *caches):
        if name in ("fp8", "fp4") and name not in peak_by_dtype:
            raise InputError(f"{name} is for chips with products in {name}, and {chip and chip.name} has none.")
    pairs = (StoredDtypes(weight, cache) for weight in dtypes_of_kind[0] for cache in dtypes_of_kind[1])
    return tuple(pair for pair in pairs if (weights and caches) or {pair.weights, pair.cache} != {"int8", "fp8"})


def _known(names: Sequence[str], allowed_names: Iterable[str], what: str) -> tuple[str, ...]:
    options = tuple(allowed_names)
    for name in names:
        if name not in options:
            raise InputError(
                f"{name!r} is no dtype in which {what} are served.{nearest(name, options)} Use {', '.join(options)}."
            )
    return tuple(dict.fromkeys(names)) or options
