"""Programs of generation: what they share with the training program, and the cache as a table of state."""

import pytest
from msgspec.structs import replace

from meshwright.algebra.derive import derive
from meshwright.algebra.generation.cache import cache_table, sequence_bytes
from meshwright.algebra.generation.derive import derive_generation
from meshwright.algebra.generation.program import Storage, WeightDtype
from meshwright.algebra.generation.stored import encoding_program, generation_program, quantised_weights, weight_bytes
from meshwright.algebra.notation import local_elements
from meshwright.algebra.ops import kind_of
from meshwright.algebra.program import Program
from meshwright.algebra.rewrites.repeated_heads import strategy_of_heads
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.transformer import layer_dims, transformer, weight_variables
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.formulas.accounting import kv_cache_bytes
from meshwright.cost.work.sequences import LikeSequences
from meshwright.spec.catalogue import load_model, models
from meshwright.spec.model import GROUP, Lora, Model
from meshwright.spec.strategy import (
    LAYOUTS,
    Strategy,
    cache_assignment,
    held_dims,
    make_mesh,
    standard_assignment,
    stationary_assignment,
)

LLAMA = load_model("llama3-8b")


def lines(program: Program, block: str = "layer") -> list[str]:
    """Ops of a block by what they make of what."""
    (found,) = (b for b in program.blocks if b.name == block)
    return [f"{op.out} = {op.kind}({', '.join(op.inputs)})" for op in found.ops]


def test_generation_is_the_training_layer_with_its_keys_in_the_cache():
    training, generate = (lines(p) for p in (transformer(LLAMA), generation_program(LLAMA)))
    assert [line for line in training if line not in generate] == ["o = attention(qr, kr, v)"]
    assert [line for line in generate if line not in training] == [
        "cache_k' = cache_write(cache_k, kr, slots)",
        "cache_v' = cache_write(cache_v, v, slots)",
        "o = cached_attention(qr, cache_k', cache_v', first, counts, lengths, pages)",
    ]


def test_rows_keep_the_products_of_their_own_adapter():
    """One op between the two products, in whole columns; without several adapters the program is the training one's."""
    model, paged = replace(LLAMA, lora=Lora(rank=8, alpha=8, targets="q,down")), Storage(page_len=16)
    alone, several = (generation_program(model, replace(paged, adapters=count)) for count in (0, 4))
    added = [line for line in lines(several) if line not in lines(alone)]
    assert added == [f"{w}_lora_a_scaled = pick_adapter({w}_lora_a_low, adapters)" for w in ("wq", "w_down")]
    assert len(lines(several)) == len(lines(alone))
    assert "adapters" not in alone.variables
    derived = derive_generation(model, Strategy(mesh=make_mesh({"tensor": 2})), replace(paged, adapters=4))
    (layer,) = (block for block in derived.blocks if block.block.name == "layer")
    steps = [step for step in layer.forward if step.op == "pick_adapter"]
    assert [str(step.inputs[0]) for step in steps] == ["wq_lora_a_low[B, T, Ra]", "w_down_lora_a_low[B, T, Ra]"]
    sizes = OpSizes(dims=model.dims | {"B": 32, "T": 1}, mesh={"tensor": 2}, state="bf16-adam")
    assert kind_of(steps[0]).hbm_bytes(steps[0], sizes) == 32 * (2 * 2 * 8 + 4)


def test_adapters_are_not_quantised():
    assert scales(replace(LLAMA, lora=Lora(rank=8))) == scales(LLAMA)


def test_the_head_makes_logits_of_one_position():
    assert lines(generation_program(load_model("gemma2-9b")), "head") == [
        "xl = pick(x, last)",
        "hl = rms_norm(xl, final_norm)",
        "uncapped = einsum(hl, embed)",
        "logits = softcap(uncapped)",
    ]


def test_a_look_up_reads_int8_rows_and_their_scales():
    """A token of D=4096: its number, an int8 row with a float32 scale, and the bf16 row that is written."""
    derived = derive_generation(LLAMA, Strategy(mesh=make_mesh({})), Storage(weights="int8"))
    (step,) = (step for step in derived.blocks[0].forward if step.op == "quantised_embed")
    sizes = OpSizes(dims=LLAMA.dims | {"B": 1, "T": 1}, mesh={}, state="bf16-adam")
    assert kind_of(step).hbm_bytes(step, sizes) == 4 + (4096 + 4) + 2 * 4096


