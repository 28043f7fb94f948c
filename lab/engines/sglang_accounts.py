"""`SglangAccounts`: who holds each page and each row of SGLang's pools, counted beside SGLang.

Its allocators are wrapped, so neither its free lists nor its checker are trusted. Between two turns
the accounts are compared with what names a page: the records of requests and sessions, and the
nodes of the tree, of which each must hold the KV that its key says and the locks of those who live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from lab.engines.accounts import Accounts
from lab.engines.content import Text
from lab.engines.device import LateDevice
from lab.engines.laws import CachedEntry, EngineView, Extent
from lab.engines.sglang_pages import PageAccounts


class SglangAccounts:
    """Accounts of the pages and of the rows of one scheduler."""

    def __init__(
        self, loop: Any, salt: Callable[[str], int], note: Callable[[Text, list[int]], str]
    ) -> None:
        """`salt` is of the name of an adapter, `note` of positions of a text with other KV."""
        self.loop, self.salt, self.note = loop, salt, note
        self.device = LateDevice()
        self.page_size = loop.page_size
        allocator = loop.token_to_kv_pool_allocator
        self.pages = PageAccounts(self.device, allocator, self.page_size)
        self.rows = Accounts(self.device, loop.setup.num_rows + 1)
        self.texts: dict[tuple[int, int], Text] = {}  # by node and tokens up to its end
        self._wrap_rows(loop.req_to_token_pool)

    def _wrap_rows(self, pool: Any) -> None:
        take, give_back, clear = pool.alloc_rows, pool.free_rows, pool.clear

        def alloc_rows(need_size: int) -> Any:
            taken = take(need_size)
            self.rows.take(taken or ())
            return taken

        def free_rows(indices: list[int]) -> None:
            self.rows.give_back(indices)
            give_back(indices)

        def cleared() -> None:
            self.rows.holders.clear()
            clear()

        pool.alloc_rows, pool.free_rows, pool.clear = alloc_rows, free_rows, cleared

    # What the laws look at.

    def views(self, requests: Iterable[Any]) -> dict[str, EngineView]:
        """Return the pools as the laws see them; `requests` are all that ever came."""
        loop = self.loop
        allocator, pool = loop.token_to_kv_pool_allocator, loop.req_to_token_pool
        requests = list(requests)
        records = self._records(requests)
        own: dict[str, list[list[int]]] = {}
        taken: dict[str, list[list[int]]] = {}
        extents = {}
        for name, kv in records.items():
            row = pool.req_to_token[kv.req_pool_idx]
            slots = row[kv.cache_protected_len : kv.kv_allocated_len]
            own[name] = [self.pages.pages_of(slots)]
            taken[name] = [[kv.req_pool_idx]]
            extents[name] = Extent(
                kv.cache_protected_len, kv.kv_committed_len, kv.kv_allocated_len, len(row)
            )
        entries = []
        for name, node, text, end in self._nodes():
            value = node.component_data[ComponentType.FULL].value
            own[name] = [self.pages.pages_of(value)]
            entries += list(self._entries(name, value, text, end))
        num_free = allocator.available_size() // self.page_size
        pages = EngineView(
            self.pages.accounts,
            self.pages.free_pages(),
            num_free,
            own,
            {},
            {},
            entries=entries,
            extents=extents,
            locks=self._locks(requests),
        )
        rows = EngineView(self.rows, list(pool.free_slots), pool.available_size(), taken, {}, {})
        return {"pages": pages, "rows": rows}

    def _records(self, requests: Iterable[Any]) -> dict[str, Any]:
        """The records that hold a row, each once: a turn borrows the one of its session."""
        slots = self.loop.tree_cache.session.slots.items()
        named = {f"session {name}": slot.kv for name, slot in slots}
        named |= {f"request {req.rid}": req.kv for req in requests}
        found = {id(kv): (name, kv) for name, kv in reversed(named.items()) if kv.holds_kv}
        return dict(found.values())

    def _nodes(self) -> Iterator[tuple[str, Any, Text, int]]:
        """Each node of the tree with KV: its text, and how many of its tokens end at the node."""
        root = self.loop.tree_cache.tree_core.root_node
        waiting: list[tuple[Any, list[int]]] = [(node, []) for node in root.children.values()]
        while waiting:
            node, before = waiting.pop()
            key = node.key
            end = len(before) + len(key)
            raw = list(key.raw_token_ids())
            whole = before + raw
            text = self.texts.get((node.id, end))
            if text is None or text.tokens[: len(whole)] != whole:
                text = Text(whole, self.salt(key.extra_key or ""))
                self.texts[node.id, end] = text
            if node.component_data[ComponentType.FULL].value is not None:
                yield f"node {node.id}", node, text, end
            waiting += [(child, whole[:end]) for child in node.children.values()]

    def _entries(self, name: str, value: Any, text: Text, end: int) -> Iterator[CachedEntry]:
        slots, begin = value.numpy(), end - len(value)
        simulated = self.loop.simulated
        pairs = [("target", simulated.target, text.keys(begin, end))]
        if self.loop.setup.shape is not None:  # a key of pairs names the token behind its end too
            pairs.append(("draft", simulated.draft, text.draft_keys(begin, end)))
        for model, memory, keys in pairs:
            held = memory.held[slots]
            wrong = (held != keys).nonzero()[0].tolist()
            at = wrong[0] if wrong else 0
            where = f"{name}, tokens {begin} to {end} ({model} KV at {begin + at})"
            note = self.note(text, [begin + position for position in wrong]) if wrong else ""
            yield CachedEntry(where, int(slots[at]) // self.page_size, held, keys, note)

    def _locks(self, requests: Iterable[Any]) -> dict[str, tuple[int, int]]:
        """For each node, the locks that it counts, and the locks of those who live."""
        tree = self.loop.tree_cache
        root = tree.tree_core.root_node
        living: Counter[int] = Counter()
        slots = tree.session.slots.values()
        for lock in [owner.lock for owner in (*requests, *slots) if owner.lock is not None]:
            node = tree.resolve_node_handle(lock.node)
            while node is not root and node is not None:
                living[node.id] += 1
                node = node.parent
        counted = {}
        for name, node, _, _ in self._nodes():
            counted[name] = (node.component_data[ComponentType.FULL].lock_ref, living[node.id])
        return counted
