"""Two lanes: their order, their dependencies, and what each way of data parallelism waits for."""

from itertools import pairwise

import pytest

from meshwright.cli.sweeps.two_streams import WAYS, DataParallelism, two_streams
from meshwright.cost.setting import Setting
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job

LLAMA, CLUSTER = load_model("llama3-8b"), parse_cluster("h100:8x8")
JOB = Job(batch_seqs=64, seq_len=4096)


@pytest.fixture(scope="module")
def ways():
    return {way.name: two_streams(Setting(LLAMA, CLUSTER, JOB), way, layers=3) for way in WAYS}


def test_a_lane_does_one_thing_at_a_time(ways):
    for streams in ways.values():
        for lane in ("compute", "links"):
            boxes = [box for box in streams.slices if box.lane == lane]
            for before, after in pairwise(boxes):
                assert before.end_s <= after.start_s + 1e-12


def test_passes_run_through_the_layers_and_back(ways):
    for streams in ways.values():
        order = [(box.what, box.layer) for box in streams.slices if box.lane == "compute"]
        passes = list(dict.fromkeys(one for one in order if one[0] != "optimizer"))
        assert passes == [*(("forward", n) for n in range(3)), *(("backward", n) for n in (2, 1, 0))]


def test_layers_run_again_before_each_later_one():
    """Of three layers two and one again, each a forward pass long; in segments of two one alone."""
    for remat, again in (("recompute-all", [(0, 2), (1, 2), (0, 1)]), ("recompute-2", [(0, 1)])):
        streams = two_streams(Setting(LLAMA, CLUSTER, JOB), WAYS[-1], layers=3, remat=remat)
        seconds, order = {}, []
        for box in (box for box in streams.slices if box.lane == "compute" and box.what != "optimizer"):
            seconds[box.what] = seconds.get(box.what, 0.0) + box.seconds
            order += [(box.what, box.layer)] * (order[-1:] != [(box.what, box.layer)])
        before = [order[number + 1 :] for number, one in enumerate(order) if one[0] == "recompute"]
        layers = [one[1] for one in order if one[0] == "recompute"]
        assert [
            (layer, next(n for what, n in rest if what == "backward"))
            for layer, rest in zip(layers, before, strict=True)
        ] == again
        assert seconds["recompute"] == pytest.approx(len(again) / 3 * seconds["forward"])


def test_naive_waits_for_every_byte(ways):
    naive = ways["data parallel, naive"]
    assert naive.exposed_s == pytest.approx(naive.links_s)
    assert naive.total_s == pytest.approx(naive.compute_s + naive.links_s)
    backward = max(box.end_s for box in naive.slices if box.what == "backward")
    assert all(box.start_s >= backward for box in naive.slices if box.lane == "links")


def test_overlap_does_the_same_work_sooner(ways):
    naive, each, buckets = (ways[name] for name in ("data parallel, naive", "overlapped", "bucketed"))
    assert each.compute_s == pytest.approx(naive.compute_s)
    assert each.links_s == pytest.approx(naive.links_s)
    assert each.total_s < naive.total_s
    assert buckets.links_s < each.links_s  # fewer starts
    assert buckets.compute_s == pytest.approx(each.compute_s)


def test_buckets_of_nothing_send_each_and_of_everything_send_at_the_end():
    way = DataParallelism(name="bucketed", zero=0, send="buckets")
    tiny = two_streams(Setting(LLAMA, CLUSTER, JOB), way, bucket_bytes=1)
    each = two_streams(Setting(LLAMA, CLUSTER, JOB), DataParallelism(name="each", zero=0, send="each"))
    assert tiny.slices == each.slices
    huge = two_streams(Setting(LLAMA, CLUSTER, JOB), way, bucket_bytes=1e15)
    assert sum(box.lane == "links" for box in huge.slices) == 1


def test_the_optimizer_waits_for_all_gradients(ways):
    for streams in ways.values():
        sent = [box.end_s for box in streams.slices if box.what in ("all-reduce", "reduce-scatter")]
        starts = [box.start_s for box in streams.slices if box.what == "optimizer"]
        assert min(starts) >= max(sent) - 1e-12


def test_what_each_stage_of_zero_sends(ways):
    """ZeRO-1 scatters and gathers what an all-reduce sends; ZeRO-3 gathers once more."""
    times = {name: streams.links_s for name, streams in ways.items()}
    assert times["ZeRO-1"] == pytest.approx(times["overlapped"], rel=0.01)
    assert times["ZeRO-3"] == pytest.approx(1.5 * times["overlapped"], rel=0.05)


def test_weights_are_there_before_they_are_used(ways):
    """Of ZeRO-3: the first layer waits for its first weight, the others find theirs gathered."""
    boxes = ways["ZeRO-3"].slices
    first = next(box for box in boxes if box.lane == "compute")
    gather = next(box for box in boxes if box.what == "all-gather")
    assert first.start_s >= gather.start_s == 0
    gathers = [box for box in boxes if box.what == "all-gather" and box.layer == 2]
    begins = next(box.start_s for box in boxes if (box.what, box.layer) == ("forward", 2))
    assert min(box.start_s for box in gathers) < begins


def test_zero_3_waits_where_links_are_slower_than_layers():
    small = Job(batch_seqs=64, seq_len=128)
    streams = two_streams(Setting(LLAMA, CLUSTER, small), WAYS[-1])
    assert streams.exposed_s > streams.compute_s
    assert streams.total_s >= streams.links_s
