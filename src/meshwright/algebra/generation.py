"""A model as the two programs of generation, made of the same ops as its training program, and the caches they share.

``prefill`` runs whole prompts and leaves their keys and values in a cache; its queries meet the keys of their own
prompt. ``decode`` runs one position of each sequence, whose query meets the cache. Both end in the logits of one
position of each row. With latent attention the cache holds latents, and generation works on them as they are: queries
go through the keys' projection instead of the keys (DeepSeek-V2, section 2.1.2).
"""

import math
from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

from meshwright.algebra.derive import derive, forward_pass
from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.layers import PLAIN, ProgramOptions
from meshwright.algebra.ops.cached_attention import slots_kept
from meshwright.algebra.program import Block, Op, Program, Variable
from meshwright.algebra.rewrites.collective_matmul import in_blocks
from meshwright.algebra.trace import Shardings
from meshwright.algebra.transformer import LayerKind, layer_kinds, transformer, weight_variables
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Rules, Strategy

Pass = Literal["prefill", "decode"]
CacheDtype = Literal["bf16", "fp32", "int8"]
CACHE_DTYPES: tuple[str, ...] = get_args(CacheDtype)


def require_cache_dtype(dtype: str) -> None:
    """Raise InputError unless keys and values can be kept so."""
    if dtype not in CACHE_DTYPES:
        options = ", ".join(CACHE_DTYPES)
        raise InputError(f"cache dtype {dtype!r} is not known.{nearest(dtype, CACHE_DTYPES)} Use one of {options}.")


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """How generation stores weights and caches.

    ``quantised`` weights are int8 with a scale for each output channel. With a ``page_len`` layers that keep every
    position keep them in pages of so many positions, of which there are ``num_pages`` (0: enough for every sequence).
    """

    cache_dtype: CacheDtype = "bf16"
    quantised: bool = False
    page_len: int = 0
    num_pages: int = 0

    def __post_init__(self) -> None:
        require_cache_dtype(self.cache_dtype)
        if self.page_len < 0 or self.num_pages < 0:
            raise InputError(f"page_len={self.page_len} and num_pages={self.num_pages} must be at least 0.")


AS_WRITTEN = Storage()
"""Weights in the dtype of the state, caches in bfloat16, sequences without pages."""


def derive_forward(program: Program, strategy: Strategy, *, symbolic: bool = False) -> Derived:
    """Forward steps of a program that is never differentiated: no backward pass, no update, nothing held."""
    keep = None if symbolic else strategy.active_axes
    shardings = Shardings(program, strategy, keep)
    blocks = [BlockSteps(block, tuple(forward_pass(block, shardings).steps), (), ()) for block in program.blocks]
    return Derived(
        program,
        tuple(in_blocks(block, shardings) for block in blocks),
        (),
        {name: shardings.declared(name) for name in program.variables},
        (),
    )


def prefill_program(
    model: Model, *, cache_dtype: CacheDtype = "bf16", quantised: bool = False, page_len: int = 0
) -> Program:
    """tokens[B,T] at positions[B,T], and ``last``[B], the index of each row's last token -> logits[B,V] there.

    Padding behind a row's last token leaves nothing that is ever read.
    """
    return _program(model, "prefill", Storage(cache_dtype=cache_dtype, quantised=quantised, page_len=page_len))


def generate_program(
    model: Model, *, cache_dtype: CacheDtype = "bf16", quantised: bool = False, page_len: int = 0
) -> Program:
    """One token of each row: T is 1. The token's own key is written before it is read."""
    return _program(model, "decode", Storage(cache_dtype=cache_dtype, quantised=quantised, page_len=page_len))


# -- the step of a job ----------------------------------------------------------------------------------


def derive_job(
    model: Model,
    job: Job,
    strategy: Strategy,
    *,
    storage: Storage = AS_WRITTEN,
    options: ProgramOptions = PLAIN,
    fused_head: bool = True,
) -> Derived:
    """The step of a job: all passes and the update to train, the forward pass of its program to prefill or decode."""
    strategy = job_strategy(job, strategy)
    if job.trains:
        return derive(transformer(model, options), strategy, optimizer=job.optimizer, fused_head=fused_head)
    if job.kind == "prefill":
        return derive_forward(_program(model, "prefill", storage), strategy)
    return derive_forward(_program(model, "decode", storage), one_position(strategy))


def job_strategy(job: Job, strategy: Strategy) -> Strategy:
    """The strategy as the step of a job runs it.

    Generation has one microbatch and nothing to offload. Its caches have every position of their rows, so that keys are
    gathered over ``context`` whatever form training has. Raises CannotRunError for pipeline stages.
    """
    if job.trains:
        return strategy
    if strategy.mesh.get("pipeline", 1) > 1:
        raise CannotRunError(
            f"pipeline={strategy.mesh['pipeline']} trains but does not generate in this version. "
            f"Use its devices as tensor, data or fsdp."
        )
    return msgspec.structs.replace(strategy, context_attention="gather", num_microbatches=1, offload=())


