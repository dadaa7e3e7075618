"""One derivation: what is planned, simulated, proved and served of a service is the same list of steps."""

import pytest
from msgspec.structs import replace

from meshwright.api.proving import ProofOptions, request_of
from meshwright.cost.setting import Setting
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.plan.serving.engines import phase_setting
from meshwright.plan.serving.storing import StoredDtypes
from meshwright.simulate.service import PricedClock
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import LAYOUTS, Strategy, make_mesh
from meshwright.verify.expected import StepDerivation
from tests.parallel.generate_cases import FAMILIES
from tests.tier import sampled

CONTEXT = {"context": 2, "tensor": 2}
ENGINES = {"prompts": CONTEXT, "sequences": CONTEXT, "positions": CONTEXT, "widths": CONTEXT}
ENGINES["gathered"] = {"fsdp": 2, "tensor": 2}
"""Layout -> mesh."""


def cases():
    """Models, layouts and meshes; of experts not every layout."""
    for name in ("llama", "gemma2", "gpt_oss", "mixtral", "deepseek_v2"):
        experts = FAMILIES[name].num_experts
        for layout, axes in ENGINES.items():
            if not experts or layout not in ("widths", "gathered"):
                yield name, layout, {"expert": 2, **axes} if experts else axes


@pytest.mark.parametrize("stored", [("bf16", "bf16"), ("int8", "int8")])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("name", "layout", "axes"), sampled(list(cases()), next(cases())))
def test_planned_simulated_proved_and_served_steps_are_one(monkeypatch, name, layout, axes, phase, stored):
    model, mesh = FAMILIES[name], make_mesh(axes)
    strategy = Strategy(mesh=mesh, assignment=LAYOUTS[layout])
    cluster = parse_cluster(f"h100:{strategy.num_chips}x1")
    setting = phase_setting(Setting(model, cluster, Job(batch_seqs=1, seq_len=1)), phase, StoredDtypes(*stored), 64, 8)
    planned = setting.derived(strategy)

    proved = StepDerivation(request_of(setting, strategy, ProofOptions(depth="lower"))).derived
    assert proved == planned

    timed = []
    derived_of = Setting.derived
    monkeypatch.setattr(Setting, "derived", lambda self, given: timed.append(derived_of(self, given)) or timed[-1])
    PricedClock(setting, strategy).step_s(4, 100, 16 * (phase == "prefill"), 0.0)
    assert planned in timed

    storage = replace(setting.step_storage, num_pages=0)
    served = PackedStep(model, strategy, max_len=64, max_seqs=8, storage=storage)
    assert (served.derived_prompts if phase == "prefill" else served.derived) == planned
