"""The programs of generation with weights as they are stored: some in narrow dtypes, with scales."""

import math

from msgspec.structs import replace

from meshwright.algebra.generation.program import (
    AS_WRITTEN,
    Storage,
    WeightDtype,
    plain_encoding,
    plain_program,
    scale_name,
)
from meshwright.algebra.program import Op, Program, Variable
from meshwright.algebra.transformer import transformer, weight_variables
from meshwright.core.dims import DTYPE_BYTES
from meshwright.spec.model import Model
from meshwright.spec.weights import group_dims


def quantised_weights(model: Model, dtype: WeightDtype) -> dict[str, tuple[Variable, Variable]]:
    """Maps each quantised weight to two variables: the weight in its narrow dtype, and its scales in float32.

    Quantised are matrices of products and the table of tokens, but not routers, which choose by small differences,
    tables of positions or adapters; without a ``dtype``, the matrices that the model's folder stores narrow. Scales
    have the dims that no product sums; int4 scales are of groups of `spec.model.GROUP` inputs. With int4 the table of
    tokens and the head are in int8, as are matrices with an odd number of inputs. Scales are split as their weight is,
    but scales over D, Rq or Rkv only are whole.
    """
    stored_of = {name: (narrow, grouped) for name, narrow, grouped in model.stored.matrices} if model.stored else {}
    if not (dtype or stored_of):
        return {}
    weight_by_name = {name: weight for name, (weight, _) in weight_variables(model).items()}
    scale_dims_of: dict[str, set[str]] = {}
    programs = [plain_program(model, AS_WRITTEN, joined=is_joined) for is_joined in (False, True)]
    for program in (*programs, *([plain_encoding(model, AS_WRITTEN)] if model.encoder else [])):
        for op in (op for block in program.blocks for op in block.ops if op.kind in QUANTISED):
            weight = weight_by_name.get(op.inputs[1])
            if weight and weight.part not in ("router", "adapter") and weight.dims[0] != "P":
                dims = program.variables[op.out].dims if op.kind == "einsum" else weight.dims[:1]
                scale_dims_of[op.inputs[1]] = scale_dims_of.get(op.inputs[1], set(weight.dims)) & set(dims)
    pair_of, variables = {}, transformer(model).variables
    for name, scale_dims in scale_dims_of.items():
        weight, stored_dtype = weight_by_name[name], dtype
        dims = tuple(dim for dim in weight.dims if dim in scale_dims)
        if not dtype:
            stored_dtype, has_groups = stored_of.get(weight.name, ("", False))
            if not stored_dtype or not (has_groups or len(dims) == len(weight.dims) - len(weight.inputs)):
                continue
            dims = group_dims(weight.dims, weight.inputs) if has_groups else dims
        elif (
            dtype == "int4"
            and weight.part != "embedding"
            and weight.layers
            and weight.inputs
            and model.dims[weight.inputs[-1]] % 2 == 0
        ):
            dims = group_dims(weight.dims, weight.inputs)
        elif dtype == "int4":
            stored_dtype = "int8"
        role = "vector" if set(dims) <= {"D", "Rq", "Rkv"} else "weight"
        pair_of[name] = replace(variables[name], dtype=stored_dtype), Variable(scale_name(name), dims, role, "fp32")
    return pair_of


def weight_bytes(model: Model, dtype: WeightDtype, width: int) -> float:
    """Returns the bytes of all weights with their scales; ``width`` is the bytes of an unquantised element."""
    arrays_of, sizes = quantised_weights(model, dtype), model.dims
    return sum(
        num_layers * math.prod(sizes[dim] for dim in array.dims) * DTYPE_BYTES.get(array.dtype, width)
        for name, (weight, num_layers) in weight_variables(model).items()
        for array in arrays_of.get(name, (weight,))
    )


QUANTISED = ("einsum", "embed")
"""Ops whose second input may be quantised: ``quantised_einsum`` and ``quantised_embed`` take its scales as a third."""


def generation_program(model: Model, storage: Storage = AS_WRITTEN, *, joined: bool = False) -> Program:
    """Returns the program of a server's step, which ends in logits[O,V].

    It reads a token of each row, tokens[B,T] at positions[B,T] where T is 1, and ``slots``[B,T], the slot of each row
    in the pool of pages (beyond the pool for padding), to which it first writes the row's key. A sequence of Q has
    ``counts``[Q] rows from ``first``[Q] on, and ``lengths``[Q] positions with these. ``last``[O] are the rows whose
    logits it returns. With an encoder a sequence's source has ``source_lengths``[Q] positions, in pages
    ``source_pages``[Q,Bx] that `encoding_program` has written. With several adapters, ``adapters``[B,T] is the number
    of each row's adapter, -1 for none. In latent attention with ``joined`` rows attend to rows of their own step by
    keys and values of heads, as in training.
    """
    return _with_narrow_weights(plain_program(model, storage, joined=joined), model, storage)


def encoding_program(model: Model, storage: Storage = AS_WRITTEN) -> Program:
    """Returns the program that encodes sources: the encoder, then keys and values of cross-attention of every decoder
    layer.

    It reads ``encoder_tokens``[B,S] of B sources, whose first ``encoder_lengths``[B] positions are not padding, and
    writes to ``encoder_slots``[B,S] of the pool of pages (beyond the pool for padding).
    """
    return _with_narrow_weights(plain_encoding(model, storage), model, storage)


def _with_narrow_weights(program: Program, model: Model, storage: Storage) -> Program:
    """Returns a program with the weights of products quantised, and with their scales, as ``storage`` says."""
    if not (pair_of := quantised_weights(model, storage.weights)):
        return program
    variable_by_name = program.variables | {variable.name: variable for pair in pair_of.values() for variable in pair}

    def with_scale(op: Op) -> Op:
        if op.kind == "past_latent_attention":
            return replace(op, inputs=(*op.inputs, *(pair_of[n][1].name for n in op.inputs[-2:] if n in pair_of)))
        if op.kind not in QUANTISED or op.inputs[1] not in pair_of:
            return op
        inputs = (*op.inputs, pair_of[op.inputs[1]][1].name)
        return replace(op, kind=f"quantised_{op.kind}", inputs=inputs)

    blocks = tuple(replace(b, ops=tuple(map(with_scale, b.ops))) for b in program.blocks)
    return Program(blocks, variable_by_name, program.stacks)