DECODERS = [name for name in models() if not load_model(name).encoder]


@pytest.mark.parametrize("name", DECODERS)
def test_every_model_has_both_programs_over_its_own_weights(name):
    model = load_model(name)
    weights, sources = set(weight_variables(model)), [encoding_program(model)] if model.encoder else []
    for program in (generation_program(model, joined=joined) for joined in (False, True)):
        programs = [program, *sources]
        used = [{name for block in p.blocks for op in block.ops for name in op.inputs} for p in programs]
        assert weights <= set().union(*used), "each pass reads every weight"
        assert all(names <= set(p.variables) for names, p in zip(used, programs, strict=True))


def test_latents_meet_queries_that_went_through_the_keys_projection():
    found = lines(generation_program(load_model("deepseek-v3")))
    assert "ql = einsum(qn, wk_b)" in found
    assert "oc = cached_latent_attention(ql, qr, cache_c', cache_p', first, counts, lengths, pages)" in found
    assert "o = einsum(oc, wv_b)" in found
    assert not [line for line in found if line.startswith(("kn =", "v =", "kr ="))], "no keys or values are made"


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("max_len", [1, 100, 5000, 200_000])
def test_the_cache_table_holds_what_cost_counts(name, max_len):
    for dtype, element_bytes in (("bf16", 2), ("fp32", 4)):
        expected = kv_cache_bytes(load_model(name), max_len, element_bytes=element_bytes)
        assert sequence_bytes(load_model(name), max_len, Storage(cache_dtype=dtype)) == expected


def test_int8_keeps_a_scale_for_each_token_and_head():
    table = cache_table(LLAMA, batch_seqs=2, max_len=1000, storage=Storage(cache_dtype="int8"))
    assert [(row.name, row.dims, row.dtype) for row in table] == [
        ("cache_k", ("Pg", "Pl", "K", "H"), "int8"),
        ("cache_k_scale", ("Pg", "Pl", "K"), "fp32"),
        ("cache_v", ("Pg", "Pl", "K", "H"), "int8"),
        ("cache_v_scale", ("Pg", "Pl", "K"), "fp32"),
    ]
    halves = 2 * kv_cache_bytes(LLAMA, 1000, element_bytes=1)
    assert sum(row.num_bytes for row in table) == halves * (1 + 4 / 128)


def test_a_cache_that_cannot_be_kept_so():
    with pytest.raises(InputError, match=r"cache dtype 'int4' is not known.*int8"):
        Storage(cache_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="page_len=-1"):
        Storage(page_len=-1)


def test_each_device_keeps_its_own_sequences_and_heads():
    strategy = Strategy(mesh=make_mesh({"data": 2, "fsdp": 2, "tensor": 4}))
    for prompts in (False, True):
        declared = derive_generation(LLAMA, strategy, prompts=prompts).declared
        assert str(declared["cache_k"]) == "cache_k[Pg_{data,fsdp}, Pl, K_tensor, H]"
        assert str(declared["logits"]) == "logits[O_{data,fsdp}, V]"


def test_the_cache_role_can_be_assigned():
    assignment = {**standard_assignment(), "cache": {"B": ("data",), "K": ("tensor",)}}
    strategy = Strategy(mesh=make_mesh({"data": 2, "fsdp": 2, "tensor": 4}), assignment=assignment)
    assert str(derive_generation(LLAMA, strategy).declared["cache_k"]) == "cache_k[Pg_data, Pl, K_tensor, H]"


def test_queries_need_their_heads_beside_the_cache():
    assignment = {**standard_assignment(), "cache": {"B": ("data",)}}
    strategy = Strategy(mesh=make_mesh({"tensor": 4}), assignment=assignment)
    with pytest.raises(InputError, match="heads must be split alike"):
        derive_generation(LLAMA, strategy)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "kimi-k2"])
def test_a_latent_cache_is_whole_beside_heads_that_are_split(name):
    strategy = Strategy(mesh=make_mesh({"data": 2, "tensor": 2}))
    derived = derive_generation(load_model(name), strategy)
    reads = [step for block in derived.blocks for step in block.forward if step.op.startswith("cached_")]
    assert {str(step.inputs[0]) for step in reads} == {"ql[B_data, T, N_tensor, Rkv]"}
    assert {str(step.inputs[2]).partition("[")[2] for step in reads} == {"Pg_data, Pl, Rkv]"}


