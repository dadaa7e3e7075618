"""`meshwright roofline --attention MODEL`: attention against the feed-forward block as the context grows.

Times are of one layer on one chip, without projections, keys and values in bf16. Source: How to Scale Your Model,
exercise 4.4.
"""

from collections.abc import Iterator
from typing import Any

from meshwright.calculators.verbs.roofline_sweep import Sweep
from meshwright.cli.output import four_digits
from meshwright.core.errors import InputError
from meshwright.core.units import counted, format_count
from meshwright.cost.formulas.accounting import attention_equal_len, attention_work
from meshwright.cost.formulas.roofline import (
    Operand,
    Work,
    channel_rate,
    chip_roofline,
    critical_intensity,
    einsum_work,
)
from meshwright.report.answer import Answer, Condition, Fact, Facts, Piece, Symbols, Table
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import Chip, compute_dtype, peak
from meshwright.spec.model import Model

LENGTHS = tuple(2**power for power in range(7, 21))


def attention_answer(name: str, unit: Chip, given: Any, sweep: Sweep | None) -> Answer:
    """Returns attention against the feed-forward block: prefill of one sequence, decode of ``given.batch_seqs``.

    ``given`` are the options of `roofline`; ``sweep`` has the lengths, None for the default ones.
    """
    if sweep is not None and list(sweep[0]) != ["T"]:
        raise InputError(f"--sweep {', '.join(sweep[0])}: attention is swept over T. Write T=128..1Mi.")
    model, dtype = load_model(name), compute_dtype(unit, "bf16")
    lengths = LENGTHS if sweep is None else [sizes["T"] for sizes in sweep]
    critical_flops_per_byte = critical_intensity(peak(unit, dtype), channel_rate(unit, "hbm"))
    shapes_by_phase = {"prefill": [(n, 1) for n in lengths], "generation": [(1, given.batch_seqs)] * len(lengths)}
    facts = {
        "model": model.name,
        "chip": unit.name,
        "compute_dtype": dtype,
        "critical_intensity": critical_flops_per_byte,
        "queries_per_kv_head": model.num_heads // model.num_kv_heads,
        "compute_bound_len": compute_bound_len(model, critical_flops_per_byte),
        "equal_flops_len": attention_equal_len(model),
        "batch_seqs": given.batch_seqs,
        **{
            phase: [
                block_times(model, unit, keys=keys, queries=queries, batch_seqs=seqs, dtype=dtype)
                for keys, (queries, seqs) in zip(lengths, shapes, strict=True)
            ]
            for phase, shapes in shapes_by_phase.items()
        },
    }
    rows = [{"phase": phase, **row} for phase in shapes_by_phase for row in facts[phase]]
    return Answer(facts, _text(facts), {given.png: lambda: _figure(facts)}, [rows, [facts]])


def compute_bound_len(model: Model, critical_intensity: float) -> float:
    """Returns the length from which attention in prefill is compute-bound: T G / (G + 1) > the critical intensity."""
    group_size = model.num_heads / model.num_kv_heads
    return critical_intensity * (group_size + 1) / group_size


def block_times(model: Model, chip: Chip, *, keys: int, queries: int, batch_seqs: int, dtype: str) -> Facts:
    """Returns seconds of attention and feed-forward of one layer, for ``batch_seqs`` sequences of ``queries`` new
    tokens.

    Compute and memory overlap perfectly. Every key counts, without causal mask or window. Raises InputError for a model
    with latent attention.
    """
    if model.latent_attention:
        raise InputError(f"{model.name} keeps latents instead of keys: name a model with plain or grouped heads.")
    work = attention_work(
        queries=queries,
        keys=keys,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        batch_seqs=batch_seqs,
    )
    attention_roof, ffw_s = chip_roofline(work, chip, dtype=dtype), _ffw_s(model, chip, queries * batch_seqs, dtype)
    return {
        "keys": keys,
        "intensity": work.intensity,
        "attention_s": attention_roof.lower_s,
        "ffw_s": ffw_s,
        "ratio": float(attention_roof.lower_s / ffw_s),
        "bound_by": attention_roof.bound_by,
    }


