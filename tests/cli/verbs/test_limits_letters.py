"""Closed forms before a plan: the numbers of the book's sections 5.3 and 6.3, on shapes that no mesh divides."""

import math

import pytest

from meshwright.cli.verbs.limits import Given, layer_letters, letters
from meshwright.core.errors import InputError
from meshwright.cost.formulas.limit_table import limits_at
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job


def found(name, on, *, seqs, seq_len, **choices):
    cluster, job = parse_cluster(on), Job(batch_seqs=seqs, seq_len=seq_len)
    usual = {"dtype": "bf16", "state": "bf16-adam", "tensor": None, "tensor_axes": 1}
    at = letters(layer_letters(name, "bf16-adam")[2], cluster, job, Given(**(usual | choices)))
    return at, {limit.name: limit for limit in limits_at(at)}


def test_section_6_3_on_the_true_pod():
    """468 tokens a chip: below 850 for FSDP, above 453.6 for the mixture; X between its roots, 2,048 x 4."""
    at, rows = found("llama3-70b", "v5p:16x20x28", seqs=1024, seq_len=4096)
    assert at.alpha == pytest.approx(2550)
    assert rows["tokens/chip, FSDP alone"].here == pytest.approx(468, abs=0.2)
    assert rows["tokens/chip, FSDP alone"].limit == pytest.approx(850)
    assert rows["tokens/chip, FSDP alone"].holds is False
    assert rows["tokens/chip, with tensor"].limit == pytest.approx(453.6, abs=0.1)
    assert rows["tokens/chip, with tensor"].holds is True
    # the text rounds the batch to 4.19e6 tokens and has 1927
    assert rows["X, upper root"].limit == pytest.approx(1927, rel=0.005)
    assert rows["X, upper root"].holds is None
    assert math.isnan(rows["X_opt"].here)
    assert "2,048 x tensor 4" in rows["X_opt"].note
    assert rows["chips, FSDP of whole sequences"].limit == 1024


def test_a_tensor_size_to_compare():
    _, rows = found("llama3-70b", "v5p:16x20x28", seqs=1024, seq_len=4096, tensor=5)
    assert rows["X_opt"].here == 8960 / 5
    assert rows["X, upper root"].holds is True
    assert rows["X, lower root"].holds is True
    assert rows["tensor"].holds is True


def test_pure_data_parallelism_does_not_fit():
    """Exercise 5.3: 130 GB of state against a chip's 95 GB."""
    _, rows = found("llama2-13b", "v5p:16x16x16", seqs=96, seq_len=32768)
    state = rows["state on each, no FSDP"]
    assert state.here == pytest.approx(130e9, rel=2e-3)
    assert (state.limit, state.holds) == (95e9, False)
    assert "X, lower root" not in rows


def test_slices_share_the_batch():
    one, four = (found("llama3-70b", on, seqs=1024, seq_len=4096)[1] for on in ("v5p:16x20x28", "4*v5p:16x20x28"))
    name = "tokens/chip, FSDP alone"
    assert four[name].here == pytest.approx(one[name].here / 4)
    assert "tokens/slice, over DCN" not in one
    assert four["tokens/slice, over DCN"].here == 2**20
    assert four["tokens/slice, over DCN"].limit == pytest.approx(73440)


@pytest.mark.parametrize(
    ("on", "choices", "message"),
    [
        ("h100:1", {}, "h100:1x1 has no links in the catalogue. Name several TPUs"),
        ("v5e:1x1", {}, "no links"),
        ("h100:8x16", {"tensor_axes": 2}, "Leave one for the data"),
        ("v5p:4x4x4", {"tensor_axes": 3}, "Leave one for the data"),
        ("v5p:4x4x4", {"tensor": 65}, "between 1 and the 64 chips"),
    ],
)
def test_refused(on, choices, message):
    with pytest.raises(InputError, match=message):
        found("tiny", on, seqs=64, seq_len=64, **choices)


def test_chips_that_a_batch_feeds():
    """DeepSeek-V2's 40M tokens: 40e6 / 850 is 5.25 pods; with tensor 40e6 x 2 x 28672 / (4 x 2550^2) is 9.8."""
    _, rows = found("llama3-70b", "v5p:16x20x28", seqs=10_000, seq_len=4000, tensor=8)
    alone, mixed = rows["chips, FSDP alone"], rows["chips, with tensor"]
    assert (round(alone.limit), alone.note) == (47_059, "5 whole pods of 8,960 chips")
    assert (round(mixed.limit), mixed.note) == (88_188, "9 whole pods of 8,960 chips")
    assert rows["F, for this tensor"].limit == 8 * 2550
    # 850 / (4 x 2550^2 / (2 x 28672)) = 1.874
    assert rows["tokens/chip, with tensor"].note == "FSDP alone needs 1.87 times as many"


def test_a_layer_of_two_matrices():
    at, rows = found("mlp:8192x28672", "v5p:16x20x28", seqs=1024, seq_len=4096)
    _, of_model = found("llama3-70b", "v5p:16x20x28", seqs=1024, seq_len=4096)
    assert at.num_params == 2 * 8192 * 28672
    speed = [name for name, row in of_model.items() if row.kind == "speed"]
    assert [rows[name].limit for name in speed] == [of_model[name].limit for name in speed]
    assert "state on each, no FSDP" not in rows


def test_gpus():
    """989.4e12 / 450e9 = 2,199 in a domain; 8 cards of 50e9 are a node's 400e9: 2,473.5 tokens a GPU."""
    at, rows = found("llama3-8b", "h100:8x4", seqs=16, seq_len=4096, tensor=4)
    assert (at.link, at.alpha) == ("node", None)
    assert rows["tokens/chip, FSDP alone"].limit == pytest.approx(2473.5)
    assert rows["tensor"].limit == pytest.approx(14336 / 2198.67, rel=1e-5)
    assert rows["F, for this tensor"].limit == pytest.approx(4 * 2198.67, rel=1e-5)
    # 3 collectives of 2 bytes at 50e9 B/s beside 6 x 8.03e9 x 65,536 / (32 x 989.4e12)
    assert rows["FSDP at one chip's rate"].here == pytest.approx(3 * 2 * 8030261248 / 50e9)
    assert rows["FSDP at one chip's rate"].limit == pytest.approx(6 * 8030261248 * 65536 / 32 / 989.4e12)


def test_experts_have_no_forms_with_tensor_and_a_line_says_so():
    _, rows = found("mixtral-8x7b", "v5p:4x4x4", seqs=16, seq_len=4096)
    assert "tensor" not in rows
    assert "with tensor are for dense layers" in rows["tokens/chip, FSDP alone"].note
    assert found("llama3-8b", "v5p:4x4x4", seqs=16, seq_len=4096)[1]["tokens/chip, FSDP alone"].note == ""
