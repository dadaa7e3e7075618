"""``--set section.key=value``, mesh axes and sizes of dims."""

import pytest

from meshwright.cli.fields import (
    check_tokens,
    dim_sizes,
    parse_fields,
    parse_mesh,
    split_pairs,
    split_values,
    take_axes,
    with_fields,
)
from meshwright.core.errors import InputError
from meshwright.spec.assumptions import AS_RUN
from meshwright.spec.catalogue import load_model
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, standard_assignment


def test_values_are_toml_or_plain_text():
    found = parse_fields(["strategy.remat=block", "model.num_layers=4", "train.lr = 1e-3", 'strategy.remat=["g"]'])
    assert found["strategy"] == {"remat": ["g"]}
    assert found["model"] == {"num_layers": 4}
    assert found["train"] == {"lr": 1e-3}
    assert found["job"] == {}


def test_mesh_axes_are_gathered():
    found = parse_fields(["strategy.tensor=4", "strategy.mesh.fsdp=2", "strategy.mesh={data=3}"])["strategy"]
    assert found == {"mesh": {"tensor": 4, "fsdp": 2, "data": 3}}
    assert take_axes({"context": 8}, found) == {"context": 8, "tensor": 4, "fsdp": 2, "data": 3}
    assert found == {}


def test_a_changed_axis_keeps_the_others():
    strategy = Strategy(mesh={"data": 1, "fsdp": 8, "context": 1, "tensor": 1})
    changed = with_fields(strategy, "strategy", parse_fields(["strategy.tensor=2", "strategy.fsdp=4"])["strategy"])
    assert changed.mesh == {"data": 1, "fsdp": 4, "context": 1, "tensor": 2}


def test_a_zero_stage_is_an_assignment():
    found = parse_fields(["strategy.zero=1", "strategy.sequence_parallel=false", "strategy.tensor=2"])["strategy"]
    assert found == {
        "mesh": {"tensor": 2}, "assignment": standard_assignment(zero=1, sequence_parallel=False)
    }  # fmt: skip
    strategy = with_fields(Strategy(mesh={"fsdp": 8}), "strategy", parse_fields(["strategy.zero=2"])["strategy"])
    assert strategy.zero == 2
    for pair, message in [("zero=4", "not a stage"), ("zero=true", "not true or false"),
                          ("sequence_parallel=1", "is not true or false")]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            parse_fields([f"strategy.{pair}"])
    with pytest.raises(InputError, match="say the same"):
        parse_fields(["strategy.zero=1", "strategy.assignment={}"])


def test_a_field_may_leave_its_section_out():
    short = parse_fields(["remat=block", "tensor=2", "zero=1", "software=eager", "optimizer=lion", "num_layers=2"])
    long = ["strategy.remat=block", "strategy.mesh.tensor=2", "strategy.zero=1", "assumptions.software=eager"]
    assert short == parse_fields([*long, "job.optimizer=lion", "model.num_layers=2"])


def test_assumptions_are_taken_in_the_strategy_too():
    for section in ("strategy", "assumptions"):
        found = parse_fields([f"{section}.software=eager", "strategy.imbalance=1.5", "strategy.remat=block"])
        assert (found["strategy"], found["assumptions"]) == (
            {"remat": "block"},
            {"software": "eager", "imbalance": 1.5},
        )
    assert with_fields(AS_RUN, "assumptions", found["assumptions"]).software == "eager"
    for wrong, words in (
        (
            {"software": "egar"},
            r"^assumptions\.software is 'egar'\. "
            r"Give compiled, captured, captured-layers, served, eager, eager-in-turn or eager-2021\.$",
        ),
        ({"sofware": "eager"}, r"^assumptions\.sofware is not a field\. Did you mean 'software'\?$"),
        ({"imbalance": 0.5}, r"^assumptions\.imbalance=0\.5 must be at least 1\.$"),
    ):
        with pytest.raises(InputError, match=words):
            with_fields(AS_RUN, "assumptions", wrong)


def test_fields_of_a_model():
    assert with_fields(load_model("tiny"), "model", {"num_layers": 3}).num_layers == 3
    with pytest.raises(InputError, match=r"model\.num_layers=1e\+23 is too large"):
        with_fields(load_model("tiny"), "model", {"num_layers": 10**23})


def test_axes():
    assert take_axes(None, {}) == {}
    assert parse_mesh("fsdp=1Ki,tensor=4") == {"fsdp": 1024, "tensor": 4}
    with pytest.raises(InputError, match=r"^--axes '' is not a mesh axis size"):
        parse_mesh("", "--axes")


def test_pairs_name_their_option():
    assert split_pairs("a=1, b=x", "name=value", what="--why-not") == {"a": "1", "b": "x"}
    with pytest.raises(InputError, match=r"^--why-not 'a=1,a=2': a is given twice. Leave one out.$"):
        split_pairs("a=1,a=2", "name=value", what="--why-not")
    with pytest.raises(InputError, match=r"^--why-not 'a' is not name=value.$"):
        split_pairs("a", "name=value", what="--why-not")


def test_runs_that_nobody_can_mean():
    job = Job(batch_seqs=8, seq_len=16, train_tokens=100)
    assert check_tokens(job) is job
    for tokens in (0, 10**25):
        with pytest.raises(InputError, match="train_tokens"):
            check_tokens(Job(batch_seqs=8, seq_len=16, train_tokens=tokens))


def test_dim_sizes():
    assert dim_sizes("B=4Mi,D=8") == {"B": 2**22, "D": 8}
    with pytest.raises(InputError, match="larger than 1e\\+15"):
        dim_sizes("B=1E")


def test_a_model_of_fewer_layers_keeps_those_that_are_left():
    small = with_fields(load_model("gpt-oss-20b"), "model", {"num_layers": 3})
    assert (small.num_layers, small.sliding_layers) == (3, (0, 2))


def test_values():
    assert split_values("batch=1Mi, 4Mi", what="sweep") == ("1Mi", "4Mi")
    assert split_values("B=3..13", what="sweep") == ("3", "6", "12")
    assert split_values('offload=[],["optimizer", "activations"]', what="sweep") == (
        "[]",
        '["optimizer", "activations"]',
    )
    for text in ("batch=", "batch=1,,2"):
        with pytest.raises(InputError, match=r"^sweep .* is not FIELD=VALUES"):
            split_values(text, what="sweep")
    with pytest.raises(InputError, match=r"^--sweep .* ends before it begins"):
        split_values("B=8..4", what="--sweep")


def test_a_field_of_a_table_is_named_with_dots():
    found = parse_fields(["model.lora.rank=16", "model.lora.alpha=32", "strategy.mesh.tensor=4", "remat=block"])
    assert found["model"] == {"lora.rank": 16, "lora.alpha": 32}
    assert found["strategy"] == {"mesh": {"tensor": 4}, "remat": "block"}
    lora = with_fields(load_model("llama3-8b"), "model", found["model"]).lora
    assert (lora.rank, lora.alpha, lora.targets) == (16, 32.0, "all-linear")
