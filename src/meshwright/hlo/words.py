"""One instruction of a compiled program in words: what it does, the layout of its result, its source."""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from meshwright.core.units import counted, format_bytes, format_flops
from meshwright.hlo.groups import replica_groups
from meshwright.hlo.loops import times_run
from meshwright.hlo.module import LINES, NO_WORK, Instruction, Module
from meshwright.hlo.products import contracted_dims, is_product, product_flops
from meshwright.hlo.shapes import Shape

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_MAX_LISTED = 6

_WORDS: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "data" / "words.toml").read_text("utf-8"))
TPU_SPACES, OPCODES = _WORDS["tpu_spaces"], _WORDS["opcodes"]


def explain_instruction(module: Module, one: Instruction) -> tuple[tuple[str, str], ...]:
    """Returns a description of an instruction: one (label, text) for each line."""
    shapes = one.shapes
    num_runs = times_run(module, one.computation)
    times_text = "once" if num_runs == 1 else f"{num_runs:,} times"
    facts = [("does", _does(module, one))]
    if one.computation != LINES:
        facts.append(("runs", f"{times_text} in a call of the program, in computation {one.computation}"))
    if len(shapes) != 1:
        total_text = format_bytes(sum(shape.padded_bytes for shape in shapes))
        facts.append(("tuple", f"{len(shapes)} arrays, {total_text} in memory: {_listed(shapes, ', ')}"))
    if shapes:
        # A tuple is described by its largest element.
        facts += layout_facts(max(shapes, key=lambda shape: shape.padded_bytes), is_tpu=is_tpu(module))
    facts += [("step", str(one.label))] if one.label else []
    facts += [("operation", one.op_name)] if one.op_name else []
    facts += zip(("source", "called by", "called by"), map(str, module.source(one)), strict=False)
    if "replica_groups=" in one.attributes:
        with suppress(ValueError):  # a form that is not known
            groups = replica_groups(one.attributes, module.num_devices)
            texts = (f"{counted(len(rows), 'group')} of {rows.shape[1]:,}: {_comma(rows[0])}, ..." for rows in groups)
            facts.append(("devices", "; ".join(texts)))
    facts += [("product", words) for words in product_words(module, one)]
    if cycles_match := _CYCLES.search(one.attributes):
        facts.append(("estimate", f"{int(cycles_match[1]):,} cycles by the compiler's own model"))
    computation = module.computations[one.computation]
    facts.append(("operands", _named(computation.by_name.get(name) for name in one.operands)))
    if one.computation == LINES:
        return tuple(facts)
    users_text = "the computation's caller" if one.is_root else _named(computation.users.get(one.name, ()))
    return (*facts, ("used by", users_text))


def product_words(module: Module, one: Instruction) -> Iterator[str]:
    """Yields the contracted dims and FLOPs of each matrix product that an instruction is or has fused."""
    for inner in filter(is_product, module.fused(one)):
        op_of = module.computations[inner.computation].by_name
        shapes = [op_of[name].shapes[0] for name in inner.operands[:2] if name in op_of and op_of[name].shapes]
        num_flops, summed_dims = product_flops(inner, op_of), contracted_dims(inner)
        if num_flops and summed_dims:
            (left, right), size = map(_comma, summed_dims), inner.shapes[0].num_elements
            yield (
                f"{shapes[0]} x {shapes[1]} over dim {left} of the first and dim {right} of the second: 2 x {size:,} x "
                f"{num_flops // (2 * size):,} = {format_flops(num_flops, unit='FLOP')}"
            )


def layout_facts(shape: Shape, *, is_tpu: bool = True) -> list[tuple[str, str]]:
    """Describes one array: type, bytes, dim order, tiles, memory space, padding."""
    element_bytes, odd_bits = divmod(shape.element_bits, 8)
    element_text = f"{shape.dtype} of {f'{shape.element_bits} bits' if odd_bits else f'{element_bytes} B'}"
    return [
        ("shape", f"{shape}: {shape.num_elements:,} x {element_text}, {format_bytes(shape.num_bytes)}"),
        ("order", order_words(shape)),
        *(("tiles", text) for text in tile_words(shape)),
        *([("memory", space_words(shape.memory_space, is_tpu=is_tpu))] if is_tpu or shape.memory_space else []),
        ("padding", padding_words(shape)),
    ]