def one_position(strategy: Strategy) -> Strategy:
    """The strategy for rows of one position: what splits T has nothing to split, nor the slots that its tokens fill."""
    rules = {role: _without_positions(rules) for role, rules in strategy.assignment.items()}
    return msgspec.structs.replace(strategy, assignment=rules)


def _without_positions(rules: Rules) -> Rules:
    kept = {dim: axes for dim, axes in rules.items() if dim != "T"}
    if "C" in kept and "B" in kept:
        kept["C"] = tuple(axis for axis in kept["C"] if axis in kept["B"])
    return kept


# -- quantised weights ----------------------------------------------------------------------------------


def scales(model: Model) -> dict[str, Variable]:
    """Each weight that int8 may hold -> the variable of its scales, over its dims that no product sums over.

    These are matrices of products and the table of tokens, not routers, which choose by small differences, nor tables
    of positions.
    """
    table = weight_variables(model)
    plain = (_program(model, phase, AS_WRITTEN) for phase in get_args(Pass))
    summed: dict[str, set[str]] = {}
    for program in plain:
        for op in (op for block in program.blocks for op in block.ops if op.kind in ("einsum", "embed")):
            name = op.inputs[1]
            weight = table.get(name)
            if weight is None or weight[0].part == "router" or weight[0].dims[0] == "P":
                continue
            kept = program.variables[op.out].dims if op.kind == "einsum" else weight[0].dims[:1]
            summed.setdefault(name, set()).update(dim for dim in weight[0].dims if dim not in kept)
    return {name: _scale(name, tuple(d for d in table[name][0].dims if d not in dims)) for name, dims in summed.items()}


def _scale(name: str, dims: tuple[str, ...]) -> Variable:
    """Split as its weight is, but whole over axes that only split what a weight is gathered over."""
    role = "vector" if set(dims) <= {"D", "Rq", "Rkv"} else "weight"
    return Variable(scale_name(name), dims, role, "fp32")


def _quantised(model: Model, program: Program) -> Program:
    found = scales(model)
    variables = {n: msgspec.structs.replace(v, dtype="int8") if n in found else v for n, v in program.variables.items()}
    variables |= {scale.name: scale for scale in found.values()}

    def with_scale(op: Op) -> Op:
        if op.kind not in ("einsum", "embed") or op.inputs[1] not in found:
            return op
        inputs = (*op.inputs, found[op.inputs[1]].name)
        return msgspec.structs.replace(op, kind=f"quantised_{op.kind}", inputs=inputs)

    blocks = tuple(msgspec.structs.replace(b, ops=tuple(with_scale(op) for op in b.ops)) for b in program.blocks)
    return Program(blocks, variables, program.stacks)


# -- programs -------------------------------------------------------------------------------------------


def _program(model: Model, phase: Pass, storage: Storage) -> Program:
    if model.encoder or model.relative_buckets:
        raise CannotRunError(
            f"{model.name} has an encoder or relative positions and does not generate in this version."
        )
    training = transformer(model)
    writer = _Writer(model, phase, storage, training)
    blocks = tuple(writer.block(block) for block in training.blocks)
    used = {name for block in blocks for op in block.ops for name in (*op.inputs, op.out)}
    variables = {name: v for name, v in writer.variables.items() if name in used}
    program = Program(blocks, variables, training.stacks)
    return _quantised(model, program) if storage.quantised else program


