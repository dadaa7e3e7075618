"""The program of generation, made of the ops of a model's training program.

It is the step of a server. A row is one position of any sequence, so that sequences which get one more token and parts
of prompts share the step; keys and values are in pages. It returns the logits of selected rows. With latent attention
the cache has latents and the rotated keys that all heads share; rows attend to these: queries, not latents, are
multiplied with the keys' projection (DeepSeek-V2, 2024, section 2.1.2).
"""

from typing import Literal, get_args

import msgspec
import numpy as np
from msgspec.structs import replace

from meshwright.algebra.layers import CROSS, ENCODED, ENCODER_END, PLAIN, ProgramOptions, mask_data
from meshwright.algebra.program import Block, Op, Program, Stack, Variable
from meshwright.algebra.transformer import layer_kinds, parse_block, transformer
from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.masks.names import mask_named
from meshwright.masks.user import is_users, table_of_user
from meshwright.spec.model import MASK_DATA, Model

Attributes = tuple[tuple[str, str], ...]
CacheDtype = Literal["bf16", "fp32", "int8", "fp8"]
WeightDtype = Literal["", "int8", "fp8", "int4", "fp4"]
WeightStorage = Literal["as they are", "int8", "fp8", "int4"]
"""Weight dtypes that this version executes; "as they are" stands for "" in `WeightDtype`."""


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """How generation stores weights and caches.

    ``weights`` is the dtype of matrices, see `quantised_weights` ("": the training state's); all but fp4 are executed
    in this version. int8 caches have scales; fp8 caches have none and clip larger values. Position p of a sequence is
    in slot p mod Pl of the page that ``pages[Q, Bp]`` names for p // Pl: pages have ``page_len`` slots (0: as many as a
    sequence has positions), and all devices have ``num_pages`` together (0: enough for every sequence). Layers with a
    window have ``window_pages`` of their own (0: they use ``num_pages``). ``adapters`` is the number of adapters that
    share the rank of the model's adapter; each row uses one.
    """

    cache_dtype: CacheDtype = "bf16"
    weights: WeightDtype = ""
    page_len: int = 0
    num_pages: int = 0
    window_pages: int = 0
    adapters: int = 0

    def __post_init__(self) -> None:
        for kind, dtype, dtypes in (
            ("cache", self.cache_dtype, get_args(CacheDtype)),
            ("weight", self.weights, get_args(WeightDtype)),
        ):
            if dtype not in dtypes:
                options = ", ".join(filter(None, dtypes))
                raise InputError(f"{kind} dtype {dtype!r} is not known.{nearest(dtype, dtypes)} Use one of {options}.")
        if self.page_len < 0 or self.num_pages < 0:
            raise InputError(f"page_len={self.page_len} and num_pages={self.num_pages} must be at least 0.")

    @property
    def executed(self) -> tuple[CacheDtype, WeightStorage]:
        """The dtypes of caches and weights that a step runs with. Raises CannotRunError for fp4 weights."""
        if self.weights == "fp4":
            raise CannotRunError("weights in fp4 are planned, not executed, in this version. Use int4, fp8 or int8.")
        return self.cache_dtype, self.weights or "as they are"


def weight_dtype(weights: WeightStorage) -> WeightDtype:
    """Returns the dtype for `Storage.weights`: "" for "as they are", else the argument."""
    return "" if weights == "as they are" else weights


AS_WRITTEN = Storage()
"""Weights in the dtype of the state, caches in bfloat16."""

PAGES = "pages"
"""The variable of the page table: for each sequence the numbers of its pages."""
WINDOW_PAGES = "window_pages"
"""The page table of layers with a window, if these have pages of their own."""
SOURCE_PAGES = "source_pages"
"""The page table of sources, whose keys and values cross-attention reads from pages of the common pool."""


def caches_of(block: Block) -> tuple[str, ...]:
    """Returns the names of the caches that a layer of a block writes and reads."""
    return tuple(op.inputs[0] for op in block.ops if op.kind == "cache_write")


def scale_name(name: str) -> str:
    """Returns the name of the variable that holds the scales of an int8 array."""
    return f"{name}_scale"


# -- programs -------------------------------------------------------------------------------------------


