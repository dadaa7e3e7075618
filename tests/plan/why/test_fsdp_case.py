"""The four situations of FSDP: one plan for each, the lecture's own figures, and where each limit lies."""

import msgspec
import pytest

from meshwright.cost.setting import Setting
from meshwright.plan.planner import rank_plans
from meshwright.plan.why.explain import fsdp_case
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.spec.weights import num_params

LLAMA70B = catalogue.load_model("llama3-70b")


def case_of(cluster, batch_seqs, seq_len, *, model=LLAMA70B, **axes):
    """The case of a strategy that runs on a cluster: the mesh as given, or else the search's."""
    job = Job(batch_seqs=batch_seqs, seq_len=seq_len)
    one = rank_plans(Setting(model, parse_cluster(cluster), job), axes=axes, top=1).plans[0]
    return fsdp_case(one)


@pytest.mark.parametrize(
    ("case", "batch_seqs", "seq_len", "axes", "helps"),
    [
        (1, 1024, 8192, {"fsdp": 256}, "FSDP (or data parallelism) alone"),
        (2, 128, 65536, {"context": 8}, "not a pipeline"),
        (3, 256, 512, {"pipeline": 4}, "pipeline stages"),
        (4, 32, 512, {"tensor": 8, "pipeline": 4}, "context or tensor parallelism for the sequences, and pipeline"),
    ],
)
def test_a_plan_for_each_case(case, batch_seqs, seq_len, axes, helps):
    found = case_of("h100:8x32", batch_seqs, seq_len, **axes)
    assert found.case == case
    assert (found.chips > found.sequences) == (case in (2, 4))
    assert (found.comms_s > found.compute_s) == (case in (3, 4))
    assert helps in found.advice
    assert found.follows
    assert f"case {case} of 4" in found.words


def lecture(num_gpus, tokens, seq_len):
    """Figures of the lecture: 200 TFLOP/s a GPU, 200 GB/s between nodes of 8 GPUs, 70 billion parameters."""
    model = msgspec.structs.replace(LLAMA70B, name="70b")
    h100 = parse_cluster("h100:8x1").chip
    chip = msgspec.structs.replace(
        h100, peak_flops={"bf16": 200e12}, nic_bytes_per_s=200e9 / 8, nvlink_bytes_per_s=1e14, variant="custom"
    )
    cluster = msgspec.structs.replace(parse_cluster(f"h100:8x{num_gpus // 8}"), chip=chip)
    small = rank_plans(Setting(model, parse_cluster("h100:8x32"), Job(batch_seqs=256, seq_len=2048)), top=1).plans[0]
    return msgspec.structs.replace(
        small,
        cluster=cluster,
        job=Job(batch_seqs=round(tokens / seq_len), seq_len=seq_len),
        strategy=Strategy(mesh=make_mesh({"fsdp": num_gpus})),
    )


def test_the_lecture_s_figures():
    """70e9 parameters, 4M tokens on 4000 GPUs: 2.1 s of compute and 2.1 s of communication, so about 4000 GPUs."""
    found = fsdp_case(lecture(4000, 4e6, 8000))
    scale = 70e9 / num_params(LLAMA70B)
    assert found.compute_s * scale == pytest.approx(2.1, rel=1e-6)
    # a node sends on what its 8 GPUs share: (1/8 - 1/4000) of all weights through each GPU's part of the network
    assert found.comms_s * scale == pytest.approx(2.1 * (1 - 8 / 4000), rel=1e-6)
    assert found.max_chips_by_comms == pytest.approx(4000 / (1 - 8 / 4000), rel=1e-6)
    assert found.sequences == 500
    assert found.case == 2


def test_twice_the_chips_halve_compute_and_not_communication():
    first, second = (fsdp_case(lecture(count, 4e6, 500)) for count in (4000, 8000))
    assert second.compute_s == pytest.approx(first.compute_s / 2)
    assert second.comms_s == pytest.approx(first.comms_s, rel=0.01)
    assert (first.case, second.case) == (1, 3)


def test_on_a_torus_it_is_the_book_s_limit():
    """llama3-70b at 4 Mi tokens: FSDP alone up to 3 B / alpha = 4,934 chips of a v5p. Source: section 6.3."""
    found = case_of("v5p:16x16x32", 1024, 4096)
    assert found.max_chips_by_comms == pytest.approx(3 * 2**22 / 2550, rel=1e-3)
    assert found.case == 4


def test_without_a_network_there_is_no_case():
    assert case_of("v5e:1x1", 8, 64, model=catalogue.load_model("tiny")) is None