class _Writer:
    """Blocks of a training program rewritten for one pass, and every variable that they name."""

    def __init__(self, model: Model, phase: Pass, storage: Storage, training: Program) -> None:
        self.model, self.phase, self.storage = model, phase, storage
        self.training, self.variables = training, dict(training.variables)
        self.kinds = {kind.block: kind for kind in layer_kinds(model)}
        self.ops: list[Op] = []
        self.outputs: list[str] = []

    def block(self, block: Block) -> Block:
        """The block of the same name; ops whose results nobody uses any more are left out."""
        self.ops, self.outputs = [], []
        is_head = self.training.role(block.name) == "head"
        if is_head:
            self._head(block)
        for op in block.ops if not is_head else ():
            if op.kind == "attention":
                self._attention(op, block)
            else:
                self.ops.append(op)
        kept = _used(self.ops, [block.result or self.ops[-1].out, *self.outputs])
        return msgspec.structs.replace(block, ops=kept)

    def _add(
        self, kind: str, inputs: Iterable[str], out: str, dims: tuple[str, ...], *, role: str = "activation",
        dtype: str = "", attributes: tuple[tuple[str, str], ...] = (),
    ) -> str:  # fmt: skip
        self.variables[out] = Variable(out, dims, role, dtype)
        self.ops.append(Op(kind, tuple(inputs), out, attributes))
        return out

    # -- the head: logits of one position ---------------------------------------------------------------

    def _head(self, block: Block) -> None:
        norm, loss = block.ops
        x, *vectors = norm.inputs
        table = loss.inputs[1]
        self.variables["last"] = Variable("last", ("B",), "position")
        row = self._add("pick", (x, "last"), "xl", ("B", "D"))
        row = self._add(norm.kind, (row, *vectors), "hl", ("B", "D"))
        if self.model.logit_softcap:
            row = self._add("einsum", (row, table), "uncapped", ("B", "V"), dtype="fp32")
            self._add("softcap", (row,), "logits", ("B", "V"), role="output", dtype="fp32")
        else:
            self._add("einsum", (row, table), "logits", ("B", "V"), role="output", dtype="fp32")

    # -- attention --------------------------------------------------------------------------------------

    def _attention(self, op: Op, block: Block) -> None:
        q, k, v, positions, *others = op.inputs
        made_by = {made.out: made for made in block.ops}
        sources = {"k": k, "v": v}
        if self.model.latent_attention:
            own, shared = made_by[k].inputs
            sources = {"c": made_by[own].inputs[0], "p": shared}
        kind = self.kinds[block.name]
        layout = layout_of(self.model, kind, self.storage)
        index = self._index(layout)
        where = ("last" if self.phase == "prefill" else positions, *index)
        cached, cached_scales = [], []
        for letter in cached_dims(self.model):
            array, its_scales = self._write(cache_name(self.model, kind, letter), sources[letter], where, layout)
            cached.append(array)
            cached_scales += its_scales
        inputs = (*cached, positions, *index, *cached_scales)
        if self.phase == "prefill":
            self.ops.append(op)
            return
        op = msgspec.structs.replace(op, attributes=(*op.attributes, *layout.attributes))
        if self.model.latent_attention:
            weights = made_by[made_by[k].inputs[0]].inputs[1], made_by[v].inputs[1]
            self._absorbed(op, weights, inputs)
        else:
            self.ops.append(msgspec.structs.replace(op, kind="cached_attention", inputs=(q, *inputs, *others)))

    def _index(self, layout: "Layout") -> tuple[str, ...]:
        """The input that says where the positions of a sequence lie, for layouts that need one."""
        if not layout.index:
            return ()
        self.variables[PAGES] = Variable(PAGES, layout.index, "position")
        return (PAGES,)

    def _write(self, cache: str, source: str, where: tuple[str, ...], layout: "Layout") -> tuple[str, list[str]]:
        """The cache after a write, and that of its scales."""
        dims, dtype = self.variables[source].dims, self.storage.cache_dtype
        if dtype != "int8":
            return self._written(cache, source, where, layout, dtype), []
        scale = self._add("kv_scale", (source,), scale_name(source), dims[:-1], dtype="fp32")
        values = self._add("kv_quantise", (source, scale), f"{source}_int8", dims, dtype="int8")
        written = self._written(cache, values, where, layout, "int8")
        return written, [self._written(scale_name(cache), scale, where, layout, "fp32")]

    def _written(self, cache: str, source: str, where: tuple[str, ...], layout: "Layout", dtype: str) -> str:
        dims = (*layout.dims, *self.variables[source].dims[2:])
        self.variables[cache] = Variable(cache, dims, "cache", dtype)
        attributes = (("prompt", "true"),) if self.phase == "prefill" else ()
        out = self._add("cache_write", (cache, source, *where), f"{cache}'", dims, role="cache", dtype=dtype,
                        attributes=(*attributes, *layout.attributes))  # fmt: skip
        self.outputs.append(out)
        return out

    def _absorbed(self, op: Op, weights: tuple[str, str], cached: tuple[str, ...]) -> None:
        """Queries times the keys' projection meet latents; latents mixed go through the values' projection."""
        q, keys, values = op.inputs[0], *weights
        own = self._add("own_part", (q,), "qn", ("B", "T", "N", "Hn"))
        latent = ("B", "T", "N", "Rkv")
        ql = self._add("einsum", (own, keys), "ql", latent)
        mixed = self._add("cached_latent_attention", (ql, q, *cached), "oc", latent, attributes=op.attributes)
        self.ops.append(Op("einsum", (mixed, values), op.out))


def _used(ops: list[Op], outputs: list[str]) -> tuple[Op, ...]:
    """The ops that lead to the outputs."""
    needed, kept = set(outputs), list[Op]()
    for op in reversed(ops):
        if op.out in needed:
            needed.update(op.inputs)
            kept.append(op)
    return tuple(reversed(kept))


# -- the cache: declared arrays, a row per kind of layer and array ------------------------------------------

