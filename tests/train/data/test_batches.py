import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.core.errors import InputError
from meshwright.parallel.mesh import device_mesh
from meshwright.train.data.batches import Ahead, Batches, open_data
from meshwright.train.data.sources import Source
from meshwright.train.data.token_store import TokenStore
from meshwright.train.settings import TrainSettings
from tests.train.small import read_documents

SEQ_LEN, BATCH_SEQS = 16, 8
NUM_ROWS = 21
"""Not a multiple of the batch, so that batches cross the ends of epochs."""
ARRAYS = ("tokens", "labels", "positions", "documents")


class SpyStore(TokenStore):
    """Token i is i, documents have 5, 6, ... tokens, and every place that is read is remembered."""

    def __init__(self) -> None:
        length = NUM_ROWS * SEQ_LEN
        starts = [s for s in np.cumsum([0, *range(5, 99)]) if s < length]
        super().__init__(np.arange(length, dtype=np.uint16), np.array([*starts, length], np.uint64))
        self.reads: list[int] = []

    def read(self, places: np.ndarray) -> np.ndarray:
        self.reads.extend(places.tolist())
        return super().read(places)


def batches(store=None, *, packing=True, **changes):
    options = {"batch_seqs": BATCH_SEQS, "seq_len": SEQ_LEN, "seed": 0, **changes}
    return Batches((Source(store or SpyStore(), packing),), **options)


def taken(reader, first, count):
    """Numbers of the rows that samples ``first`` and on read."""
    return [reader.find(i)[1] for i in range(first, first + count)]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_sample_is_a_pure_function_of_seed_and_number():
    forward = [batches().rows(i) for i in range(0, 60, 7)]
    one = batches()
    for first, expected in reversed(list(zip(range(0, 60, 7), forward, strict=True))):
        assert_equal(one.rows(first), expected)
    assert not np.array_equal(forward[0]["tokens"], batches(seed=1).rows(0)["tokens"])


def test_each_epoch_takes_every_row_once_in_an_order_of_its_own():
    order = taken(batches(), 0, 3 * NUM_ROWS)
    epochs = [order[i : i + NUM_ROWS] for i in range(0, len(order), NUM_ROWS)]
    assert all(sorted(epoch) == list(range(NUM_ROWS)) for epoch in epochs)
    orders = {tuple(epoch) for epoch in epochs} | {tuple(range(NUM_ROWS))}
    assert len(orders) == 4
    # The next seed's first epoch is not this one's second.
    assert all(tuple(taken(batches(seed=seed), 0, NUM_ROWS)) not in orders for seed in (1, 2, 3))


