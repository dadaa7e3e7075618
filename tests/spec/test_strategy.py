"""A strategy: plain data, checked when it is made; its standard assignments, and what of it runs."""

import msgspec
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.spec.assumptions import Assumptions, require_runnable_assumptions, require_runnable_strategy
from meshwright.spec.strategy import (
    ALL_LAYERS,
    DEFAULT_ASSIGNMENT,
    REMAT_POLICIES,
    STATE_BYTES,
    Strategy,
    assign,
    make_mesh,
    short_mesh,
    standard_assignment,
)


def strategy(axes=None, **fields):
    return Strategy(mesh=make_mesh(axes or {}), **fields)


def test_every_axis_in_its_order():
    assert list(make_mesh({"tensor": 2, "data": 4}).items()) == [
        ("pipeline", 1), ("data", 4), ("fsdp", 1), ("expert", 1), ("context", 1), ("tensor", 2),
    ]  # fmt: skip
    made = strategy({"pipeline": 3, "expert": 2, "tensor": 4})
    assert made.num_chips == 24
    assert made.active_axes == ("pipeline", "expert", "tensor")
    with pytest.raises(InputError, match=r"mesh axis 'piepline' is not known\. Did you mean 'pipeline'"):
        make_mesh({"piepline": 2})


# -- islands ----------------------------------------------------------------------------------------------


def test_islands_are_the_outermost_axis_where_there_are_several():
    assert make_mesh({"islands": 1, "fsdp": 2}) == make_mesh({"fsdp": 2})
    made = strategy({"tensor": 2, "islands": 4}, placement={"islands": "islands", "tensor": "x"}, remat="full")
    assert next(iter(made.mesh)) == "islands"
    assert (made.num_islands, made.num_chips, short_mesh(made.mesh)) == (4, 8, "isl4 tp2")
    assert made.inner() == strategy({"tensor": 2}, placement={"tensor": "x"}, remat="full")
    assert made.inner().inner() is made.inner() or made.inner().num_islands == 1


def test_the_strategy_of_an_island_exchanges_nothing():
    fields = {"islands_sync": "diloco", "outer_every": 30, "outer_bits": 4, "outer_fragments": 3, "outer_overlap": 5}
    made = strategy({"islands": 2, "fsdp": 2}, **fields)
    assert made.inner() == strategy({"fsdp": 2})
    assert msgspec.json.decode(msgspec.json.encode(made), type=Strategy) == made


@pytest.mark.parametrize(
    ("islands", "fields", "message"),
    [
        (1, {"outer_every": 30}, r"strategy\.outer_every=30 needs several islands\. Set strategy\.islands too\."),
        (1, {"islands_sync": "diloco"}, r"strategy\.islands_sync=diloco needs several islands"),
        (2, {"outer_every": 3}, r"outer_every=3: with islands_sync=gradients gradients are summed whole in every step"),
        (2, {"outer_bits": 8}, r"outer_bits=8: with islands_sync=gradients .* in 32 bits\. Leave it out\."),
        (2, {"islands_sync": "diloco", "outer_every": 0}, r"outer_every=0 must be between 1 and"),
        (
            2,
            {"islands_sync": "diloco", "outer_every": 4, "outer_overlap": 4},
            r"outer_overlap=4 must be between 0 and 3 with outer_every=4",
        ),
        (
            2,
            {"islands_sync": "local-sgd", "outer_every": 4, "outer_fragments": 5},
            r"outer_fragments=5 must be between 1 and 4 with outer_every=4",
        ),
        (
            2,
            {"islands_sync": "async-sgd", "outer_every": 4, "outer_fragments": 2},
            r"outer_fragments=2: with islands_sync=async-sgd an island sends all weights at once",
        ),
        (2, {"islands_sync": "diloco", "outer_bits": 16}, r"outer_bits"),
    ],
)
def test_what_islands_do_not_exchange_is_refused(islands, fields, message):
    with pytest.raises(InputError, match=message):
        strategy({"islands": islands}, **fields)


def test_one_program_has_no_islands():
    with pytest.raises(CannotRunError, match=r"strategy\.islands=4: .*launch --elastic -n 4"):
        require_runnable_strategy(strategy({"islands": 4}))


