"""Which documents are held out: whole ones, from all over the text."""

from typing import NamedTuple

from meshwright.train.data.token_store import Span, TokenStore

MOST_PLACES = 64
"""Runs of documents that are held out at most; more places would not make a better sample."""


class Split(NamedTuple):
    """Two parts of a store that together are all of it, and share no token."""

    train: TokenStore
    held_out: TokenStore


def split(store: TokenStore, share: float) -> Split:
    """Hold out about ``share`` of the tokens: runs of whole documents, spread evenly over a whole store.

    Where documents are so few or uneven that this would be less than half or more than double of it, the last
    tokens are held out, and count as a document of their own. The same store and share give the same parts.
    """
    wanted = int(len(store) * share)
    held = _whole_documents(store, wanted, places=min(max(int(store.num_documents * share), 1), MOST_PLACES))
    total = sum(stop - start for start, stop in held)
    if not wanted / 2 <= total <= min(2 * wanted, len(store) - 1):
        held = [(len(store) - wanted, len(store))]
    edges = [0, *(edge for span in held for edge in span), len(store)]
    return Split(store.part(zip(edges[::2], edges[1::2], strict=True)), store.part(held))


def _whole_documents(store: TokenStore, wanted: int, *, places: int) -> list[Span]:
    """Of each of ``places`` equal stretches of the tokens the last documents, ``wanted`` tokens in all or near it."""
    held: list[Span] = []
    for place in range(1, places + 1):
        stop = len(store) * place // places
        start, stop = (store.nearest_start(edge) for edge in (stop - wanted // places, stop))
        if start < stop and start >= (held[-1][1] if held else 0):
            held.append((start, stop))
    return held
