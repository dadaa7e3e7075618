"""The cache pages of an engine, and the tree of pages that prompts with a common prefix share.

A node is a full page; its tokens follow its parent's. A running request pins the nodes of its prompt from the root on.
Nodes that no request pins are idle: they stay until pages are needed, and the longest idle is evicted first. A node
becomes idle before its parent does, so the evicted node is always a leaf of the pages on the devices. It moves to host
memory; if that is full, the page longest there, a leaf of the whole tree, is dropped.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

import msgspec
import numpy as np

from meshwright.batching.pages import PagePool
from meshwright.serve.sequences.window_pages import HeldWindow, WindowPage, WindowPages


class PrefixNode:
    """A page of the tree: its tokens, number (-1: on the host), children by their tokens, how many requests pin it
    (``users``), its ``copy`` in host memory, and its page for layers with a window, if still cached."""

    __slots__ = ("children", "copy", "page", "parent", "tokens", "users", "window")

    def __init__(self, tokens: tuple[int, ...], page: int, parent: "PrefixNode | None") -> None:
        self.tokens, self.page, self.parent = tokens, page, parent
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.users = 0
        self.copy: Sequence[np.ndarray] | None = None
        self.window: WindowPage | None = None


class TreePage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a prefix tree as plain data: the index of its parent (None: the first page of prompts), its tokens, its
    number (-1: on the host), and how many requests pin it."""

    parent: int | None
    tokens: tuple[int, ...]
    page: int
    users: int


class CacheSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of all pages of an engine's cache at one moment.

    ``requests``: request number -> its pages in order, the first of which may be in the tree; ``lengths``: request
    number -> its cached positions; ``tree``: tree pages, parents first. All other pages are free.
    """

    num_pages: int
    page_len: int
    requests: dict[int, tuple[int, ...]]
    lengths: dict[int, int]
    tree: tuple[TreePage, ...]


class _Sharer(msgspec.Struct):
    """A request in the tree: the ``root`` of its adapter, the tokens of its full prompt pages (``blocks``), all its
    page numbers and window pages, its pinned ``nodes``, and how many leading pages are in the tree (``num_shared``,
    kept after it unpins them)."""

    root: PrefixNode
    blocks: list[tuple[int, ...]]
    pages: Sequence[int]
    window: HeldWindow
    nodes: list[PrefixNode] = []
    num_shared: int = 0


class PrefixTree(PagePool):
    """A page pool that knows which prompt each page holds. A ``prefix`` is a request number; `enter` gives its prompt.

    ``free`` lists the unused pages, numbered from ``first`` on: the scheduler reserves pages by count and the engine
    pops as many numbers. Host memory has room for ``num_on_host`` evicted pages. If layers with a window have separate
    pages (``windows``), a request can start only after tree pages whose window pages are still cached.
    """

    def __init__(self, num_pages: int, page_len: int, num_on_host: int = 0, first: int = 0) -> None:
        super().__init__(num_pages)
        self.page_len, self.num_on_host = page_len, num_on_host
        self.windows: WindowPages | None = None
        self.num_came = 0  # pages copied back from the host so far
        self._leaving: dict[PrefixNode, int] = {}
        self._coming: list[PrefixNode] = []
        self._on_host: OrderedDict[PrefixNode, None] = OrderedDict()
        self.free = list(range(first, first + num_pages))[::-1]
        self.roots: dict[int, PrefixNode] = {}  # by adapter: keys and values depend on it
        self._sharers: dict[int, _Sharer] = {}  # by request
        self._idle_nodes: OrderedDict[PrefixNode, None] = OrderedDict()

    def enter(
        self, prefix: int, tokens: Sequence[int], pages: Sequence[int], window: HeldWindow, *, adapter: int
    ) -> None:
        """Registers a request's prompt, its ``pages`` (a list that the caller fills with page numbers later) and
        window; called again after a preemption. Only prompts with the same ``adapter`` share pages."""
        # a page that is not full is still written to, so it is not shared
        block_starts = range(0, len(tokens) - self.page_len + 1, self.page_len)
        blocks = [tuple(tokens[start : start + self.page_len]) for start in block_starts]
        root = self.roots.setdefault(adapter, PrefixNode((), -1, None))
        self._sharers[prefix] = _Sharer(root, blocks, pages, window)

    def leave(self, prefix: int) -> None:
        """Unpins the nodes of a request and forgets the request."""
        self.unpin(prefix)  # requests of a static batch leave while still pinned
        self._sharers.pop(prefix, None)

    def held(self, prefix: int) -> list[PrefixNode]:
        """Returns the nodes that a request pins, which are its leading pages; [] if the request is not known."""
        return self._sharers[prefix].nodes if prefix in self._sharers else []

    def num_shared(self, prefix: int) -> int:
        """Returns how many leading pages of a request are in the tree, even after it unpinned them."""
        return self._sharers[prefix].num_shared if prefix in self._sharers else 0

    @property
    def room(self) -> int:
        """Pages that can be taken: free pages and idle nodes of the tree."""
        return self.num_free + len(self._idle_nodes)

    def room_beside(self, prefix: int | None) -> int:
        """Returns `room` after pinning all tree pages of a prefix, with any that are on the host copied back."""
        return self.room - sum(not node.users for node in self._found(prefix))

    def take(self, num_pages: int) -> None:
        """Reserves pages, evicting the longest idle nodes if too few are free. The caller has checked `room`."""
        while self.num_free < num_pages:
            node, _ = self._idle_nodes.popitem(last=False)
            if self.windows:
                self.windows.forget(node)
            self.free.append(node.page)
            self.num_free += 1
            self._leaving[node], node.page = node.page, -1  # copied before the next step writes there
            self._on_host[node] = None
            if len(self._on_host) > self.num_on_host:
                oldest_node, _ = self._on_host.popitem(last=False)  # without room on the host this is the evicted node
                self._leaving.pop(oldest_node, None)
                if oldest_node.parent is not None:
                    del oldest_node.parent.children[oldest_node.tokens]
        self.num_free -= num_pages

    def drop_source(self, source: Hashable) -> list[int]:
        """Removes one user of a source and returns the pages that this frees: all of its pages after the last user."""
        page_numbers = super().drop_source(source)
        self.free += reversed(page_numbers)
        return page_numbers

    def kept(self, prefix: int | None) -> int:
        """Returns how many leading pages of a request's prompt are in the tree, on the devices or the host."""
        return sum(1 for _ in self._found(prefix))

    def usable(self, prefix: int | None, most: int) -> int:
        """Returns after how many of its leading pages in the tree, at most ``most``, a request can start prefill."""
        if not self.windows:
            return super().usable(prefix, most)
        return self.windows.usable([node.window for node, _ in zip(self._found(prefix), range(most), strict=False)])

    def num_known(self, tokens: Sequence[int], adapter: int) -> int:
        """Returns how many leading pages of a prompt are in the tree and usable by a new request."""
        self.enter(-1, tokens, (), HeldWindow(), adapter=adapter)
        num_usable = self.usable(-1, len(tokens))
        self.leave(-1)
        return num_usable

    def pin(self, prefix: int, num_pages: int) -> None:
        """Pins up to ``num_pages`` leading tree pages for a request; pages on the host get a device page in `moves`."""
        nodes = [node for node, _ in zip(self._found(prefix), range(num_pages), strict=False)]
        coming_nodes = [node for node in nodes if node.page < 0 and not node.users]
        for node in nodes:
            self._idle_nodes.pop(node, None)
            self._on_host.pop(node, None)
            node.users += 1
        self.take(len(coming_nodes))  # after all are pinned, so that none of them is evicted
        self._coming += coming_nodes
        self._sharers[prefix].nodes, self._sharers[prefix].num_shared = nodes, len(nodes)

    def unpin(self, prefix: int) -> None:
        """Unpins all nodes of a request; nodes without users become idle."""
        nodes = self.held(prefix)
        while nodes:
            node = nodes.pop()  # children first, so that the node evicted first is a leaf
            node.users -= 1
            if not node.users:
                self._idle_nodes[node] = None

    def keep(self, prefix: int, num_pages: int) -> None:
        """Adds the next ``num_pages`` pages of a request, which are computed, to the tree, pinned by the request."""
        sharer = self._sharers[prefix]
        for _ in range(num_pages):
            parent, page_index = sharer.nodes[-1] if sharer.nodes else sharer.root, len(sharer.nodes)
            node = PrefixNode(sharer.blocks[page_index], sharer.pages[page_index], parent)
            node.users = 1
            parent.children[node.tokens] = node
            sharer.nodes.append(node)
            if self.windows:
                self.windows.share(sharer.window, page_index, node)
        sharer.num_shared = len(sharer.nodes)

    def release(self, prefix: int, pages: Sequence[int], tokens: Sequence[int] = ()) -> None:
        """Frees a request's pages that are not in the tree; pages full of its cached ``tokens`` become idle nodes
        instead, while free pages remain. The scheduler has returned all of them to the pool's count."""
        sharer, nodes, own_pages = self._sharers.get(prefix), list[PrefixNode](), list(pages[self.num_shared(prefix) :])
        for page_index in range(min(len(pages), len(tokens) // self.page_len) if sharer else 0):
            block = tuple(tokens[page_index * self.page_len : (page_index + 1) * self.page_len])
            assert sharer is not None
            node = nodes[-1] if nodes else sharer.root
            child = node.children.get(block)
            if child is None and pages[page_index] in own_pages and self.num_free:
                own_pages.remove(pages[page_index])
                child = node.children[block] = PrefixNode(block, pages[page_index], node)
                self._idle_nodes[child] = None
                self.num_free -= 1
            if child is None or child.page < 0:  # no page on the devices has a parent on the host
                break
            nodes.append(child)
            if self.windows:
                self.windows.share(sharer.window, page_index, child)
        for child in reversed(nodes):
            if not child.users:
                self._idle_nodes.move_to_end(child)
        self.free += reversed(own_pages)

    def moves(self) -> tuple[dict[PrefixNode, int], dict[PrefixNode, int]]:
        """Returns node -> page to copy to the host, then node -> page to copy back from it, since the last call."""
        leaving_pages, self._leaving = self._leaving, {}
        for node in self._coming:
            node.page = self.free.pop()
        coming_pages, self._coming = {node: node.page for node in self._coming}, []
        self.num_came += len(coming_pages)
        return leaving_pages, coming_pages

    def _found(self, prefix: int | None) -> Iterator[PrefixNode]:
        """Yields the tree nodes of a request's prompt from the root on, up to the first page that is missing."""
        if prefix is None or prefix not in self._sharers:
            return
        node = self._sharers[prefix].root
        for block in self._sharers[prefix].blocks:
            child = node.children.get(block)
            if child is None:
                return
            yield child
            node = child


def tree_pages(*trees: PrefixTree) -> tuple[TreePage, ...]:
    """Returns the pages of all trees in depth-first order: parents first, each subtree before the next sibling."""
    pages, unvisited_nodes = list[TreePage](), list[tuple[int | None, PrefixNode]]()
    roots = [root for tree in reversed(trees) for root in tree.roots.values()]
    unvisited_nodes += [(None, child) for root in roots for child in reversed(root.children.values())]
    while unvisited_nodes:
        parent_index, node = unvisited_nodes.pop()
        pages.append(TreePage(parent=parent_index, tokens=node.tokens, page=node.page, users=node.users))
        unvisited_nodes += [(len(pages) - 1, child) for child in reversed(node.children.values())]
    return tuple(pages)