@pytest.mark.parametrize("name", models())
def test_every_decoder_generates_with_tensor(name):
    strategy = Strategy(mesh=make_mesh({"data": 2, "tensor": 2}))
    derived = derive_generation(load_model(name), strategy)
    reads = [step for block in derived.blocks for step in block.forward if step.op.startswith("cached_")]
    assert {step.inputs[0].axes[2] for step in reads} == {("tensor",)}


def test_one_position_is_never_split():
    strategy = Strategy(mesh=make_mesh({"context": 2, "expert": 2, "tensor": 2}))
    derived = derive_generation(load_model("mixtral-8x7b"), strategy)
    for block in derived.blocks:
        for step in block.forward:
            for array in (*step.inputs, step.result):
                assert not array.axes_of("T"), f"{step}"
                assert array.axes_of("C") in ((), ("expert",)), f"{step}"


def test_collectives_of_a_layer_that_generates():
    strategy = Strategy(mesh=make_mesh({"tensor": 2, "data": 2}), assignment=standard_assignment(zero=0))
    derived = derive_generation(LLAMA, strategy)
    found = {b.block.name: [s.op for s in b.forward if s.is_collective] for b in derived.blocks}
    assert found == {"embed": ["all_reduce"], "layer": ["all_reduce"] * 2, "head": ["all_gather"]}


def test_nothing_is_held_or_differentiated():
    derived = derive_generation(LLAMA, Strategy(mesh=make_mesh({"fsdp": 2})))
    assert not derived.update
    assert not any(block.backward or block.kept for block in derived.blocks)
    with pytest.raises(AssertionError, match="has no backward pass"):
        derive(generation_program(LLAMA), Strategy(mesh=make_mesh({})))


def scales(model: Model, dtype: WeightDtype = "int8") -> dict[str, tuple[str, ...]]:
    return {name: scale.dims for name, (_, scale) in quantised_weights(model, dtype).items()}


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_scales_have_the_dims_that_no_product_sums_over(dtype):
    assert scales(LLAMA, dtype) == {
        "embed": ("V",),
        "unembed": ("V",),
        "wq": ("N", "H"),
        "wk": ("K", "H"),
        "wv": ("K", "H"),
        "wo": ("D",),
        "w_gate": ("F",),
        "w_up": ("F",),
        "w_down": ("D",),
    }
    assert {weight.dtype for weight, _ in quantised_weights(LLAMA, dtype).values()} == {dtype}


def test_scales_of_experts_and_of_what_two_products_sum_differently():
    found = scales(load_model("deepseek-v3"))
    assert found["experts_w_up_moe"] == ("E", "Fe")
    assert found["experts_w_down_moe"] == ("E", "D")
    assert found["wk_b"] == ("N",), "prefill sums over Rkv, generation over Hn"
    assert found["wv_b"] == ("N", "Hv")
    assert not [name for name in found if name.startswith("router")]
    tied = scales(replace(LLAMA, tied_embeddings=True))
    assert tied["embed"] == ("V",), "a table of tokens that is also the head"


def test_int4_has_scales_of_groups_of_inputs_and_tables_in_int8():
    found = quantised_weights(load_model("deepseek-v3"), "int4")
    dims = {name: scale.dims for name, (_, scale) in found.items()}
    assert dims["wq_a"] == ("Dg", "Rq")
    assert dims["wk_b"] == ("Rkvg", "N", "Hn")
    assert dims["wo"] == ("N", "Hvg", "D")
    assert dims["experts_w_down_moe"] == ("E", "Feg", "D")
    assert {name for name, (weight, _) in found.items() if weight.dtype != "int4"} == {"embed", "unembed"}
    assert {found[name][0].dtype for name in ("embed", "unembed")} == {"int8"}
    assert (dims["embed"], dims["unembed"]) == (("V",), ("V",))
    assert LLAMA.dims["Dg"] * GROUP == 4096