def plain_program(model: Model, storage: Storage, *, joined: bool = False) -> Program:
    """Returns the program, weights unquantised. Raises CannotRunError if a mask lets positions see later ones."""
    if model.attention_mask and _sees_later(model.attention_mask):
        raise CannotRunError(
            f"with attention_mask={model.attention_mask!r} of {model.name} a position sees later ones, which do not "
            f"exist when it is generated. Use prefix_lm, transfusion or causal & ... to generate."
        )
    training = transformer(model)
    writer, (_, stacks) = _Writer(model, storage, training, joined=joined), _parts(training)
    names = {name for stack in stacks for name in (stack.first, *stack.layers, stack.last)}
    blocks = tuple(writer.block(block) for block in training.blocks if block.name in names)
    return _program_of(blocks, writer, stacks)


def plain_encoding(model: Model, storage: Storage) -> Program:
    """Returns the program that encodes sources, with unquantised weights."""
    training = transformer(model, ProgramOptions(encoder_lengths=True))
    writer, (stacks, (*_, decoder)) = _Writer(model, storage, training, joined=False), _parts(training)
    names = {name for stack in stacks for name in (stack.first, *stack.layers, stack.last)}
    blocks = (
        *(block for block in training.blocks if block.name in names),
        *(writer.source_keys(block) for block in training.blocks if block.name in decoder.layers),
    )
    layers = tuple(f"{CROSS}{name}" for name in decoder.layers)
    return _program_of(blocks, writer, (*stacks, Stack(first="", layers=layers, last="", carry=ENCODED)))


def _parts(training: Program) -> tuple[tuple[Stack, ...], tuple[Stack, ...]]:
    """Returns the encoder's stacks, () without one, and the stacks after it, which read its result from pages."""
    stack_index = next((i for i, stack in enumerate(training.stacks, 1) if stack.last == ENCODER_END), 0)
    stacks = training.stacks[stack_index:]
    names = (tuple(name for name in stack.inputs if name != ENCODED) for stack in stacks)
    later_stacks = (replace(stack, inputs=inputs) for stack, inputs in zip(stacks, names, strict=True))
    return training.stacks[:stack_index], tuple(later_stacks)


def _program_of(blocks: tuple[Block, ...], writer: "_Writer", stacks: tuple[Stack, ...]) -> Program:
    used_names = {name for block in blocks for op in block.ops for name in (*op.inputs, op.out)}
    return Program(blocks, {name: v for name, v in writer.variables.items() if name in used_names}, stacks)


def _sees_later(mask: str) -> bool:
    """True if a mask shows later positions without prefix or image; 32 positions decide it for the catalogue."""
    if is_users(mask):
        return bool(np.triu(table_of_user(mask, q_len=32, kv_len=32, block=1).table.kinds, 1).any())
    positions, rule = np.arange(32), mask_named(mask)
    data_arrays = (np.full((1, 32)[: len(MASK_DATA[name])], 32 * (name == "lengths")) for name in rule.data)
    return bool((rule.make(*data_arrays)(0, 0, positions[:, None], positions) & (positions > positions[:, None])).any())