PAGES = "pages"
"""The variable of the page table: for each sequence the numbers of its pages, in the pool of its own devices."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How a cache array holds the positions of sequences: its leading dims, and the dims of the input that finds them.

    ``attributes`` are what ops on such an array have to say of it.
    """

    dims: tuple[str, str]
    index: tuple[str, ...] = ()
    attributes: tuple[tuple[str, str], ...] = ()


LAYOUTS: dict[str, Layout] = {
    "contiguous": Layout(dims=("B", "S")),
    "ring": Layout(dims=("B", "S")),
    "paged": Layout(dims=("Pg", "Pl"), index=("B", "Bp"), attributes=(("paged", "true"),)),
}
"""contiguous: position p of a sequence is in its slot p of S. ring: in its slot p mod S, with S at most a window.
paged: in slot p mod Pl of the page that ``pages[B, Bp]`` names for p // Pl, one of Pg pages that all sequences share.
"""


class CacheArray(msgspec.Struct, frozen=True, kw_only=True):
    """One array of the cache, the same in each of ``num_layers``; ``dims`` and ``shape`` are those of one layer."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    num_layers: int
    layout: str = "contiguous"

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """With the layers of the kind in front, as the weights have them."""
        return (self.num_layers, *self.shape)

    @property
    def num_bytes(self) -> int:
        """Of all its layers, over all devices."""
        return math.prod(self.stacked_shape) * int(DTYPE_BYTES[self.dtype])


def cached_dims(model: Model) -> dict[str, tuple[str, ...]]:
    """What a layer keeps of each position, by its letter: keys and values, or with latent attention the latent ``c``
    and the rotated key part ``p`` that all heads share."""
    if model.latent_attention:
        return {"c": ("Rkv",), "p": ("Hr",)}
    return {"k": ("K", "H"), "v": ("K", "H")}


def cache_name(model: Model, kind: LayerKind, letter: str) -> str:
    """Variable of the program: ``cache_k``, or ``cache_k_local`` where a model has layers of several kinds."""
    return f"cache_{letter}{kind.suffix if len(layer_kinds(model)) > 1 else ''}"


def scale_name(name: str) -> str:
    """The variable beside an int8 array that holds its scales."""
    return f"{name}_scale"


def layout_name(model: Model, kind: LayerKind, storage: Storage) -> str:
    """A ring for layers with a window, which need no more; else pages, or a place for each position."""
    if kind.sliding and model.sliding_window:
        return "ring"
    return "paged" if storage.page_len else "contiguous"


def layout_of(model: Model, kind: LayerKind, storage: Storage) -> Layout:
    """The layout of the arrays of a kind of layer."""
    return LAYOUTS[layout_name(model, kind, storage)]


def cache_sizes(*, batch_seqs: int, max_len: int, storage: Storage = AS_WRITTEN) -> dict[str, int]:
    """Sizes of the dims that only caches have, for sequences of up to ``max_len`` positions.

    S is that of contiguous arrays; see `slots_kept` for rings. Of pages there are so many that every sequence can be
    full, unless the storage says how many.
    """
    found = {"S": max_len}
    if storage.page_len:
        each = -(-max_len // storage.page_len)
        found |= {"Pl": storage.page_len, "Bp": each, "Pg": storage.num_pages or batch_seqs * each}
    return found


def cache_table(
    model: Model, *, batch_seqs: int, max_len: int, dtype: CacheDtype = "bf16", storage: Storage | None = None
) -> tuple[CacheArray, ...]:
    """Rows of the cache of ``batch_seqs`` sequences of up to ``max_len`` positions.

    int8 keeps a float32 scale beside each token and head. ``storage`` stands for ``dtype`` where it is given.
    Raises InputError for a dtype that is none of `CACHE_DTYPES`.
    """
    storage = storage or Storage(cache_dtype=dtype)
    cache = cache_sizes(batch_seqs=batch_seqs, max_len=max_len, storage=storage)
    sizes = {**model.dims, "B": batch_seqs, **cache}
    rows = []
    for kind in layer_kinds(model):
        layout = layout_name(model, kind, storage)
        slots = slots_kept(max_len, model.sliding_window if layout == "ring" else None)
        for letter, own in cached_dims(model).items():
            dims = (*LAYOUTS[layout].dims, *own)
            array = CacheArray(
                name=cache_name(model, kind, letter),
                dims=dims,
                shape=tuple(slots if dim == "S" else sizes[dim] for dim in dims),
                dtype=storage.cache_dtype,
                num_layers=len(kind.layers),
                layout=layout,
            )
            rows += [array, _scales(array)] if storage.cache_dtype == "int8" else [array]
    return tuple(rows)


def _scales(array: CacheArray) -> CacheArray:
    return msgspec.structs.replace(
        array, name=scale_name(array.name), dims=array.dims[:-1], shape=array.shape[:-1], dtype="fp32"
    )