def test_bytes_of_weights_by_hand():
    """llama3-8b: 32 layers of 218,103,808 matrix entries and two norms, two tables of 128,256 x 4096, one norm."""
    matrices, tables, vectors = 32 * 218_103_808, 2 * 128_256 * 4096, 2 * (32 * 2 + 1) * 4096
    assert weight_bytes(LLAMA, "", 2) == 2 * (matrices + tables) + vectors
    assert weight_bytes(LLAMA, "int4", 2) == matrices / 2 + 4 * matrices / 64 + tables + 4 * 2 * 128_256 + vectors
    outputs = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14_336 + 4096) + 2 * 128_256
    assert weight_bytes(LLAMA, "fp8", 2) == weight_bytes(LLAMA, "int8", 2) == matrices + tables + 4 * outputs + vectors


def test_int8_weights_travel_as_int8():
    derived = derive_generation(LLAMA, Strategy(mesh=make_mesh({"fsdp": 4, "tensor": 2})), Storage(weights="int8"))
    moved = {s.result.name: s.full.dtype for b in derived.blocks for s in b.forward if s.op == "all_gather"}
    assert moved.pop("logits") == "fp32"
    assert set(moved.values()) == {"int8"}
    assert {"wq", "wo", "w_down", "embed", "unembed"} <= set(moved)


def test_what_is_planned_and_not_executed():
    assert Storage(weights="int8", cache_dtype="int8").executed == ("int8", "int8")
    assert Storage().executed == ("bf16", "as they are")
    assert [Storage(weights=dtype).executed[1] for dtype in ("fp8", "int4")] == ["fp8", "int4"]
    with pytest.raises(CannotRunError, match="planned, not executed"):
        _ = Storage(weights="fp4").executed
    with pytest.raises(InputError, match="weight dtype 'fp9' is not known"):
        Storage(weights="fp9")


def test_a_cache_split_over_sequences_is_the_book_s_twelve_steps():
    """How to Scale Your Model, section 7.3.3, Y = tensor for the kv heads and Z = context beyond them: the cache stays,
    queries and outputs of attention move. Listed are its steps, without rotation and the write into the cache; the
    book's reshapes between N and K, G are inside attention, which is its three steps."""
    strategy = Strategy(mesh=make_mesh({"tensor": 8, "context": 4}), assignment=cache_assignment("sequences"))
    derived = derive_generation(load_model("llama3-70b"), strategy)
    (block,) = (each for each in derived.blocks if each.block.carry)
    left_out = ("rms_norm", "rope", "cache_write", "slice")
    lines = [str(step) for step in block.forward if step.op not in left_out]
    assert lines[: next(i for i, line in enumerate(lines) if line.startswith("x1"))] == [
        "q[B, T, N_{tensor,context}, H] = h[B, T, D] * wq[D, N_{tensor,context}, H]",
        "k[B, T, K_tensor, H] = h[B, T, D] * wk[D, K_tensor, H]",
        "v[B, T, K_tensor, H] = h[B, T, D] * wv[D, K_tensor, H]",
        "qr[B_context, T, N_tensor, H] = AllToAll_context:N->B(qr[B, T, N_{tensor,context}, H])",
        "o[B_context, T, N_tensor, H] = cached_attention(qr[B_context, T, N_tensor, H], "
        "cache_k'[Pg_context, Pl, K_tensor, H], cache_v'[Pg_context, Pl, K_tensor, H], "
        "first[Q_context], counts[Q_context], lengths[Q_context], pages[Q_context, Bp])",
        "o[B, T, N_{tensor,context}, H] = AllToAll_context:B->N(o[B_context, T, N_tensor, H])",
        "a[B, T, D]{U_{tensor,context}} = o[B, T, N_{tensor,context}, H] * wo[N_{tensor,context}, H, D]",
        "a[B, T, D] = AllReduce_{tensor,context}(a[B, T, D]{U_{tensor,context}})",
    ]
    # a new key is made by every device of Z, and kept by the one that has its sequence: a slice sends nothing
    assert not any(step.is_collective and step.result.name in ("kr", "v") for step in block.forward)


def layer_moves(strategy):
    """The collectives of a layer in decode, and the steps of its attention."""
    derived = derive_generation(load_model("llama3-70b"), strategy)
    (block,) = (each for each in derived.blocks if each.block.carry)
    return [str(step) for step in block.forward if step.is_collective or "o_own" in str(step)]