class _Writer:
    """Rewrites blocks of a training program for generation, and collects every variable that they name."""

    def __init__(self, model: Model, storage: Storage, training: Program, *, joined: bool) -> None:
        self.joined = joined and model.latent_attention and not (model.attention_mask or model.attention_score)
        self.model, self.storage = model, storage
        self.training, self.variables = training, dict(training.variables)
        self.ops: list[Op] = []
        self.outputs: list[str] = []
        if storage.adapters:
            self.variables |= {"adapters": Variable("adapters", ("B", "T"), "position")}
        for name in mask_data(model, PLAIN):  # of all positions of a sequence
            dim_of = {"B": "Q", "T": "S"}
            self.variables[name] = Variable(name, tuple(dim_of.get(dim, dim) for dim in MASK_DATA[name]), "position")

    def block(self, block: Block) -> Block:
        """Returns the rewritten block under its name, without ops whose results are no longer used."""
        self.ops, self.outputs = [], []
        if self.training.block_role(block.name) == "head":
            self._head(block)
        else:
            for op in block.ops:
                if op.kind == "attention" and "S" in self.variables[op.inputs[1]].dims:
                    self._cross_attention(op, block)
                elif op.kind == "attention":
                    self._attention(op, block)
                elif self.storage.adapters and op.kind == "scaled" and self.variables[op.out].dims[-1] == "Ra":
                    attributes = (*op.attributes, ("count", f"{self.storage.adapters}"))
                    self.ops.append(Op("pick_adapter", (*op.inputs, "adapters"), op.out, attributes))
                else:
                    self.ops.append(op)
        shares = () if block.carry else block.shares  # shared keys and values are in caches
        results = {block.result or self.ops[-1].out, *self.outputs, *shares}
        return replace(block, ops=self._needed(results), shares=shares)

    def source_keys(self, block: Block) -> Block:
        """Returns a decoder layer's block in the program that encodes sources: it writes keys and values of its
        cross-attention into its caches."""
        attention_op = next(op for op in block.ops if op.kind == "attention" and op.inputs[1].startswith(CROSS))
        self.ops, self.outputs = list(block.ops), []
        self.variables["encoder_slots"] = Variable("encoder_slots", ("B", "S"), "position")
        for letter, source_name in zip("kv", attention_op.inputs[1:3], strict=True):
            self._write(self._cache_name(letter, block), source_name, "encoder_slots", "Pg")
        name = f"{CROSS}{block.name}"
        return replace(block, name=name, ops=self._needed(set(self.outputs)), carry=ENCODED, result=ENCODED)

    def _needed(self, names: set[str]) -> tuple[Op, ...]:
        """Returns the ops, in order, on which the results of these names depend."""
        ops = list[Op]()
        for op in reversed(self.ops):
            if op.out in names:
                names.update(op.inputs)
                ops.insert(0, op)
        return tuple(ops)

    def _add(self, kind: str, inputs: tuple[str, ...], variable: Variable, attributes: Attributes = ()) -> str:
        """Adds an op and the variable that it makes; returns the variable's name."""
        self.variables[variable.name] = variable
        self.ops.append(Op(kind, inputs, variable.name, attributes))
        return variable.name

    def _head(self, block: Block) -> None:
        """Adds the ops that make the logits of the rows ``last``[O]."""
        num_before = next(i for i, op in enumerate(block.ops) if op.out == "hf")
        norm_op, *division_ops, loss_op = block.ops[num_before:]
        table_weight, softcap = self.variables[loss_op.inputs[1]], self.model.logit_softcap
        vectors_text = ", ".join(f"{name}[D]" for name in norm_op.inputs[1:])
        stream_name, result_name = "hd" if division_ops else "hl", "uncapped" if softcap else "logits"
        product_name = "unbiased" if self.model.logit_bias else result_name
        lines = [
            "xl[O,D] = pick(x[B,T,D], last[O])",
            f"hl[O,D] = {norm_op.kind}(xl[O,D], {vectors_text})",
            *(f"hd[O,D] = {op.kind}(hl[O,D]; by={dict(op.attributes)['by']})" for op in division_ops),
            f"{product_name}[O,V] = {stream_name}[O,D] * {table_weight.name}[{','.join(table_weight.dims)}]",
            *([f"{result_name}[O,V] = bias_add(unbiased[O,V], unembed_bias[V])"] if self.model.logit_bias else []),
            *(["logits[O,V] = softcap(uncapped[O,V])"] if softcap else []),
        ]
        for name, dims, role, dtype in (
            ("last", ("O",), "position", ""),
            ("unbiased", ("O", "V"), "activation", "fp32"),
            ("uncapped", ("O", "V"), "activation", "fp32"),
            ("logits", ("O", "V"), "output", "fp32"),
        ):
            self.variables[name] = Variable(name, dims, role, dtype)
        self.ops += (*block.ops[:num_before], *parse_block(block.name, "\n".join(lines), self.variables).ops)

    def _attention(self, op: Op, block: Block) -> None:
        """Adds the ops that write keys and values, or latents and rotated keys, to the cache, and attention on it."""
        q, k, v, *operand_names = op.inputs
        maker_of = {maker.out: maker for maker in block.ops}
        source_by_letter = {"k": k, "v": v}
        if self.model.latent_attention:
            key_part, shared_key = maker_of[k].inputs
            source_by_letter = {"c": maker_of[key_part].inputs[0], "p": shared_key}
        has_window = any(name == "window" for op in block.ops for name, _ in op.attributes)
        is_window = has_window and bool(self.storage.window_pages)
        pages_name, slots_name, pool_dim = (WINDOW_PAGES, "window_slots", "Pw") if is_window else (PAGES, "slots", "Pg")
        sequence_names = ("first", "counts", "lengths")
        self.variables |= {name: Variable(name, ("Q",), "position") for name in sequence_names}
        self.variables[pages_name] = Variable(pages_name, ("Q", "Bp"), "position")  # the pages of each sequence
        self.variables[slots_name] = Variable(slots_name, ("B", "T"), "position")
        cache_names, cache_scale_names = list[str](), list[str]()
        for letter, source_name in source_by_letter.items():
            owner = next((b for b in self.training.blocks if source_name in b.shares), block)
            cache_name = self._cache_name(letter, owner)
            scale_names = [scale_name(cache_name)] * (self.storage.cache_dtype == "int8")
            if owner.name == block.name:  # else an earlier layer has written
                cache_name, *scale_names = self._write(cache_name, source_name, slots_name, pool_dim)
            cache_names.append(cache_name)
            cache_scale_names += scale_names
        inputs, attributes = (*cache_names, *sequence_names, pages_name, *cache_scale_names), op.attributes
        if self.model.latent_attention:
            wk, wv = maker_of[maker_of[k].inputs[0]].inputs[1], maker_of[v].inputs[1]
            if not self.joined:
                # queries, multiplied with the keys' projection, attend to latents; the values' projection follows
                latent_dims = ("B", "T", "N", "Rkv")
                plain_q = self._add("unrotated_part", (q,), Variable("qn", ("B", "T", "N", "Hn"), "activation"))
                latent_q = self._add("einsum", (plain_q, wk), Variable("ql", latent_dims, "activation"))
                array = Variable("oc", latent_dims, "activation")
                result = self._add("cached_latent_attention", (latent_q, q, *inputs, *operand_names), array, attributes)
                self.ops.append(Op("einsum", (result, wv), op.out))
                return
            # rows of this step attend to each other as in training, by keys and values of heads
            out = self.variables[op.out]
            fresh_out = self._add("prompt_attention", (q, k, v, "first", "counts"), replace(out, name="of"))
            past_out = self._add("past_latent_attention", (q, *inputs, wk, wv), replace(out, name="op"), attributes)
            part_names = (
                self._add("share", (fresh_out, past_out), replace(out, name="on")),
                self._add("share", (past_out, fresh_out), replace(out, name="os")),
            )
            self.ops.append(Op("add", part_names, op.out))
        else:
            self.ops.append(Op("cached_attention", (q, *inputs, *operand_names), op.out, attributes))

    def _cross_attention(self, op: Op, block: Block) -> None:
        """Adds attention to the keys and values of sources, which are in separate caches of the same layer."""
        variables = Variable("source_lengths", ("Q",), "position"), Variable(SOURCE_PAGES, ("Q", "Bx"), "position")
        self.variables |= {variable.name: variable for variable in variables}
        caches = [f"{self._cache_name(letter, block)}{part}'" for part in ("", "_scale") for letter in "kv"]
        places = "first", "counts", *(variable.name for variable in variables)
        written_names = [name for name in caches if name in self.outputs]
        inputs = op.inputs[0], *written_names[:2], *places, *written_names[2:]
        self.ops.append(Op("cached_attention", inputs, op.out, op.attributes))

    def _cache_name(self, letter: str, block: Block) -> str:
        """Returns the name of a cache of the layers of a block."""
        return f"cache_{letter}{next(kind.suffix for kind in layer_kinds(self.model) if kind.block == block.name)}"

    def _write(self, cache_name: str, source: str, slots_name: str, pool_dim: str) -> list[str]:
        """Adds the ops that write into a cache; returns the names of the written cache and, with int8, its scales."""
        dims, dtype = self.variables[source].dims, str(self.storage.cache_dtype)
        writes = [(cache_name, source, dims, dtype)]
        if dtype == "int8":
            scale = self._add("kv_scale", (source,), Variable(scale_name(source), dims[:-1], "activation", "fp32"))
            int8_array = Variable(f"{source}_int8", dims, "activation", dtype)
            values_name = self._add("kv_quantise", (source, scale), int8_array)
            writes = [(cache_name, values_name, dims, dtype), (scale_name(cache_name), scale, dims[:-1], "fp32")]
        written_names = []
        for name, array_name, array_dims, array_dtype in writes:
            cache_array = Variable(name, (pool_dim, "Pl", *array_dims[2:]), "cache", array_dtype)
            self.variables[name] = cache_array
            new_array = replace(cache_array, name=f"{name}'")
            written_names.append(self._add("cache_write", (name, array_name, slots_name), new_array))
        self.outputs += written_names
        return written_names
