"""Masks of a user's own module: the right blocks, or one line on what is wrong, whatever the code does."""

import sys
import time

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.masks.table import block_table
from meshwright.masks.user import table_of_user

MODULE = """
import os, sys, time
import numpy as np

print("printed while importing")
os.write(1, b"written to the descriptor")
WORDS = np.arange(50) // 9
text = "no function"


def dilated(b, h, q_idx, kv_idx):
    print("printed while running")
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % 3 == 0)


def documents(b, h, q_idx, kv_idx):
    return WORDS[q_idx] == WORDS[kv_idx]


def by_head(b, h, q_idx, kv_idx):
    return h == 1


def always(b, h, q_idx, kv_idx):
    return True


def of_jax(b, h, q_idx, kv_idx):
    import jax.numpy as jnp
    return jnp.where(q_idx > 5, q_idx >= kv_idx, kv_idx < 10)


def numbers(b, h, q_idx, kv_idx):
    return q_idx - kv_idx


def square(b, h, q_idx, kv_idx):
    return np.ones((3, 3), bool)


def branches(b, h, q_idx, kv_idx):
    return True if q_idx > kv_idx else False


def of_two(q_idx, kv_idx):
    return q_idx > kv_idx


def outside(b, h, q_idx, kv_idx):
    return WORDS[q_idx + 40] == 1


def endless(b, h, q_idx, kv_idx):
    while True:
        pass


def leaves(b, h, q_idx, kv_idx):
    os._exit(3)


def exits(b, h, q_idx, kv_idx):
    sys.exit("enough")


def long(b, h, q_idx, kv_idx):
    raise RuntimeError("many\\nlines " * 9999)

"""
SIZES = {"q_len": 50, "kv_len": 50, "block": 16}


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODULE)
    # the child has its own standard library, whatever is in the folder
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


WORDS = np.arange(50) // 9
EXPECTED = {
    "dilated": lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0),
    "documents": lambda b, h, q, k: WORDS[q] == WORDS[k],
    "by_head": lambda b, h, q, k: (h == 1) & (q >= 0) & (k >= 0),
    "always": lambda b, h, q, k: (q >= 0) & (k >= 0),
    "of_jax": lambda b, h, q, k: np.where(q > 5, q >= k, k < 10),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_blocks_of_a_mask(module, capfd, name):
    found = table_of_user(f"mine:{name}", **SIZES, heads=2)
    expected = block_table(EXPECTED[name], **SIZES, heads=2)
    shape = (1, 2, *expected.kinds.shape[2:])
    assert np.array_equal(np.broadcast_to(found.table.kinds, shape), np.broadcast_to(expected.kinds, shape))
    rows = np.arange(50)
    pairs = [np.broadcast_to(EXPECTED[name](0, h, rows[:, None], rows), (50, 50)) for h in (0, 1)]
    assert found.visible_pairs == np.mean([one.sum() for one in pairs])
    assert np.array_equal(found.points, pairs[0])
    assert capfd.readouterr() == ("", "")
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine:numbers", r"mine:numbers returns int32, not Booleans. Compare indices, such as q_idx >= kv_idx\."),
        ("mine:square", r"returns shape \(3, 3\) for indices of \(1, 1, 1, 1\). Return a Boolean a pair"),
        ("mine:branches", r"raised ValueError: The truth value .* \(mine.py:\d+\). Indices are arrays: use &, \|"),
        ("mine:of_two", r"raised TypeError: of_two\(\) takes 2 positional arguments but 4 were given"),
        ("mine:outside", r"raised IndexError: index 50 is out of bounds .*mine.py:\d+"),
        ("mine:leaves", r"ended its process with exit code 3"),
        ("mine:exits", r"raised SystemExit: enough \(mine.py:\d+\)"),
        ("mine:long", r"raised RuntimeError: many lines many"),
        ("mine:dilate", r"mine:dilate: there is no function 'dilate'. Did you mean 'dilated'\?"),
        ("mine:text", r"mine:text: there is no function 'text'"),
        ("mime:dilated", r"there is no module 'mime' in this folder"),
        ("broken:mask", r"raised SyntaxError.*broken.py"),
        ("needs:mask", r"raised ModuleNotFoundError: No module named 'nothing_like_it' \(needs.py:1\)"),
        ("mine.py:dilated", r"there is no module 'mine.py'"),
        ("a/mine:dilated", r"is not module:function. Write for example my_masks:dilated for my_masks.py"),
        ("mine:", "is not module:function"),
        (":", "is not module:function"),
        ("mine:dilated:x", "is not module:function"),
        ("mine:__class__()", "is not module:function"),
    ],
)
def test_what_is_wrong_is_one_line(module, capfd, spec, message):
    (module / "broken.py").write_text("def mask(:\n")
    (module / "needs.py").write_text("import nothing_like_it\n")
    with pytest.raises(InputError, match=message) as found:
        table_of_user(spec, **SIZES)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) <= 4_000
    assert capfd.readouterr() == ("", "")


def test_an_endless_loop_is_ended(module):
    begin = time.monotonic()
    with pytest.raises(InputError, match=r"mine:endless took more than 2 s. Use a shorter sequence."):
        table_of_user("mine:endless", **SIZES, timeout_s=2)
    assert time.monotonic() - begin < 30


def test_sizes_are_those_of_every_table(module):
    with pytest.raises(InputError, match=r"q_len=0 must be at least 1"):
        table_of_user("mine:dilated", q_len=0, kv_len=50)