def test_a_cache_split_over_positions_merges_what_devices_attend_to():
    """Each device attends to its positions with the heads of all; two small sums, of (B, T, N) numbers, make the
    softmax whole: the largest score and the sum of exponentials."""
    strategy = Strategy(mesh=make_mesh({"tensor": 8, "context": 4}), assignment=cache_assignment("positions"))
    assert layer_moves(strategy)[:6] == [
        "qr[B, T, N_tensor, H] = AllGather_context(qr[B, T, N_{tensor,context}, H])",
        "o_own[B, T, N_tensor, H]{U_context} = cached_attention(qr[B, T, N_tensor, H], "
        "cache_k'[Pg, Pl_context, K_tensor, H], cache_v'[Pg, Pl_context, K_tensor, H], "
        "first[Q], counts[Q], lengths[Q], pages[Q, Bp])",
        "o_peak[B, T, N_tensor] = AllReduce_context(o_peak[B, T, N_tensor]{U_context})",
        "o_share[B, T, N_tensor] = AllReduce_context(o_share[B, T, N_tensor]{U_context})",
        "o[B, T, N_tensor, H]{U_context} = scale_by_share(o_own[B, T, N_tensor, H]{U_context}, "
        "o_share[B, T, N_tensor]{U_context}, o_share[B, T, N_tensor])",
        "o[B, T, N_{tensor,context}, H] = ReduceScatter_context(o[B, T, N_tensor, H]{U_context})",
    ]


def test_weights_in_two_dims_stay_where_they_are():
    """How to Scale Your Model, section 7.6.2: a gather over F's axis before the first product and a scatter over D's
    after it, then the other way round; no weight moves."""
    strategy = Strategy(mesh=make_mesh({"tensor": 8, "context": 4}), assignment=stationary_assignment())
    own = ("h1[", "g[", "u[", "m[", "y[")
    of_mlp = [line for line in layer_moves(strategy) if line.startswith(own) and " * " not in line]
    assert of_mlp == [
        "h1[B, T, D_context] = AllGather_tensor(h1[B, T, D_{context,tensor}])",
        "g[B, T, F_{tensor,context}] = ReduceScatter_context(g[B, T, F_tensor]{U_context})",
        "u[B, T, F_{tensor,context}] = ReduceScatter_context(u[B, T, F_tensor]{U_context})",
        "m[B, T, F_tensor] = AllGather_context(m[B, T, F_{tensor,context}])",
        "y[B, T, D_{context,tensor}] = ReduceScatter_tensor(y[B, T, D_context]{U_tensor})",
    ]
    assert not any("w_" in line or "wq" in line or "wo" in line for line in layer_moves(strategy))
    with pytest.raises(InputError, match="dispatch needs D whole"):
        derive_generation(load_model("mixtral-8x7b"), strategy)


LAID_OUT = {
    "prompts": [("llama3-8b", {"tensor": 8}), ("mixtral-8x7b", {"expert": 4, "tensor": 2}),
                ("deepseek-v3", {"expert": 16, "tensor": 4}), ("gpt-oss-120b", {"expert": 4, "tensor": 2}),
                ("llama3-405b", {"tensor": 16}), ("llama3-70b", {"context": 4, "tensor": 8}),
                ("gemma2-27b", {"tensor": 16}), ("qwen3-235b-a22b", {"expert": 8, "tensor": 8})],
    "sequences": [("llama3-70b", {"context": 4, "tensor": 8}), ("deepseek-v3", {"expert": 16, "context": 4})],
    "positions": [("llama3-70b", {"context": 4, "tensor": 8}), ("deepseek-v3", {"expert": 16, "context": 4})],
    "widths": [("llama3-70b", {"context": 2, "tensor": 16})],
    "gathered": [("llama3-70b", {"context": 4, "tensor": 8}), ("llama3-405b", {"context": 4, "tensor": 4})],
}  # fmt: skip
ENGINES = [(layout, *one) for layout, models in LAID_OUT.items() for one in models]


def traffic(model, derived, mesh, rows, seqs):
    """The number of collectives of a step, and the elements of their arrays; ``rows`` are of ``seqs`` sequences."""
    held = held_dims(model.dims, mesh) | layer_dims(model) | {"C": rows, "Er": 4, "B": rows, "T": 1, "O": seqs}
    moved = [(step, count) for step, count in derived.steps() if step.is_collective]
    return sum(count for _, count in moved), sum(c * local_elements(step.full, held, mesh) for step, c in moved)


