"""The pages of an engine by number, and the tree of those that hold the beginnings of prompts.

A node is a page of the tokens after those of its parent. Requests that run hold nodes from the root on; nodes that
nobody holds stay until their room is needed, and the one that has been idle longest goes first. A node becomes idle
before its parent does, so that what goes is always a leaf. It may go to the host's memory first: its children are there
already or gone, and so a leaf is also what the host has had longest.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

import msgspec
import numpy as np

from meshwright.batching.pages import PagePool
from meshwright.serve.sequences.window_pages import HeldWindow, WindowPage, WindowPages


class PrefixNode:
    """A page of the tree: its tokens, its number (-1 on the host), its children by their tokens, how many requests hold
    it, what the host has of it, and its page of layers with a window if that is still there."""

    __slots__ = ("children", "copy", "page", "parent", "tokens", "users", "window")

    def __init__(self, tokens: tuple[int, ...], page: int, parent: "PrefixNode | None") -> None:
        self.tokens, self.page, self.parent = tokens, page, parent
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.users = 0
        self.copy: Sequence[np.ndarray] | None = None
        self.window: WindowPage | None = None


class TreePage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a prefix tree as plain data: the index of its parent (None: it begins prompts), its tokens, its number
    (-1: it is on the host), and how many requests hold it."""

    parent: int | None
    tokens: tuple[int, ...]
    page: int
    users: int


class CacheSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What every page of an engine's cache holds at a moment.

    ``requests``: number -> its pages in order, of which the first ones may be the tree's, and its ``lengths`` in
    positions that they hold. ``tree``: each page after its parent. All other pages are free.
    """

    num_pages: int
    page_len: int
    requests: dict[int, tuple[int, ...]]
    lengths: dict[int, int]
    tree: tuple[TreePage, ...]


class _Sharer(msgspec.Struct):
    """A request by its full pages: their tokens, the root that these follow, the numbers of all its pages, and those of
    windows; the nodes that it holds; and how many of its pages, the first ones, are the tree's, also when it holds them
    no more."""

    root: PrefixNode
    blocks: list[tuple[int, ...]]
    pages: Sequence[int]
    window: HeldWindow
    nodes: list[PrefixNode] = []
    num_shared: int = 0


class PrefixTree(PagePool):
    """A pool that numbers its pages. A prefix is the number of a request: `enter` says what its prompt is.

    ``free`` are the numbers of pages that nobody has, of those from ``first`` on. The scheduler takes pages by count,
    and the engine then pops as many numbers. The host has room for ``num_on_host`` more. A request begins behind pages
    of the tree whose ``windows`` are there too, if layers with a window have pages of their own.
    """

    def __init__(self, num_pages: int, page_len: int, num_on_host: int = 0, first: int = 0) -> None:
        super().__init__(num_pages)
        self.page_len, self.num_on_host = page_len, num_on_host
        self.windows: WindowPages | None = None
        self.num_came = 0  # pages that came back from the host
        self._leaving: dict[PrefixNode, int] = {}
        self._coming: list[PrefixNode] = []
        self._on_host: OrderedDict[PrefixNode, None] = OrderedDict()
        self.free = list(range(first, first + num_pages))[::-1]
        self.roots: dict[int, PrefixNode] = {}  # by adapter, whose keys and values are its own
        self._sharers: dict[int, _Sharer] = {}  # by request
        self._idle_nodes: OrderedDict[PrefixNode, None] = OrderedDict()

    def enter(
        self, prefix: int, tokens: Sequence[int], pages: Sequence[int], window: HeldWindow, *, adapter: int
    ) -> None:
        """Tells the tokens of a request's prompt, and what will have the numbers of its pages; after a preemption once
        more. Prompts share pages with those of the same ``adapter``."""
        # a page that is not full is still written to, so nobody shares it
        block_starts = range(0, len(tokens) - self.page_len + 1, self.page_len)
        blocks = [tuple(tokens[start : start + self.page_len]) for start in block_starts]
        root = self.roots.setdefault(adapter, PrefixNode((), -1, None))
        self._sharers[prefix] = _Sharer(root, blocks, pages, window)

    def leave(self, prefix: int) -> None:
        """Forgets a request, and lets go of what it holds."""
        self.unpin(prefix)  # a static batch ends after some of its requests
        self._sharers.pop(prefix, None)

    def held(self, prefix: int) -> list[PrefixNode]:
        """Returns the nodes that a request holds, of its first pages."""
        return self._sharers[prefix].nodes if prefix in self._sharers else []

    def num_shared(self, prefix: int) -> int:
        """Returns how many pages of a request, the first ones, are the tree's, also when it holds them no more."""
        return self._sharers[prefix].num_shared if prefix in self._sharers else 0

    @property
    def room(self) -> int:
        """Pages that can be taken: free ones and idle ones of the tree."""
        return self.num_free + len(self._idle_nodes)

    def room_beside(self, prefix: int | None) -> int:
        """Returns the pages that can be taken while what the tree has of a prefix is in use, and on the devices."""
        return self.room - sum(not node.users for node in self._found(prefix))

    def take(self, num_pages: int) -> None:
        """Takes pages, from idle nodes if need be. The caller has checked `room`."""
        while self.num_free < num_pages:
            node, _ = self._idle_nodes.popitem(last=False)
            if self.windows:
                self.windows.forget(node)
            self.free.append(node.page)
            self.num_free += 1
            self._leaving[node], node.page = node.page, -1  # copied before the next step writes there
            self._on_host[node] = None
            if len(self._on_host) > self.num_on_host:
                oldest_node, _ = self._on_host.popitem(last=False)  # without room on the host this is the node itself
                self._leaving.pop(oldest_node, None)
                if oldest_node.parent is not None:
                    del oldest_node.parent.children[oldest_node.tokens]
        self.num_free -= num_pages

    def drop_source(self, source: Hashable) -> list[int]:
        """Counts one user less of a source; the numbers of its pages are free after the last one."""
        page_numbers = super().drop_source(source)
        self.free += reversed(page_numbers)
        return page_numbers

    def kept(self, prefix: int | None) -> int:
        """Returns how many pages of a request's prompt the tree has."""
        return sum(1 for _ in self._found(prefix))

    def usable(self, prefix: int | None, most: int) -> int:
        """Returns with how many of its first pages that the tree has, at most ``most``, a request can begin."""
        if not self.windows:
            return super().usable(prefix, most)
        return self.windows.usable([node.window for node, _ in zip(self._found(prefix), range(most), strict=False)])

    def num_known(self, tokens: Sequence[int], adapter: int) -> int:
        """Returns how many pages of a prompt the tree has, whether or not it is a request's."""
        self.enter(-1, tokens, (), HeldWindow(), adapter=adapter)
        num_usable = self.usable(-1, len(tokens))
        self.leave(-1)
        return num_usable

    def pin(self, prefix: int, num_pages: int) -> None:
        """Lets a request hold the first pages of its prompt that the tree has, on the devices."""
        nodes = [node for node, _ in zip(self._found(prefix), range(num_pages), strict=False)]
        coming_nodes = [node for node in nodes if node.page < 0 and not node.users]
        for node in nodes:
            self._idle_nodes.pop(node, None)
            self._on_host.pop(node, None)
            node.users += 1
        self.take(len(coming_nodes))  # after all are held, so that none of them goes to make room
        self._coming += coming_nodes
        self._sharers[prefix].nodes, self._sharers[prefix].num_shared = nodes, len(nodes)

    def unpin(self, prefix: int) -> None:
        """Lets go of all that a request holds."""
        nodes = self.held(prefix)
        while nodes:
            node = nodes.pop()  # children first, so that what goes is a leaf
            node.users -= 1
            if not node.users:
                self._idle_nodes[node] = None

    def keep(self, prefix: int, num_pages: int) -> None:
        """Makes nodes of the next pages of a request, which are computed; the request holds them."""
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
        """Frees the pages of a request beyond those that the tree has; full ones of ``tokens`` become idle nodes, as
        many as are not taken again yet. The scheduler has given all of them back."""
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
            if child is None or child.page < 0:  # below a page on the host none is on the devices
                break
            nodes.append(child)
            if self.windows:
                self.windows.share(sharer.window, page_index, child)
        for child in reversed(nodes):
            if not child.users:
                self._idle_nodes.move_to_end(child)
        self.free += reversed(own_pages)

    def moves(self) -> tuple[dict[PrefixNode, int], dict[PrefixNode, int]]:
        """Returns the pages, by node, to copy to the host and, after that, from there, before others are written."""
        leaving_pages, self._leaving = self._leaving, {}
        for node in self._coming:
            node.page = self.free.pop()
        coming_pages, self._coming = {node: node.page for node in self._coming}, []
        self.num_came += len(coming_pages)
        return leaving_pages, coming_pages

    def _found(self, prefix: int | None) -> Iterator[PrefixNode]:
        """Yields the nodes of a request's prompt that the tree has, from the root on."""
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
    """Returns the pages of trees, each after its parent and before its next sibling."""
    pages, unvisited_nodes = list[TreePage](), list[tuple[int | None, PrefixNode]]()
    roots = [root for tree in reversed(trees) for root in tree.roots.values()]
    unvisited_nodes += [(None, child) for root in roots for child in reversed(root.children.values())]
    while unvisited_nodes:
        parent_index, node = unvisited_nodes.pop()
        pages.append(TreePage(parent=parent_index, tokens=node.tokens, page=node.page, users=node.users))
        unvisited_nodes += [(len(pages) - 1, child) for child in reversed(node.children.values())]
    return tuple(pages)
