"""`service --why-not`: what a wanted engine lacks, and what it costs beside the first plan."""

import pytest

from meshwright.core.units import format_bytes
from meshwright.plan.why.why_not_service import why_not_service
from tests.plan.test_service_file import planned


@pytest.fixture(scope="module")
def result():
    """llama3-70b on 16 v5e: the first plan has engines of 8 chips that do both phases."""
    found, file = planned("llama3-70b", "v5e:4x4", tpot_s=0.08, prompt_len=8192, output_len=512)
    assert (file.generate.strategy.mesh["tensor"], file.has_pools) == (8, False)
    return found


def test_the_first_plan_itself(result):
    first = result.plans[0]
    found = why_not_service(result, {"tensor": 8, "batch": first.generate.batch_seqs, "pools": False})
    assert (found.plan, found.misses, found.refusal) == (first, {}, "")
    assert all(here == there for here, there in found.chip_s.values())


def test_chip_seconds_add_up(result):
    """What is not a decode step is the rest of the chips' time: steps by themselves may overlap, on TPUs."""
    found = why_not_service(result, {"tensor": 16})
    for number, plan in enumerate((result.plans[0], found.plan)):
        rest = found.chip_s["prefill, idle"][number]
        own = plan.generate
        assert rest + own.part.num_chips * own.step_s / own.batch_seqs == pytest.approx(
            1 / plan.predicted.tokens_per_s_per_chip
        )
        assert found.chip_s["KV"][number] == own.part.num_chips * own.bounds_s["KV"] / own.batch_seqs
    assert found.plan.generate.strategy.mesh["tensor"] == 16
    assert found.plan.predicted.tokens_per_s_per_chip < result.plans[0].predicted.tokens_per_s_per_chip


def test_too_little_memory_has_its_bytes(result):
    """70.6e9 parameters in int8 on four chips are 17.6 GB of each chip's 16.1 GB; compilers need some memory beside."""
    found = why_not_service(result, {"tensor": 4, "context": 1, "weights": "int8"})
    assert found.plan is None
    assert found.refusal.startswith("with one sequence for each device with its own the leanest such engine (4 chips)")
    assert f"more than the {format_bytes(result.setting.memory_room)} that a chip has." in found.refusal
    bytes_needed = float(found.refusal.split(" needs ")[1].split(" GB")[0])
    by_hand = 17.6 + 8704 * 163_840 * (1 + 4 / 128) / 4 / 1e9
    assert by_hand < bytes_needed < 1.05 * by_hand


def test_engines_on_all_chips_leave_none_to_prefill(result):
    found = why_not_service(result, {"tensor": 16, "pools": True})
    assert found.refusal == "no engine that fits can prefill for it."


def test_misses_say_by_how_much(result):
    missed = why_not_service(result, {"tensor": 16, "batch": 64, "kv": "int8", "weights": "int8"})
    assert missed.plan is None or missed.misses["TPOT"] == pytest.approx(missed.plan.predicted.tpot_s / 0.08)
    most = why_not_service(result, {"tensor": 16, "batch": 32, "pools": False})
    assert most.misses == ({} if most.plan.predicted.tpot_s <= 0.08 else {"TPOT": most.plan.predicted.tpot_s / 0.08})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"data": 2}, r"data is not a choice of a service\."),
        ({"tensor": "all"}, r"--why-not tensor=all: give a size"),
        ({"weights": 8}, r"--why-not weights=8: give a dtype, such as weights=bf16"),
        ({"kv": "int7"}, r"'int7' is no dtype in which KV caches are served"),
    ],
)
def test_what_cannot_be_asked(result, asked, message):
    with pytest.raises(ValueError, match=message):
        why_not_service(result, asked)