def _ffw_s(model: Model, chip: Chip, tokens: int, dtype: str) -> float:
    """Returns the seconds of the two or three matrices of the feed-forward block, of all experts that get tokens."""
    products: list[tuple[int, float, int]] = [(1, tokens, model.d_ff)]
    if model.num_experts:
        read = min(model.num_experts, tokens * model.experts_per_token)
        products = [(read, tokens * model.experts_per_token / read, model.d_ff_expert), (1, tokens, model.d_ff_shared)]
    x, w, h = (Operand(dims, "bf16") for dims in (("B", "D"), ("D", "F"), ("B", "F")))
    product_s = []
    for num_copies, num_rows, width in products:
        matrix_work = einsum_work((x, w), h, {"B": num_rows, "D": model.d_model, "F": width})
        work = Work(flops=num_copies * matrix_work.flops, num_bytes=num_copies * matrix_work.num_bytes)
        product_s.append(float(chip_roofline(work, chip, dtype=dtype).lower_s) if width else 0.0)
    return sum(product_s * (3 if model.gated else 2))


def _text(facts: Facts) -> Iterator[Piece]:
    """Yields the lengths as a table, then where attention becomes compute-bound."""
    rows = [
        [f"{prefill['keys']:,}", four_digits(prefill["intensity"]), prefill["bound_by"], f"{prefill['ratio']:.3g}",
         f"{generation['intensity']:,.3g}", generation["bound_by"], f"{generation['ratio']:.3g}"]
        for prefill, generation in zip(facts["prefill"], facts["generation"], strict=True)
    ]  # fmt: skip
    yield Table(
        ["context", "prefill FLOPs/byte", "bound by", "time / FFW", "decode FLOPs/byte", "bound by", "time / FFW"],
        rows,
        f"Attention of one layer of {facts['model']} on {facts['chip']}: its time over the feed-forward's (FFW)",
    )
    group_size, critical_flops_per_byte = facts["queries_per_kv_head"], facts["critical_intensity"]
    yield Fact(
        "prefill",
        f"compute-bound from {four_digits(facts['compute_bound_len'])} positions: T G / (G + 1) > "
        f"{four_digits(critical_flops_per_byte)} FLOPs/byte",
    )
    num_seqs = facts["batch_seqs"]
    bound_text = "never compute-bound" if group_size <= critical_flops_per_byte else "compute-bound"
    yield Fact(
        "decode", f"at most G = {group_size:g} FLOPs/byte: {bound_text}; {counted(num_seqs, 'sequence')} at once"
    )
    yield Symbols({"T": "positions", "G": "queries per KV head"})
    yield Condition("every score counts, as without a causal mask; projections do not; keys and values in bf16; on one "
                    "chip a block takes the longer of compute and memory")  # fmt: skip


def _figure(facts: Facts) -> Any:
    """Returns curves of attention's time over the feed-forward block's against the context."""
    from meshwright.report.marks import ReferenceLine
    from meshwright.report.sweeps import curves_figure

    batch_seqs = facts["batch_seqs"]
    marks = [ReferenceLine(axis="y", value=1.0, text="as long as the feed-forward block", at="end")]
    context_lens = [r["keys"] for r in facts["prefill"]]
    if min(context_lens) < facts["compute_bound_len"] < max(context_lens):
        marks.append(ReferenceLine(axis="x", value=facts["compute_bound_len"], text="prefill compute-bound", at="end"))
    name_by_phase = {"prefill": "prefill", "generation": f"generation, {format_count(batch_seqs)} at once"}
    return curves_figure(
        {name: [(float(row["keys"]), row["ratio"]) for row in facts[phase]] for phase, name in name_by_phase.items()},
        x_title="context (positions)",
        y_title="time of attention over feed-forward",
        title=f"Attention beside the feed-forward block: {facts['model']} on {facts['chip']}",
        subtitle="One layer on one chip, each block the larger of compute and memory; projections left out.",
        references=marks,
    )
