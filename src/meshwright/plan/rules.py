"""Rules of legality: the sizes that they check, of one strategy or of arrays of strategies, and their refusals."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.notation import product
from meshwright.algebra.sizes import Number
from meshwright.spec.model import GROUPED

NOUNS: dict[str, str] = {
    "B": "sequences",
    "T": "positions",
    "S": "key positions",
    "D": "model width",
    "F": "feed-forward width",
    "Fe": "expert feed-forward width",
    "Fs": "shared feed-forward width",
    "N": "query heads",
    "K": "kv heads",
    "G": "query heads per kv head",
    "H": "head width",
    "Kf": "kv heads of layers without a window",
    "Hf": "head width of layers without a window",
    "Dl": "width of layers' own embeddings",
    "Vl": "rows of layers' own embeddings",
    **dict.fromkeys(("A", "Am", "Ao", "An"), "residual streams"),
    "Do": "model width of further streams",
    "Rl": "rank beside attention",
    "Fw": "feed-forward width of wide layers",
    "Hn": "head width without rope",
    "Hr": "head width with rope",
    "Hv": "head width of values",
    "Rq": "query rank",
    "Rkv": "key and value rank",
    "V": "vocabulary",
    "L": "layers",
    "E": "experts",
    "Ea": "experts per token",
    "P": "learned positions",
    "Ps": "learned positions of the encoder",
    "R": "relative buckets",
    "Nx": "query heads of the encoder",
    "Kx": "kv heads of the encoder",
    "Hx": "head width of the encoder",
    "Fx": "feed-forward width of the encoder",
    "M": "features of the encoder",
    "Sf": "frames of the encoder",
    "Ct": "taps of a convolution",
    "Dc": "width between convolutions",
    **dict.fromkeys((f"{dim}g" for dim in GROUPED), "groups of inputs"),
}
"""Dim -> its name in a message, after its size: "K=8 kv heads of llama3-70b"."""


class StrategySizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a strategy that rules check; they may be arrays of many strategies. B is the batch, in sequences."""

    model: str
    cluster: str
    num_chips: int
    mesh: Mapping[str, Number]
    dims: Mapping[str, Number]
    num_microbatches: Number = 1
    schedule: str = "1f1b"
    chunks: Number = 1

    @property
    def stages(self) -> Number:
        """Stages of the pipeline."""
        return self.mesh.get("pipeline", 1)

    def devices(self, axes: Iterable[str]) -> Number:
        """Returns the product of the sizes of these axes."""
        return product(self.mesh[axis] for axis in axes)

    def named(self, axes: Iterable[str]) -> str:
        """Returns the sizes of axes as ``tensor=16`` or ``data=35 x fsdp=64 = 2240``, without axes of size 1."""
        split_axes = [axis for axis in axes if self.mesh[axis] > 1]
        axes_text = " x ".join(f"{axis}={self.mesh[axis]}" for axis in split_axes)
        return f"{axes_text} = {self.devices(split_axes)}" if len(split_axes) > 1 else axes_text

    @property
    def mesh_text(self) -> str:
        """The mesh without axes of size 1: ``mesh fsdp=64 x tensor=4``, or ``a mesh of one device``."""
        axis_texts = [f"{axis}={size}" for axis, size in self.mesh.items() if size > 1]
        return f"mesh {' x '.join(axis_texts)}" if axis_texts else "a mesh of one device"


class LegalRule(msgspec.Struct, frozen=True):
    """A named condition. ``holds`` checks sizes or arrays of sizes; ``message`` says why one strategy breaks it."""

    name: str
    holds: Callable[[StrategySizes], Any]
    message: Callable[[StrategySizes], str]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a strategy cannot run, and what would run."""

    rule: str
    message: str


def check_rules(rules: Iterable[LegalRule], facts: StrategySizes) -> tuple[Refusal, ...]:
    """Returns a refusal for each rule that one strategy breaks."""
    return tuple(Refusal(rule=rule.name, message=rule.message(facts)) for rule in rules if not rule.holds(facts))


def mask(rules: Iterable[LegalRule], facts: StrategySizes) -> Any:
    """Returns a Boolean array: which strategies satisfy all rules."""
    is_legal: Any = True
    for rule in rules:
        is_legal = is_legal & np.asarray(rule.holds(facts))
    return is_legal
