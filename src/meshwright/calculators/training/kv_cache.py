"""Designs of the cache of keys and values, side by side for one model: which heads, layers and positions are kept.

Sources: How to Scale Your Model, sections 4.5 and 7.2.
"""

import msgspec

from meshwright.cost.formulas.accounting import Number, cached_elements
from meshwright.spec.model import Model

SHARED_LAYERS = 2
"""Neighbouring layers with one cache, in the design that shares across layers."""


class CacheDesign(msgspec.Struct, frozen=True, kw_only=True):
    """A way of caching: elements that a layer keeps of a position, and how many layers have one cache together.

    ``window`` bounds the positions of ``num_local`` of the ``num_layers``; ``own`` is the model as it is.
    """

    name: str
    elements_per_layer: int
    num_layers: int
    own: bool = False
    layers_per_cache: int = 1
    window: int | None = None
    num_local: int = 0

    def elements(self, num_positions: Number) -> Number:
        """Returns the elements kept of one sequence of ``num_positions``."""
        return cached_elements(
            num_positions,
            per_position=self.elements_per_layer,
            num_layers=self.num_layers,
            window=self.window,
            num_local=self.num_local,
            layers_per_cache=self.layers_per_cache,
        )


def cache_designs(model: Model) -> tuple[CacheDesign, ...]:
    """Returns full heads (MHA), own groups or latent, one head (MQA), shared layers; no windows if the model has some.

    A head keeps a key and a value, H + Hv. The model's own design is marked.
    """
    num_local = len(model.sliding_layers)
    rows = [
        CacheDesign(
            name=name,
            elements_per_layer=size,
            num_layers=model.num_layers,
            own=own,
            window=model.sliding_window if num_local else None,
            num_local=num_local,
        )
        for name, size, own in _heads(model)
    ]
    own = next(row for row in rows if row.own)
    shared = f"{own.name}, {SHARED_LAYERS} layers share"
    rows.append(msgspec.structs.replace(own, name=shared, own=False, layers_per_cache=SHARED_LAYERS))
    if num_local:
        rows.append(msgspec.structs.replace(own, name=f"{own.name}, no windows", own=False, window=None, num_local=0))
    return tuple(rows)


def _heads(model: Model) -> list[tuple[str, int, bool]]:
    """Returns (name, elements of a layer and position, whether the model has this design)."""
    latent, heads, groups = model.latent_attention, model.num_heads, model.num_kv_heads
    head = model.head_dim + (model.v_head_dim if latent else model.head_dim)
    rows = [(f"MHA, {heads} heads", heads * head, not latent and groups == heads)]
    if latent:
        rows.append((f"MLA, rank {model.kv_lora_rank}", model.kv_lora_rank + model.qk_rope_head_dim, True))
    elif 1 < groups < heads:
        rows.append((f"GQA, {groups} heads", groups * head, True))
    rows.append(("MQA, 1 head", head, not latent and 1 == groups < heads))
    return rows
