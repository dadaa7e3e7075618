"""The proof of a plan from what became of its compilation, played here."""

import json
import math

import pytest

from meshwright.core.errors import InputError
from meshwright.cost.memory.chip import memory_limit
from meshwright.cost.setting import Setting
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.verify import proof
from meshwright.verify.proof import MemoryComparison, proof_table, prove
from meshwright.verify.request import Memory, Request
from meshwright.verify.running import CompileOutcome
from meshwright.verify.targets import Target

HLO = """HloModule jit__step, num_partitions=4

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  ROOT %x = f32[4,8]{1,0} parameter(0)
}
"""
LOST_LOOP = """HloModule jit__step, num_partitions=4

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %ag = f32[16]{0} all-gather(%x), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %x)
}

%cond (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %c = pred[] custom-call(%i), custom_call_target="unknown"
}

ENTRY %main (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]{0}) parameter(0)
  ROOT %loop = (s32[], f32[4]{0}) while(%s), condition=%cond, body=%body
}
"""


def request(target="tpu", **fields) -> Request:
    return Request(
        setting=Setting(load_model("tiny"), parse_cluster("v5e:2x2"), Job(batch_seqs=8, seq_len=64)),
        strategy=Strategy(mesh=make_mesh({"fsdp": 4}), state="bf16-adam"),
        target=Target(platform=target, topology="v5e:2x2", num_devices=4),
        **fields,
    )


def compiled(gigabytes=1.0, *, out_of_memory=""):
    whole = round(gigabytes * 1e9)
    memory = Memory(arguments=whole // 2, temporaries=whole - whole // 2, outputs=0)
    return {"memory": memory, "out_of_memory": out_of_memory}


@pytest.fixture
def proved(monkeypatch):
    """The proof of a request whose compilation ends as given."""

    def run(ended="stopped", *, target="tpu", **fields):
        outcome = CompileOutcome(
            **{"ended": ended, "hlo": HLO, "lowered": True, **fields},
            wall_s=1.0,
            cpu_s=0.5,
            max_rss_bytes=10**9,
        )
        monkeypatch.setattr(proof, "run_request", lambda *_, **__: outcome)
        found = prove(request(target), program=("never",), timeout_s=1.0)
        assert json.loads(json.dumps(proof_table(found), allow_nan=False))["runs"] is found.runs
        return found

    return run


def test_what_fits_runs(proved):
    found = proved(**compiled(1.0))
    assert (found.runs, found.refusal, found.memory.fits) == (True, "", True)
    assert found.memory.available == memory_limit(parse_cluster("v5e:2x2"))
    assert found.memory.needed == 1e9


def test_what_does_not_fit_is_refused_with_bytes(proved):
    found = proved(**compiled(40.0))
    assert not found.runs
    assert "needs 40.0 GB on each chip of v5e:2x2, 2.4 times the 16.9 GB that a chip has for it" in found.refusal
    assert "2.4 times" in found.refusal
    assert "\n" not in found.refusal


def test_the_compilers_own_limit_counts(proved):
    said = "RESOURCE_EXHAUSTED: Used 20.0G of 14.00G hbm."
    found = proved(**compiled(16.0, out_of_memory=said))
    assert found.memory.available == 14 * 2**30
    assert not found.runs
    more = proved(**compiled(40.0, out_of_memory=said.replace("14", "17")))
    assert more.memory.available == memory_limit(parse_cluster("v5e:2x2"))


def test_exactly_full_fits():
    memory = MemoryComparison(items={"weights": 5.0}, arguments=5, temporaries=5, needed=10, peak=None, available=10)
    assert memory.fits
    assert memory.error == -0.5


def test_items_are_arguments_or_temporaries():
    memory = MemoryComparison(
        items={"weights": 1.0, "optimizer": 2.0, "kv_cache": 4.0, "gradients": 8.0, "logits": 16.0},
        arguments=7.0,
        temporaries=24.0,
        needed=31.0,
        peak=None,
        available=math.inf,
    )
    assert (memory.predicted_arguments, memory.predicted_temporaries, memory.predicted) == (7.0, 24.0, 31.0)


def test_emulated_devices_have_no_memory_to_compare(proved):
    found = proved("done", target="cpu", **compiled(4000.0))
    assert (found.memory, found.runs) == (None, True)
    assert found.traffic is not None


@pytest.mark.parametrize(
    ("ended", "fields", "words"),
    [
        (
            "error",
            {"message": "B=7 is no multiple of 4.", "lowered": False},
            "could not be lowered: B=7 is no multiple",
        ),
        ("error", {"message": "INTERNAL: no"}, "could not be compiled: INTERNAL: no."),
        ("crash", {"message": "signal SIGSEGV"}, "compiled: the compiler crashed: signal SIGSEGV."),
        (
            "timeout",
            {"message": "stopped after 9 s"},
            "time limit reached: stopped after 9 s. Give more time with --timeout.",
        ),
    ],
)
def test_what_was_not_compiled_says_why(proved, ended, fields, words):
    found = proved(ended, **fields)
    assert words in found.refusal
    assert found.refusal.startswith("the train step of tiny could not be")
    assert ".." not in found.refusal
    assert (found.memory, found.traffic, found.products) == (None, None, None)


def test_lowering_alone_runs(proved):
    found = proved("done")
    assert (found.runs, found.memory, found.traffic) == (True, None, None)


@pytest.mark.parametrize("text", [LOST_LOOP, ""])
def test_a_program_that_cannot_be_read_says_so(proved, text):
    """Memory is still told."""
    found = proved(**compiled(1.0), hlo=text)
    assert found.traffic is None
    assert found.traffic_error
    assert found.memory.fits


def test_a_missing_collective_is_a_remainder(proved):
    """A program without any collective, where gathers and sums are derived."""
    found = proved(**compiled(1.0))
    assert found.traffic.remainder == 1.0
    assert found.traffic.compiled_bytes == 0


def test_the_table_has_what_a_reader_asks_for(proved):
    table = proof_table(proved(**compiled(40.0)))
    assert table["memory"]["fits"] is False
    assert table["memory"]["error"] == pytest.approx(table["memory"]["predicted"] / 40e9 - 1)
    assert table["collectives"]["remainder"] == 1.0
    assert {"refusal", "wall_s", "cpu_s", "max_rss_bytes", "depth", "target", "note", "axes"} <= table.keys()


def test_a_folder_of_other_files_is_an_input_error(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(InputError):
        prove(request(), program=("false",), timeout_s=1.0, keep=tmp_path)
