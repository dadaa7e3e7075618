"""Sums between islands: seconds and bytes by hand, and what they add to a step."""

import msgspec
import pytest

from meshwright.cost.breakdown import Breakdown
from meshwright.cost.outer import CODED_PER_S, DECODED_PER_S, HOST_BYTES_PER_S, PCIE_BYTES_PER_S
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.legal import legal
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.spec.weights import num_params

MODEL = load_model("llama3-8b")
N = num_params(MODEL)  # V=128,256 divides by every tensor here: nothing is padded
RATE = 125e6
DILOCO = {"islands_sync": "diloco", "outer_every": 30}


def priced(axes=None, *, on="4*h100:8x4@1Gbit/s", batch=512, **fields):
    setting = Setting(MODEL, parse_cluster(on), Job(batch_seqs=batch, seq_len=8192))
    mesh = make_mesh({"islands": setting.cluster.num_islands, **(axes or {"fsdp": 32})})
    strategy = Strategy(mesh=mesh, num_microbatches=2, **fields)
    assert legal(setting, strategy) == ()
    return price_strategy(setting, strategy)


def alone():
    """One island with its share of the batch."""
    setting = Setting(MODEL, parse_cluster("h100:8x4"), Job(batch_seqs=128, seq_len=8192))
    return price_strategy(setting, Strategy(mesh=make_mesh({"fsdp": 32}), num_microbatches=2)).estimate


def norms():
    return (2 * MODEL.num_layers + 1) * MODEL.d_model


def test_gradients_of_every_step_by_hand():
    """Four islands of four hosts with 8 chips each send 3/4 of all numbers as addends, and their sums to three."""
    whole, exchange = priced(), priced().exchange
    assert exchange.num_values == N
    assert exchange.link_bytes == 2 * 3 / 4 * 4 * N
    assert exchange.link_s == 2 * 3 / 4 * 4 * N / RATE
    # a chip has N / 32 of the matrices and every norm, sent out and brought back over PCIe gen 5
    assert exchange.copy_s == pytest.approx(2 * 4 * ((N - norms()) / 32 + norms()) / 64e9, rel=1e-12)
    # each host adds 3/4 of its quarter of the numbers: two reads and a write of 4 bytes
    assert exchange.host_s == pytest.approx(N / 4 * 3 / 4 * 12 / HOST_BYTES_PER_S, rel=1e-12)
    assert exchange.hidden_s == exchange.host_bytes == 0
    exchange_s = exchange.copy_s + exchange.link_s + exchange.host_s
    one = alone()
    assert whole.estimate.step_s == one.step_s + exchange_s
    assert whole.estimate.terms["islands"] == exchange_s
    assert whole.estimate.bound_by == "islands"
    assert whole.estimate.flops == 4 * one.flops
    assert whole.estimate.mfu == pytest.approx(one.mfu * one.step_s / whole.estimate.step_s)
    assert whole.estimate.memory == one.memory


def test_a_period_divides_the_exchange_and_bits_its_bytes():
    """4 bits and a 16-bit scale for each 64 numbers; hosts hold the weights and the momentum, in 4 bytes each."""
    wide, narrow = priced(**DILOCO).exchange, priced(outer_bits=4, **DILOCO).exchange
    assert wide.link_bytes == priced().exchange.link_bytes
    assert narrow.link_bytes == 2 * 3 / 4 * N * (0.5 + 2 / 64)
    assert wide.host_bytes == narrow.host_bytes == 8 * N
    # outer gradient, weights and momentum are read and written: 6 x 4 bytes a number
    adding_s = N / 4 * (3 / 4 * 12 + 24) / HOST_BYTES_PER_S
    assert wide.host_s == pytest.approx(adding_s, rel=1e-12)
    # all numbers are made 4 bits of, and an island's own quarter of the sums; as many are read, and all sums
    coding_s = N / 4 * (5 / 4 / CODED_PER_S + 2 / DECODED_PER_S)
    assert narrow.host_s == pytest.approx(adding_s + coding_s, rel=1e-12)
    step_s = alone().step_s + (wide.copy_s + wide.link_s + wide.host_s) / 30
    assert priced(**DILOCO).estimate.step_s == pytest.approx(step_s, rel=1e-12)
    assert priced(islands_sync="async-sgd", outer_every=30).exchange.host_bytes == 16 * N