SENT = {
    ("prompts", "llama3-8b"): [(131, 34_636_644_352), (66, 25_247_744)],
    ("prompts", "mixtral-8x7b"): [(291, 107_455_500_288), (194, 154_734_592)],
    ("prompts", "deepseek-v3"): [(775, 4_365_732_828_160), (414, 14_160_245_760)],
    ("prompts", "gpt-oss-120b"): [(291, 1_308_208_417_792), (218, 1_929_518_080)],
    ("prompts", "llama3-405b"): [(759, 559_160_311_808), (254, 273_498_112)],
    ("prompts", "llama3-70b"): [(483, 44_434_800_640), (162, 92_618_752)],
    ("prompts", "gemma2-27b"): [(187, 55_884_808_192), (94, 43_810_816)],
    ("prompts", "qwen3-235b-a22b"): [(1037, 1_622_285_683_712), (566, 6_756_879_360)],
    ("sequences", "llama3-70b"): [(563, 193_819_131_904), (322, 103_104_512)],
    ("sequences", "deepseek-v3"): [(1446, 4_391_446_008_832), (597, 14_198_223_872)],
    ("positions", "llama3-70b"): [(883, 195_245_195_264), (482, 103_186_432)],
    ("positions", "deepseek-v3"): [(1080, 4_404_686_377_984), (719, 14_198_286_336)],
    ("widths", "llama3-70b"): [(1045, 130_479_100_992), (1045, 136_395_840)],
    ("gathered", "llama3-70b"): [(1045, 53_253_849_088), (724, 5_781_536_768)],
    ("gathered", "llama3-405b"): [(1643, 241_259_331_584), (1138, 65_339_998_208)],
}  # fmt: skip
"""Of 64 prompts of 1,024 tokens, and of one more token each: collectives and elements of their arrays on a device.

Programs of their own for prompts and for one more token sent no less (2026-11-28), but for prompts in "positions",
where a part of a prompt attends to slots of other devices, and of latents in "sequences", whose results change
owners."""


@pytest.mark.parametrize(("layout", "name", "axes"), ENGINES)
def test_what_engines_send(layout, name, axes):
    """A sequence stays with the devices that have its pages, and many rows are split as a prompt is."""
    model, mesh = load_model(name), make_mesh(axes)
    strategy = replace(Strategy(mesh=mesh, assignment=LAYOUTS[layout]), context_attention="gather")
    strategy = strategy_of_heads(strategy, model.num_kv_heads)
    found = [
        traffic(model, derive_generation(model, strategy, prompts=prompts), mesh, rows, 64)
        for prompts, rows in ((True, 64 * 1024), (False, 64))
    ]
    assert found == SENT[layout, name]


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize(("rows", "before"), [(1, 0), (1, 30), (12, 0), (12, 3), (12, 30), (5, 95)])
def test_pairs_and_positions_of_like_sequences(window, rows, before):
    """Row by row: a position sees those up to it, at most the window."""
    seen = [range(max(0, at + 1 - (window or at + 1)), at + 1) for at in range(before, before + rows)]
    like = LikeSequences(3, rows, before)
    assert like.pairs(window) == 3 * sum(map(len, seen))
    assert like.positions(window) == 3 * len(set().union(*seen))
    again = LikeSequences.of_sums(3 * rows, like.pairs(None), 3 * (rows + before))
    assert (again.count, again.rows, again.before) == pytest.approx((3, rows, before))


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize(("rows", "before"), [(1, 0), (1, 5), (12, 0), (12, 3), (12, 30), (5, 95), (40, 90)])
def test_pairs_and_positions_in_chunks(chunk, rows, before):
    """Row by row: a position sees its chunk up to itself; a few rows behind a chunk begin anywhere in one."""
    places = range(chunk) if rows < chunk <= before else [before]
    seen = [[range(at // chunk * chunk, at + 1) for at in range(place, place + rows)] for place in places]
    pairs = sum(len(each) for rows_seen in seen for each in rows_seen) / len(places)
    positions = sum(len(set().union(*rows_seen)) for rows_seen in seen) / len(places)
    like = LikeSequences(3, rows, before)
    assert (like.pairs(chunk, chunked=True), like.positions(chunk, chunked=True)) == (3 * pairs, 3 * positions)
