"""Layer programs: a transformer as a short list of ops over named dims (`algebra.layers` writes them as text)."""

import msgspec

from meshwright.algebra.steps import Role

WEIGHTS = ("weight", "vector")
"""Roles of weights. Training updates weights that are not frozen."""

LOSSES = ("loss", "mtp_loss")
"""Names of losses that training differentiates: cross entropy of the next token, and of the token after it."""


class Variable(msgspec.Struct, frozen=True):
    """A named array of a program: its dims, its dtype ("": the training state's), and the role that decides how it is
    split. ``inputs`` are the input dims of a weight's matrices, () for a vector. Training skips a ``frozen`` weight."""

    name: str
    dims: tuple[str, ...]
    role: str
    dtype: str = ""
    inputs: tuple[str, ...] = ()
    frozen: bool = False

    @property
    def is_whole_numbers(self) -> bool:
        """True for integers: tokens, labels, positions, inputs of masks. An encoder's features (dim M) are floats."""
        return self.role in ("input", "position") and "M" not in self.dims


class Op(msgspec.Struct, frozen=True):
    """``out = kind(inputs; attributes)``; ``inputs`` and ``out`` are names of variables, ``attributes`` pairs of name
    and value, such as the window of an attention."""

    kind: str
    inputs: tuple[str, ...]
    out: str
    attributes: tuple[tuple[str, str], ...] = ()


class Block(msgspec.Struct, frozen=True):
    """Ops that run in order; ``repeat`` layers of the model run them. A layer maps the stream ``carry`` ("": the block
    is no layer) to ``result``. ``shares`` are further results of a block of one layer, which later layers read.

    Layers run in loops (`algebra.transformer.spans`): ``num_in_last_iterations`` counts the block's layers that are in
    the last iteration of a loop.
    """

    name: str
    ops: tuple[Op, ...]
    repeat: int = 1
    carry: str = ""
    result: str = ""
    num_in_last_iterations: int = 1
    shares: tuple[str, ...] = ()

    @property
    def reads(self) -> dict[str, None]:
        """Names of the variables that the ops read, in order of first use."""
        return dict.fromkeys(name for op in self.ops for name in op.inputs)


def layers_dim(block: str) -> str:
    """Returns the dim that counts the layers of a block: L for the block layer, Lmoe for layer_moe, and so on."""
    return "L" + block.removeprefix("layer").replace("_", "")


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """A residual stream with the names of the blocks that it passes.

    ``first`` makes the stream ``carry`` ("": an earlier stack's result), ``layers`` are the blocks of the layers in
    order, and ``last`` ends the stream. ``inputs`` are results of earlier stacks that every layer of this one reads. A
    stack without a stream is one block, ``last``, which prepares weights that all layers of a later stack read.
    """

    first: str
    layers: tuple[str, ...]
    last: str
    carry: str
    inputs: tuple[str, ...] = ()


class Program(msgspec.Struct, frozen=True):
    """Blocks in order of first use, every variable they name, and the stacks that the blocks make up: a decoder is one
    stack, an encoder with a decoder two. Plain data: no sizes, no shardings. A program without stacks can be derived
    and priced; code that runs whole models needs the stacks.
    """

    blocks: tuple[Block, ...]
    variables: dict[str, Variable]
    stacks: tuple[Stack, ...] = ()

    def block_role(self, block: str) -> Role:
        """Returns the role of a block in its stack; a last block whose result no stack reads is a head."""
        for stack in self.stacks:
            if block == stack.first:
                return "first"
            if block == stack.last:
                names_read = {name for reader in self.stacks for name in (*reader.inputs, reader.carry)}
                return "last" if any(b.name == block and b.ops[-1].out in names_read for b in self.blocks) else "head"
        return "layer"

    def shared_inputs(self, block: str) -> tuple[str, ...]:
        """Returns the names of the results that layers of a block read besides their stream: ``inputs`` of their stack,
        and ``shares`` of earlier layers."""
        names_read = next((b.reads for b in self.blocks if b.name == block), {})
        from_layers = (name for b in self.blocks if b.name != block for name in b.shares if name in names_read)
        return (*next((stack.inputs for stack in self.stacks if block in stack.layers), ()), *from_layers)

    def of_role(self, *roles: str) -> tuple[Variable, ...]:
        """Returns the variables of these roles, in the order of ``variables``."""
        return tuple(v for v in self.variables.values() if v.role in roles)