def order_words(shape: Shape) -> str:
    """Describes an order such as ``{1,0}``: which dim is contiguous, and which dims are outside it."""
    dim_texts = [f"dim {dim} ({shape.dims[dim]:,})" for dim in reversed(shape.order)]
    if not dim_texts:
        return "one number"
    order_text = f"{{{_comma(shape.order[::-1])}}}"
    if len(dim_texts) == 1:
        return f"{order_text}: {dim_texts[0]} is contiguous"
    return f"{order_text}: {dim_texts[0]} is contiguous, outside it {', then '.join(dim_texts[1:])}"


def tile_words(shape: Shape) -> list[str]:
    """Describes tiles such as ``T(8,128)(2,1)``, one line for each level of tiles."""
    if not shape.tiles:
        return []
    outer_tile, *inner_tiles = shape.tiles
    dims = [f"dim {dim}" for dim in shape.order[-len(outer_tile) :]]
    size_text = _by(outer_tile)
    lines = [f"T({_comma(outer_tile)}): {size_text} elements{' of ' + ' x '.join(dims) if dims else ''} are contiguous"]
    for tile in inner_tiles:
        words = f"({_comma(tile)}): inside, "
        num_rows = tile[-2] if len(tile) > 1 else 1
        if len(tile) > 1 and tile[-1] == 1 and num_rows > 1:
            word_bits = num_rows * shape.element_bits
            words += f"{num_rows} rows share {word_bits}-bit words, with one element of each"
        else:
            words += f"{_by(tile)} elements are contiguous"
        lines.append(words)
    return lines


def space_words(space: int, *, is_tpu: bool = True) -> str:
    """Describes a memory space by its number in a layout, on TPUs or GPUs."""
    if not is_tpu:
        gpu_spaces = {0: "the GPU's memory", 5: "the host's memory"}
        return f"S({space}): {gpu_spaces.get(space, 'a memory of its own')}" if space else gpu_spaces[0]
    text = TPU_SPACES.get(str(space), "a memory space without a public name")
    return f"S({space}): {text}" if space else text


def padding_words(shape: Shape) -> str:
    """Describes the padding that tiles add to an array; "none" if they add none."""
    if shape.padded_bytes <= shape.num_bytes:
        return "none"
    padded_dims = shape.padded_dims[len(shape.padded_dims) - len(shape.order) :]
    grown_dims = [
        f"dim {dim} from {size:,} to {padded:,}"
        for dim, size, padded in zip(shape.order, shape.physical, padded_dims, strict=True)
        if padded > size
    ]
    padding_share = 1 - shape.num_bytes / shape.padded_bytes
    dims_text = f": {', '.join(grown_dims)}" if grown_dims else ""
    return f"{format_bytes(shape.padded_bytes)} in memory, {padding_share:.1%} of it padding{dims_text}"


def is_tpu(module: Module) -> bool:
    """True if a module was compiled for a TPU, whose layouts have tiles."""
    return any(":T(" in instruction.shape for instruction in module.computations[module.entry].instructions)


def opcode_words(one: Instruction) -> str:
    """Describes an opcode in a few words."""
    base_opcode = re.sub(r"-(start|done|update)$", "", one.opcode)
    text = OPCODES.get(base_opcode, "element by element" if one.operands else base_opcode)
    if one.opcode.endswith("-start"):
        return f"{text}; only begins here"
    return f"{text}; ends here what began earlier" if one.opcode.endswith("-done") else text


def _does(module: Module, one: Instruction) -> str:
    text = f"{one.opcode}: {opcode_words(one)}"
    callee = module.computations.get(dict(one.called).get("calls", ""))
    if callee and one.opcode == "async-start":
        text = f"{one.opcode} of {callee.root.opcode}: {opcode_words(callee.root)}; only begins here"
    if one.target:
        text += f" ({one.target})"
    if callee and one.opcode == "fusion":
        opcode_counts = Counter(i.opcode for i in callee.instructions if i.opcode not in NO_WORK)
        text += f"; of {', '.join(f'{count} {opcode}' for opcode, count in opcode_counts.most_common(8))}"
    return text


def _named(instructions: Iterable[Instruction | None]) -> str:
    texts = [f"{i.name} {_listed(i.shapes, ', ')}".strip() if i else "?" for i in instructions]
    return _listed(texts, "; ") or "none"


def _listed(items: Sequence[object], separator: str) -> str:
    num_left = len(items) - _MAX_LISTED
    return separator.join(map(str, items[:_MAX_LISTED])) + (f" and {num_left} more" if num_left > 0 else "")


def _by(sizes: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in sizes)


def _comma(sizes: Iterable[int]) -> str:
    return ",".join(map(str, sizes))