@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 3, 1, 12), (5, 7)])
def test_any_batch_sizes_go_through_the_same_samples(sizes):
    """A run that is resumed with another batch size goes on from its count of samples."""
    found, first = [], 0
    for size in sizes * 3:
        rows = batches(batch_seqs=size).rows(first)
        found.extend(rows["tokens"][:, 0] // SEQ_LEN)
        first += size
    assert found == taken(batches(), 0, first)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_together_read_the_batch_and_nothing_twice(packing, processes):
    # Within one epoch: a batch that crosses into the next may have a row of both.
    whole = batches(packing=packing).rows(NUM_ROWS)
    share = BATCH_SEQS // processes
    parts, rows_read = [], []
    for process in range(processes):
        store = SpyStore()
        mine = batches(store, packing=packing)
        mine_rows = slice(process * share, (process + 1) * share)
        parts.append(mine.rows(NUM_ROWS, mine_rows))
        # A label of the row's last token is the only place that is of another row.
        rows = {mine.find(NUM_ROWS + row)[1] for row in range(BATCH_SEQS)[mine_rows]}
        assert {place // SEQ_LEN for place in store.reads} <= rows | {row + 1 for row in rows}
        assert {place // SEQ_LEN for place in store.reads if place % SEQ_LEN} == rows
        rows_read.extend(rows)
    assert_equal({name: np.concatenate([part[name] for part in parts]) for name in ARRAYS}, whole)
    assert len(set(rows_read)) == len(rows_read) == BATCH_SEQS


def test_labels_are_counted_over_the_whole_batch_without_reading():
    store = SpyStore()
    reader = batches(store)
    counts = [reader.num_labels(first) for first in range(0, 40, 8)]
    assert not store.reads
    assert counts == [np.count_nonzero(reader.rows(first)["labels"] != -1) for first in range(0, 40, 8)]
    assert all(0 < count < BATCH_SEQS * SEQ_LEN for count in counts)
    assert batches(packing=False).num_labels(0) == BATCH_SEQS * SEQ_LEN


def shardings(axes: dict[str, int], *spec: object) -> dict[str, NamedSharding]:
    mesh = device_mesh(axes)
    arrays = dict.fromkeys(ARRAYS, NamedSharding(mesh, PartitionSpec(*spec)))
    return {**arrays, "num_labels": NamedSharding(mesh, PartitionSpec())}


ZIGZAG = np.concatenate([np.arange(SEQ_LEN).reshape(4, -1)[[0, 3]], np.arange(SEQ_LEN).reshape(4, -1)[[1, 2]]]).ravel()


@pytest.mark.parametrize(
    ("axes", "spec", "order"),
    [
        ({"data": 1}, (None, None), None),
        ({"data": 8}, ("data", None), None),
        ({"data": 2, "fsdp": 2, "context": 2}, (("data", "fsdp"), "context"), ZIGZAG),
        ({"fsdp": 2, "tensor": 4}, ("fsdp", None), None),
    ],
    ids=str,
)
def test_every_mesh_has_the_same_global_batch_and_reads_each_position_once(axes, spec, order):
    expected = batches().rows(19)
    store, where = SpyStore(), shardings(axes, *spec)
    found = batches(store, order=order).global_batch(19, where)
    for name in ARRAYS:
        assert found[name].dtype == np.int32
        assert found[name].sharding == where[name]
        np.testing.assert_array_equal(found[name], expected[name] if order is None else expected[name][:, order])
    assert found["num_labels"].dtype == np.float32
    assert float(found["num_labels"]) == np.count_nonzero(expected["labels"] != -1)
    # Each token once for itself and once as a label: four arrays and replicas share what was read.
    assert len(store.reads) == 2 * BATCH_SEQS * SEQ_LEN


def test_only_the_arrays_asked_for_are_made():
    where = {name: shardings({"data": 2}, "data")[name] for name in ("tokens", "labels")}
    assert set(batches().global_batch(0, where)) == {"tokens", "labels"}


def test_a_position_shard_reads_only_its_positions():
    store = SpyStore()
    reader = batches(store, order=ZIGZAG)
    reader.rows(0, slice(0, 1), slice(0, 8))
    row = reader.find(0)[1]
    asked = {row * SEQ_LEN + position for position in ZIGZAG[:8]}
    last = NUM_ROWS * SEQ_LEN - 1
    assert set(store.reads) == asked | {min(place + 1, last) for place in asked}


def test_batches_read_ahead_come_in_order_and_leave_no_thread():
    where = shardings({"data": 2}, "data")
    reader = batches()
    before = threading.active_count()
    with reader.ahead(3, where) as ahead:
        for expected, (first, batch) in zip(range(3, 60, BATCH_SEQS), ahead, strict=False):
            assert first == expected
            assert_equal({name: np.asarray(batch[name]) for name in ARRAYS}, reader.rows(first))
    assert threading.active_count() == before


def test_reading_ahead_is_bounded_and_an_error_comes_at_its_place():
    made = []

    def make(number):
        made.append(number)
        if number == 6:
            raise OSError("disk")
        return number * number

    with Ahead(make, start=0, stride=2) as ahead:
        until = time.monotonic() + 10
        while len(made) < 2 and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.02)
        assert made == [0, 2]
        assert [next(ahead) for _ in range(3)] == [(0, 0), (2, 4), (4, 16)]
        with pytest.raises(OSError, match="disk"):
            next(ahead)
        assert next(ahead) == (8, 64)
    with pytest.raises(RuntimeError), Ahead(make, start=0, stride=2):
        raise RuntimeError("the loop failed")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_too_little_text_is_refused():
    store = TokenStore(np.zeros(16, np.uint16))
    with pytest.raises(InputError, match=r"has 16 tokens, not one sequence of 16 and its labels.*at most 15 tokens"):
        batches(store, packing=False)
    assert sum(len(one.rows) for one in batches(store).samples) == 1
    assert len(Source(store).rows(17)) == 0
    with pytest.raises(InputError, match=r"has 16 tokens, not one sequence of 17. Give more text.*at most 16"):
        batches(store, seq_len=17)


def test_data_is_opened_with_its_tokenizer_and_both_parts(tmp_path):
    data = open_data(TrainSettings(packing=True, held_out=0.1), vocab_size=300, folder=tmp_path)
    texts = read_documents("pydoc")
    assert data.train[0].store.tokens[-1] == data.tokenizer.token_to_id("<|endoftext|>")
    assert data.train[0].store.num_documents + data.held_out[0].store.num_documents == len(texts)
    assert data.several_documents
    total = len(data.train[0].store) + len(data.held_out[0].store)
    assert total == sum(len(encoding.ids) + 1 for encoding in data.tokenizer.encode_batch(list(texts)))
    assert 0.05 < len(data.held_out[0].store) / total < 0.2
    # Another share or packing is another view of the same files.
    rest = open_data(TrainSettings(packing=False, held_out=0.0), vocab_size=300, folder=tmp_path)
    assert rest.held_out == ()
    assert len(rest.train[0].store) == total
    assert not rest.train[0].packing
    assert len(list(tmp_path.iterdir())) == 1


def test_a_row_of_real_text_reads_as_documents(tmp_path):
    """What a row says, decoded: each document number is one text, whole or cut, that a label never leaves."""
    data = open_data(TrainSettings(packing=True), vocab_size=300, folder=tmp_path)
    texts = read_documents("pydoc")
    reader = Batches(data.train, batch_seqs=8, seq_len=4096, seed=0)
    rows = reader.rows(0)
    seen = 0
    for tokens, labels, documents in zip(rows["tokens"], rows["labels"], rows["documents"], strict=True):
        for number in range(documents.max() + 1):
            chosen = documents == number
            text = data.tokenizer.decode(tokens[chosen].tolist())
            predicted = data.tokenizer.decode([i for i in labels[chosen] if i >= 0])
            # A cut may fall inside a character.
            assert any(text.strip("\ufffd") in document for document in texts)
            assert any(predicted.strip("\ufffd") in document for document in texts)
            seen += 1
    assert seen > 16


@pytest.mark.slow
def test_a_given_tokenizer_is_used(tmp_path):
    first = open_data(TrainSettings(), vocab_size=300, folder=tmp_path / "own")
    (given,) = (tmp_path / "own").glob("*/tokenizer.json")
    found = open_data(TrainSettings(tokenizer=str(given)), vocab_size=50_000, folder=tmp_path / "given")
    assert found.tokenizer.to_str() == first.tokenizer.to_str()
    np.testing.assert_array_equal(found.train[0].store.tokens, first.train[0].store.tokens)
    with pytest.raises(InputError, match="has 300 tokens, but the model has vocab_size=299"):
        open_data(TrainSettings(tokenizer=str(given)), vocab_size=299, folder=tmp_path / "given")


def test_a_batch_can_be_used_by_a_compiled_step():
    where = shardings({"data": 4}, "data")
    total = jax.jit(lambda batch: (batch["labels"] >= 0).sum() / batch["num_labels"])
    assert float(total(batches().global_batch(5, where))) == 1.0