# -- assignments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_each_stage_splits(zero):
    """A matrix of the feed-forward: D over fsdp where the stage splits it, F over tensor always."""
    made = strategy(assignment=standard_assignment(zero=zero))
    split, whole = (("fsdp", "expert", "context"), ("tensor",)), ((), ("tensor",))
    for role, from_stage in (("weight", 3), ("grad", 2), ("optimizer", 1)):
        assert assign(made.rules(role), ("D", "F")) == (split if zero >= from_stage else whole), role
    assert assign(made.rules("vector"), ("D",)) == ((),)
    assert made.zero == zero


def test_where_activations_lie():
    """Sequences major to minor over data, fsdp and expert; positions over context, and over tensor between blocks."""
    for sequence_parallel, positions in ((True, ("context", "tensor")), (False, ("context",))):
        rules = strategy(assignment=standard_assignment(sequence_parallel=sequence_parallel)).rules("activation")
        batch = ("data", "fsdp", "expert")
        assert assign(rules, ("B", "T", "D")) == (batch, positions, ())
        # heads and widths have tensor where an array has them, and positions the rest
        assert assign(rules, ("B", "T", "N", "H")) == (batch, ("context",), ("tensor",), ())
        assert assign(rules, ("B", "T", "F")) == (batch, ("context",), ("tensor",))
    assert assign(strategy().rules("input"), ("B", "T")) == (("data", "fsdp", "expert"), ("context",))


def test_experts_are_split_over_their_own_axis():
    """Weights of experts have no expert axis left for D; slots lie with their experts."""
    rules = strategy()
    assert assign(rules.rules("weight"), ("E", "D", "Fe")) == (("expert",), ("fsdp", "context"), ("tensor",))
    assert assign(rules.rules("activation"), ("E", "C", "D"))[0] == ("expert",)


def test_the_default_is_zero_3():
    assert standard_assignment() == DEFAULT_ASSIGNMENT
    assert strategy().zero == 3
    assert strategy(assignment={"activation": {"B": ("data",)}}).zero is None
    for sequence_parallel in (True, False):
        assert strategy(assignment=standard_assignment(zero=1, sequence_parallel=sequence_parallel)).zero == 1
    with pytest.raises(InputError, match=r"zero=4 is not a stage\. Use 0, 1, 2 or 3\."):
        standard_assignment(zero=4)


def test_only_axes_that_are_kept():
    assert assign(strategy().rules("weight"), ("D", "F"), keep=("context",)) == (("context",), ())


# -- fields -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remat", "segment"),
    [
        *(("none", None), ("block", None), ("sqrt", "sqrt"), ("every-1", 1), ("every-12", 12)),
        *(("recompute-4", 4), ("recompute-all", ALL_LAYERS)),
    ],
)
def test_segments(remat, segment):
    found = strategy(remat=remat)
    assert (found.segment, found.recomputes_each) == (segment, remat.startswith("recompute"))
    assert found.kept_names == () or not found.recomputes_each


def test_names_have_no_segments():
    assert strategy(remat=("q", "k")).segment is None


@pytest.mark.parametrize(
    ("state", "precision", "dtype"),
    [("bf16-adam", "", "bf16"), ("fp32", "", "fp32"), ("bf16-master", "fp8", "fp8"), ("fp32", "bf16", "bf16")],
)
def test_the_dtype_of_products(state, precision, dtype):
    assert strategy(state=state, precision=precision).matmul_dtype == dtype


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"remat": "squrt"}, "remat 'squrt' is not a policy. Did you mean 'sqrt'? every-C, recompute-C and a list"),
        ({"remat": "every-0"}, "remat 'every-0' is not a policy."),
        ({"remat": "every-"}, "remat 'every-' is not a policy."),
        ({"remat": "recompute-0"}, "remat 'recompute-0' is not a policy."),
        ({"remat": "recompute"}, "remat 'recompute' is not a policy. Did you mean 'recompute-all'?"),
        ({"chunks": 0}, "strategy.chunks=0 must be at least 1."),
        ({"num_microbatches": 0}, "num_microbatches=0 must be between 1 and"),
        ({"state": "bf16-adm"}, "state 'bf16-adm' is not known. Did you mean 'bf16-adam'?"),
        ({"assignment": {"weights": {}}}, "strategy.assignment has the unknown role 'weights'. Did you mean 'weight'?"),
        ({"mesh": {"data": 0}}, "mesh axis data=0 must be at least 1."),
    ],
)
def test_what_no_strategy_has(fields, words):
    with pytest.raises(InputError) as raised:
        Strategy(**{"mesh": make_mesh({}), **fields})
    assert str(raised.value).startswith(words)