def test_fragments_overlap_with_the_steps_after_them():
    """Of each period the link and the hosts may use 4 x 5 of 30 steps, or 2 x 14."""
    inner_s = alone().step_s
    part = priced(outer_bits=4, outer_fragments=4, outer_overlap=5, **DILOCO)
    busy_s = part.exchange.link_s + part.exchange.host_s
    assert busy_s > 20 * inner_s
    assert part.exchange.hidden_s == pytest.approx(20 * inner_s)
    exposed_s = (part.exchange.copy_s + busy_s - 20 * inner_s) / 30
    assert part.estimate.step_s == pytest.approx(inner_s + exposed_s)
    most = priced(outer_fragments=2, outer_overlap=14, **DILOCO).exchange
    assert most.hidden_s == pytest.approx(28 * inner_s)
    fast = priced(on="4*h100:8x4@400Gbit/s", outer_fragments=2, outer_overlap=14, **DILOCO).exchange
    assert fast.exposed_s == pytest.approx(fast.copy_s / 30)


def test_asynchronous_islands_wait_for_the_link():
    exchange, of_diloco = priced(islands_sync="async-sgd", outer_every=30).exchange, priced(**DILOCO).exchange
    assert exchange.link_s == of_diloco.link_s
    assert exchange.hidden_s == 0


@pytest.mark.parametrize("axes", [{"fsdp": 32}, {"data": 4, "fsdp": 8}, {"tensor": 4, "pipeline": 2, "fsdp": 4}])
def test_the_link_carries_as_much_whatever_the_mesh_of_an_island(axes):
    assert priced(axes).exchange.num_values == N
    assert priced(axes).exchange.link_bytes == priced().exchange.link_bytes


@pytest.mark.parametrize("fields", [{}, DILOCO, {"outer_bits": 8, "outer_fragments": 4, "outer_overlap": 3, **DILOCO}])
def test_the_breakdown_adds_up(fields):
    whole = priced(**fields)
    breakdown, exchange = Breakdown(whole), whole.exchange
    assert sum(term.added_s for term in breakdown.terms) == pytest.approx(whole.estimate.step_s)
    term = next(term for term in breakdown.terms if term.name == "islands")
    assert (term.added_s, term.alone_s, term.words) == (exchange.exposed_s, exchange.serial_s, "sums between islands")
    assert sum(breakdown.named().values()) == pytest.approx(whole.estimate.step_s, rel=1e-3)
    assert breakdown.partition.total_s == pytest.approx(whole.estimate.step_s)
    assert breakdown.partition.exposed_s > exchange.exposed_s
    free = Breakdown(msgspec.structs.replace(whole, exchange=None))
    assert breakdown.other_s == pytest.approx(free.other_s, abs=1e-9)
    assert breakdown.overlap().exposed_step_s - exchange.serial_s == pytest.approx(free.overlap().exposed_step_s)


def test_what_is_assumed_is_said():
    assert priced().exchange.assumed == (
        "chips and hosts exchange 64 GB/s a chip; a host is assumed to add at 20 GB/s of memory"
    )
    on_tpus = priced({"fsdp": 16}, on="2*tpu7x:2x2x4@1Gbit/s", batch=64).exchange
    assert f"exchange {PCIE_BYTES_PER_S / 1e9:.0f} GB/s a chip, which is assumed" in on_tpus.assumed
    assert "code 0.5 billion numbers a second" in priced(outer_bits=8, **DILOCO).exchange.assumed


@pytest.mark.parametrize(
    ("on", "axes", "message"),
    [
        ("h100:8x4", {"islands": 2, "fsdp": 16}, "islands=2, and h100:8x4 is 1 island. Leave it out, or name"),
        ("4*h100:8x4@1Gbit/s", {"fsdp": 32}, "islands=1, and 4*h100:8x4@1Gbit/s is 4 islands. Set islands=4."),
        ("3*h100:8x4@1Gbit/s", {"islands": 3, "fsdp": 32}, "islands=3 does not divide the batch of 512 sequences"),
        ("4*h100:8x4@1Gbit/s", {"islands": 4, "fsdp": 16}, "fsdp=16 needs 16 devices, but h100:8x4 has 32"),
    ],
)
def test_islands_that_the_cluster_or_the_batch_have_not(on, axes, message):
    setting = Setting(MODEL, parse_cluster(on), Job(batch_seqs=512, seq_len=8192))
    assert message in legal(setting, Strategy(mesh=make_mesh(axes), num_microbatches=2))[0].message
