"""Samples of memory, the shards of a state, and temporaries that live at once."""

import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.parallel.mesh import device_mesh
from meshwright.profile.hlo import parse_program
from meshwright.profile.memory import (
    MemoryMark,
    MemoryProfile,
    Sample,
    Sampler,
    resident_bytes,
    state_owners,
    temporary_owners,
)
from meshwright.report.machine.profile_report import MAX_SAMPLES, memory_timeline_figure
from tests.charts import marks

LOOP = """HloModule loop, is_scheduled=true

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %kept = f32[4,8] get-tuple-element(%p), index=1
  %wide = f32[100] broadcast(%i), metadata={op_name="layer:forward:h=rms_norm/x"}
  %row = f32[1,8] slice(%wide)
  %new = f32[4,8] dynamic-update-slice(%kept, %row, %i, %i)
  ROOT %out = (s32[], f32[4,8]) tuple(%i, %new)
}

%condition (q: (s32[], f32[4,8])) -> pred[] {
  %q = (s32[], f32[4,8]) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: f32[64]) -> f32[4,8] {
  %a = f32[64] parameter(0)
  %zero = s32[] constant(0)
  %early = f32[1000] broadcast(%a)
  %sum = f32[4,8] slice(%early)
  %start = (s32[], f32[4,8]) tuple(%zero, %sum)
  %while.1 = (s32[], f32[4,8]) while(%start), condition=%condition, body=%body
  ROOT %result = f32[4,8] get-tuple-element(%while.1), index=1
}
"""


def test_the_fullest_place_of_a_schedule():
    owners, live = temporary_owners(parse_program(LOOP))
    assert live == 4 * (1000 + 32)
    assert [owner.name for owner in owners] == ["early f32[1000]", "sum f32[4,8]"]


def test_a_loop_needs_its_turn_beside_what_it_carries():
    """The array that the loop carries lies where it began, and is updated there."""
    _, live = temporary_owners(parse_program(LOOP.replace("f32[1000]", "f32[40]")))
    assert live == 4 * (32 + 100 + 8)


def test_a_branch_needs_its_temporaries_too():
    run = "conditional(%zero, %start, %start), branch_computations={%body, %body}"
    text = LOOP.replace("f32[1000]", "f32[40]").replace("while(%start), condition=%condition, body=%body", run)
    owners, _ = temporary_owners(parse_program(text))
    assert "layer:forward:h=rms_norm" in [owner.name for owner in owners]


def test_owners_hold_shards():
    mesh = device_mesh({"fsdp": 4, "tensor": 2})
    shapes = {"mu": {"w_up": jax.ShapeDtypeStruct((16, 8), jnp.float32)}, "count": jax.ShapeDtypeStruct((), jnp.int32)}
    places = {
        "mu": {"w_up": NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))},
        "count": NamedSharding(mesh, PartitionSpec()),
    }
    found = {owner.name: owner.num_bytes for owner in state_owners(shapes, places, "optimizer")}
    assert found == {"mu.w_up": 4 * 4 * 4, "count": 4}


def test_samples_go_on_until_the_sampler_is_closed():
    with Sampler(every_s=0.001) as sampler:
        sampler.mark("first")
        time.sleep(0.05)
    taken = len(sampler.samples)
    time.sleep(0.01)
    assert len(sampler.samples) == taken
    assert sampler.marks[0].text == "first"
    if resident_bytes() is not None:  # Linux
        assert taken > 1
        assert sampler.counted == "process"
        assert sampler.samples[0].num_bytes > 1e6


def test_the_picture_keeps_the_peak():
    samples = tuple(Sample(float(at), 10**9 + (at == 4321) * 10**8) for at in range(10_000))
    memory = MemoryProfile(
        counted="process", samples=samples, marks=(MemoryMark(0.0, "state"), MemoryMark(1.0, "compile"))
    )
    figure = memory_timeline_figure(memory)
    drawn = marks(figure, "area")[0]["rows"]
    assert len(drawn) <= 2 * MAX_SAMPLES
    assert max(row["y"] for row in drawn) == pytest.approx(1.1)
    # every mark has its line, and words that would lie on each other are moved apart
    assert [row["text"] for rule in marks(figure, "rule") for row in rule["rows"]] == ["state", "compile"]
    heights = {row["text"]: row["y_px"] for text in marks(figure, "text") for row in text["rows"]}
    assert heights.keys() == {"state", "compile", "1.1 GB"}
    assert abs(heights["state"] - heights["compile"]) > 12
