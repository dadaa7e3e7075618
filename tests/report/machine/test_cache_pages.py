"""The picture of a cache: which pages are drawn as what, and as whose."""

import pytest

from meshwright.core.errors import InputError
from meshwright.report.machine.cache_pages import MAX_NODES, MAX_PAGES, STATES, cache_figure
from meshwright.serve.sequences.prefix_tree import CacheSnapshot, TreePage
from tests.charts import marks, texts

SNAPSHOT = CacheSnapshot(
    num_pages=8,
    page_len=4,
    requests={7: (0, 1, 5), 9: (0, 3)},
    lengths={7: 10, 9: 8},
    tree=(
        TreePage(parent=None, tokens=(1, 2, 3, 4), page=0, users=2),
        TreePage(parent=0, tokens=(5, 6, 7, 8), page=1, users=1),
        TreePage(parent=0, tokens=(5, 6, 7, 9), page=4, users=0),
        TreePage(parent=2, tokens=(1, 1, 1, 1), page=-1, users=0),
    ),
)


def test_every_page_is_drawn_as_what_it_is():
    figure = cache_figure(SNAPSHOT)
    _, used, pool, edges, nodes = marks(figure, "rect")[:3] + marks(figure, "rule") + marks(figure, "rect")[3:]
    drawn = [row["state"] for row in pool["rows"]]
    shared, idle, own, free = "shared, in use", "shared, idle", "not shared", "free"
    assert drawn == [shared, shared, free, own, idle, own, free, free]
    assert {*drawn, "on the host"} == set(STATES)
    widths = [round((row["x2"] - row["x"]) / 0.94, 3) for row in used["rows"]]
    assert widths == [1, 1, 0.5, 1, 1]  # the third page of request 7 has 10 - 8 of 4 positions
    assert len(edges["rows"]) == 3
    assert [(row["x"] // 1, row["y"] // 1, row["state"]) for row in nodes["rows"]] == [
        (0, 0, shared),
        (1, 0, shared),
        (1, 1, idle),
        (2, 1, "on the host"),
    ]
    assert {"5 6 7 9", "page 4, idle", "page 0, 2 requests", "page 1, 1 request", "on the host"} <= set(texts(figure))
    assert figure.to_dict()["title"]["subtitle"].endswith(
        "2 not shared; 2 shared, in use; 1 shared, idle; 3 free; 1 on the host"
    )


def test_texts_are_spelt_and_cut():
    spelt = texts(cache_figure(SNAPSHOT, text=lambda tokens: f"a long beginning\n and its end {tokens[-1]}"))
    assert "first\\nsecond·" in texts(cache_figure(SNAPSHOT, text=lambda tokens: "first\nsecond\x01"))
    assert "a long …n and its end 9" in spelt


def test_an_idle_engine_without_a_tree():
    figure = cache_figure(CacheSnapshot(num_pages=3, page_len=4, requests={}, lengths={}, tree=()))
    assert [row["state"] for row in marks(figure, "rect")[0]["rows"]] == ["free"] * 3


def test_more_than_can_be_seen():
    with pytest.raises(InputError, match="2,049 pages; a picture shows 2,048"):
        cache_figure(CacheSnapshot(num_pages=MAX_PAGES + 1, page_len=4, requests={}, lengths={}, tree=()))
    tree = tuple(TreePage(parent=None, tokens=(n,), page=n, users=0) for n in range(MAX_NODES + 5))
    figure = cache_figure(CacheSnapshot(num_pages=99, page_len=1, requests={}, lengths={}, tree=tree))
    assert len(marks(figure, "rect")[-1]["rows"]) == MAX_NODES
    assert "5 more are not drawn" in str(figure.to_dict())