def test_no_device_has_less_than_the_mean():
    with pytest.raises(InputError, match=r"assumptions\.imbalance=0\.5 must be at least 1\."):
        Assumptions(imbalance=0.5)


@pytest.mark.parametrize(
    "fields",
    [{"context_attention": "rings"}, {"precision": "fp7"}, {"offload": ["optimiser"]}],
    ids=str,
)
def test_words_of_a_plan_file_are_checked(fields):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"mesh": {"data": 1}, **fields}, Strategy)


@pytest.mark.parametrize("fields", [{"software": "lazy"}, {"attention_kernel": "own"}, {"remat": "block"}], ids=str)
def test_words_of_assumptions_are_checked(fields):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, Assumptions)


def test_bytes_that_a_state_counts():
    """The number an option is known by is the sum of its parts; bf16-adam leaves the short-lived gradient out."""
    for name, parts in STATE_BYTES.items():
        short = parts["gradients"] if name == "bf16-adam" else 0
        assert parts["counted"] == parts["weights"] + parts["gradients"] + parts["optimizer"] - short


# -- what runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", [*REMAT_POLICIES, "every-4", ("qr", "x1")])
@pytest.mark.parametrize("state", STATE_BYTES)
def test_what_runs(remat, state):
    axes = {"data": 2, "fsdp": 2, "context": 2, "tensor": 2, "expert": 2, "pipeline": 2}
    require_runnable_strategy(strategy(axes, remat=remat, state=state, offload=("optimizer", "activations")))
    own = "fp32" if state == "fp32" else "bf16"
    require_runnable_strategy(strategy(state=state, precision=own))


def test_other_software_is_priced_and_does_not_run():
    require_runnable_assumptions(Assumptions(imbalance=1.25, empty_slots=False))
    for fields, words in (
        ({"software": "eager"}, "software 'eager' is planned but not executed in this version. Use compiled."),
        ({"attention_kernel": "portable"}, "attention_kernel 'portable' is planned but not executed in this version."),
        ({"exchange_overlap": True}, "exchange_overlap True is planned but not executed in this version. Use False."),
        ({"narrow_gathers": True}, "narrow_gathers True is planned but not executed in this version. Use False."),
    ):
        with pytest.raises(CannotRunError) as raised:
            require_runnable_assumptions(Assumptions(**fields))
        assert str(raised.value).startswith(words)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_stage_of_zero_runs(zero, sequence_parallel):
    assignment = standard_assignment(zero=zero, sequence_parallel=sequence_parallel)
    require_runnable_strategy(strategy({"fsdp": 2, "tensor": 2}, assignment=assignment))


@pytest.mark.parametrize(
    ("axes", "fields", "words"),
    [
        ({}, {"state": "fp32", "precision": "bf16"}, "precision 'bf16' is planned but not executed in this version."),
        (
            {},
            {"assignment": {**standard_assignment(), "weight": {"D": ("data",)}}},
            "strategy.assignment.weight differs from the standard one",
        ),
    ],
    ids=str,
)
def test_what_is_planned_and_does_not_run(axes, fields, words):
    with pytest.raises(CannotRunError) as raised:
        require_runnable_strategy(strategy(axes, **fields))
    assert str(raised.value).startswith(words)


def test_slices_are_over_axes_of_the_mesh():
    with pytest.raises(InputError, match=r"strategy.slice_axes names 'tensr', no mesh axis\. Did you mean"):
        strategy({}, slice_axes=("tensr",))


def test_short_meshes():
    assert short_mesh(make_mesh({"fsdp": 64, "tensor": 4, "pipeline": 2})) == "pp2 fsdp64 tp4"
    assert short_mesh(make_mesh({})) == "1 chip"
