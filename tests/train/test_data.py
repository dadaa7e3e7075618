import os

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.core.errors import InputError
from meshwright.parallel.mesh import device_mesh
from meshwright.train import data
from meshwright.train.data import Batches, TokenStore, open_tokens
from meshwright.train.text import read_documents
from meshwright.train.tokenizer import END_ID

SEQ_LEN, BATCH_SEQS = 16, 8
NUM_WINDOWS = 21
"""Not a multiple of the batch, so that batches cross the ends of epochs."""


class SpyStore(TokenStore):
    """Token i is i, and every read is remembered."""

    def __init__(self) -> None:
        super().__init__(np.arange(NUM_WINDOWS * SEQ_LEN + 1, dtype=np.uint16))
        self.reads: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> np.ndarray:
        self.reads.append((start, stop))
        return super().read(start, stop)


def batches(seed: int = 0, store: TokenStore | None = None) -> Batches:
    return Batches(store or SpyStore(), batch_seqs=BATCH_SEQS, seq_len=SEQ_LEN, seed=seed)


def test_a_batch_is_a_pure_function_of_seed_and_step():
    everything = slice(0, BATCH_SEQS)
    forward = [batches().rows(i, everything)[0] for i in range(6)]
    one = batches()
    backward = [one.rows(i, everything)[0] for i in reversed(range(6))]
    np.testing.assert_array_equal(forward, backward[::-1])
    assert not np.array_equal(forward[0], batches(seed=1).rows(0, everything)[0])


def test_an_epoch_reads_every_window_once_in_an_order_of_its_own():
    order = [batches().window(*divmod(i, BATCH_SEQS)) for i in range(2 * NUM_WINDOWS)]
    first, second = order[:NUM_WINDOWS], order[NUM_WINDOWS:]
    assert sorted(first) == sorted(second) == list(range(NUM_WINDOWS))
    assert first != second
    assert first != sorted(first)


def test_labels_are_the_following_tokens_and_windows_do_not_overlap():
    tokens, labels = batches().rows(0, slice(0, BATCH_SEQS))
    np.testing.assert_array_equal(labels, tokens + 1)
    assert len(np.unique(tokens)) == tokens.size
    assert (tokens[:, 0] % SEQ_LEN == 0).all()
    assert tokens.dtype == labels.dtype == np.int32


def test_a_part_of_the_rows_reads_nothing_else():
    whole = batches().rows(2, slice(0, BATCH_SEQS))
    store = SpyStore()
    part = batches(store=store).rows(2, slice(2, 4), slice(4, 8))
    for found, expected in zip(part, whole, strict=True):
        np.testing.assert_array_equal(found, expected[2:4, 4:8])
    assert len(store.reads) == 2
    assert all(stop - start == 5 for start, stop in store.reads)


def shardings(axes: dict[str, int], *spec: object) -> dict[str, NamedSharding]:
    return dict.fromkeys(("tokens", "labels"), NamedSharding(device_mesh(axes), PartitionSpec(*spec)))


@pytest.mark.parametrize(
    ("axes", "spec", "reads"),
    [
        ({"data": 1}, (None, None), BATCH_SEQS),
        ({"data": 8}, ("data", None), BATCH_SEQS),
        ({"data": 2, "fsdp": 2, "context": 2}, (("data", "fsdp"), "context"), 2 * BATCH_SEQS),
        ({"fsdp": 2, "tensor": 4}, ("fsdp", None), BATCH_SEQS),
    ],
    ids=str,
)
def test_every_mesh_has_the_same_global_batch_and_reads_each_row_once(axes, spec, reads):
    expected = batches().rows(3, slice(0, BATCH_SEQS))
    store = SpyStore()
    found = batches(store=store).global_batch(3, shardings(axes, *spec))
    np.testing.assert_array_equal(np.asarray(found["tokens"]), expected[0])
    np.testing.assert_array_equal(np.asarray(found["labels"]), expected[1])
    assert len(store.reads) == reads  # replicas share what was read; a context shard reads its own positions


def test_a_process_reads_only_the_rows_of_its_devices():
    """What another process would hold is never asked for: here, half of the devices."""
    store, asked = SpyStore(), shardings({"data": 8}, "data", None)["tokens"]
    one = batches(store=store)
    for device, index in asked.devices_indices_map((BATCH_SEQS, SEQ_LEN)).items():
        if device.id < 4:
            one.rows(0, index[0], index[1])
    windows = {start // SEQ_LEN for start, _ in store.reads}
    assert windows == {one.window(0, row) for row in range(4)}


def test_held_out_text_is_the_last_twentieth_and_never_trained_on():
    store = TokenStore(np.arange(1000, dtype=np.uint16))
    np.testing.assert_array_equal(store.held_out().read(0, 50), np.arange(950, 1000))
    assert len(store.train()) == 950
    assert len(store.held_out()) == 50


def test_too_little_text_is_refused():
    with pytest.raises(InputError, match=r"has 10 tokens, not one sequence of 16.*at most 9"):
        batches(store=TokenStore(np.zeros(10, np.uint16)))


def test_documents_are_tokenised_once_and_end_with_a_token(tmp_path, monkeypatch):
    documents = read_documents("pydoc")[:4]
    store, tokenizer = open_tokens(documents, vocab_size=300, folder=tmp_path)
    assert isinstance(store.tokens, np.memmap)
    assert store.tokens.dtype == np.uint16
    text = tokenizer.decode(store.read(0, len(store)).tolist(), skip_special_tokens=False)
    assert text == "".join(f"{d}<|endoftext|>" for d in documents)
    assert int((np.asarray(store.tokens) == END_ID).sum()) == len(documents)

    monkeypatch.setattr(data, "train_tokenizer", lambda *a, **k: pytest.fail("trained twice"))
    again, _ = open_tokens(documents, vocab_size=300, folder=tmp_path)
    np.testing.assert_array_equal(again.tokens, store.tokens)
    assert len(os.listdir(tmp_path)) == 2


def test_other_texts_or_sizes_get_other_files(tmp_path):
    documents = read_documents("pydoc")[:3]
    for texts, size in ((documents, 300), (documents, 320), (documents[:2], 300), (("".join(documents),), 300)):
        open_tokens(texts, vocab_size=size, folder=tmp_path)
    assert len(os.listdir(tmp_path)) == 8


def test_large_vocabularies_take_four_bytes(tmp_path):
    store, _ = open_tokens(("a b c d",), vocab_size=70_000, folder=tmp_path)
    assert store.tokens.dtype == np.uint32


def test_global_batches_are_placed_as_asked():
    where = shardings({"fsdp": 4}, "fsdp", None)
    found = batches().global_batch(0, where)
    assert found["tokens"].sharding == where["tokens"]
    assert {s.data.shape for s in found["tokens"].addressable_shards} == {(2, SEQ_LEN)}
    assert isinstance(found["labels"], jax.Array)
