"""`SglangAccounts`: who holds each page and each row of SGLang's pools, counted beside SGLang.

Its allocators are wrapped, so neither its free lists nor its checker are trusted. Between two turns
the accounts are compared with what names a page: the records of requests and sessions, and the
nodes of the tree, of which each must hold the KV that its key says and the locks of those who live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from lab.engines.accounts import Accounts
from lab.engines.content import Keys, Text
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
        full = getattr(allocator, "full_attn_allocator", allocator)
        self.pages = PageAccounts(self.device, full, self.page_size)
        self.window: PageAccounts | None = None
        if full is not allocator:
            self.window = PageAccounts(self.device, allocator.swa_attn_allocator, self.page_size)
        self.states: Accounts | None = None
        if hasattr(loop.req_to_token_pool, "mamba_allocator"):
            self.states = Accounts(self.device, loop.req_to_token_pool.mamba_pool.size + 1)
            self._wrap_states(loop.req_to_token_pool.mamba_allocator)
        self.rows = Accounts(self.device, loop.setup.num_rows + 1)
        self.text_kind: type[Text] = getattr(loop, "text_kind", Text)
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

    def _wrap_states(self, allocator: Any) -> None:
        states: Any = self.states
        take, give_back, clear = allocator._do_alloc, allocator.free, allocator.clear

        def alloc(need_size: int) -> Any:
            taken = take(need_size)
            states.take([] if taken is None else taken.tolist())
            return taken

        def free(slots: Any) -> None:
            states.give_back(slots.tolist())
            give_back(slots)

        def cleared() -> None:
            states.holders.clear()
            clear()

        allocator._do_alloc, allocator.free, allocator.clear = alloc, free, cleared

    # What the laws look at.

    def views(self, requests: Iterable[Any]) -> dict[str, EngineView]:
        """Return the pools as the laws see them; `requests` are all that ever came."""
        pool, requests = self.loop.req_to_token_pool, list(requests)
        own: dict[str, list[list[int]]] = {}
        window: dict[str, list[list[int]]] = {}
        taken: dict[str, list[list[int]]] = {}
        extents = {}
        for name, kv in self._records(requests).items():
            row = pool.req_to_token[kv.req_pool_idx]
            slots = row[kv.cache_protected_len : kv.kv_allocated_len]
            own[name] = [self.pages.pages_of(slots)]
            if self.window is not None:
                window[name] = [self.window.pages_of(self._mapped(slots))]
            taken[name] = [[kv.req_pool_idx]]
            extents[name] = Extent(
                kv.cache_protected_len, kv.kv_committed_len, kv.kv_allocated_len, len(row)
            )
        entries = []
        states = self._own_states(requests)
        for name, node, text, end in self._nodes():
            value = node.component_data[ComponentType.FULL].value
            own[name] = [self.pages.pages_of(value)]
            entries += list(self._entries(name, value, text, end))
            value = self._value(node, "SWA")
            if self.window is not None and value is not None:
                window[name] = [self.window.pages_of(value)]
                entries += list(self._window_entries(name, value, text, end))
            value = self._value(node, "MAMBA")
            if value is not None:
                states[name] = [value.tolist()]
                entries.append(self._state_entry(name, int(value), text, end))
        pages = self._view(self.pages, own)
        pages.entries, pages.extents, pages.locks = entries, extents, self._locks(requests)
        views = {"pages": pages}
        if self.window is not None:
            views["window"] = self._view(self.window, window)
        if self.states is not None:
            free = pool.mamba_allocator.free_slots.tolist()
            num_free = pool.mamba_allocator.available_size()
            views["states"] = EngineView(self.states, free, num_free, states, {}, {})
        views["rows"] = EngineView(
            self.rows, list(pool.free_slots), pool.available_size(), taken, {}, {}
        )
        return views

    def _view(self, pages: PageAccounts, named: dict[str, list[list[int]]]) -> EngineView:
        """A pool of pages, and who names them."""
        num_free = pages.allocator.available_size() // self.page_size
        return EngineView(pages.accounts, pages.free_pages(), num_free, named, {}, {})

    def _own_states(self, requests: Iterable[Any]) -> dict[str, list[list[int]]]:
        """The slots of states of who lives, each record once; some have no row.

        A request that has given its state to the tree still names it.
        """
        slots = self.loop.tree_cache.session.slots.items()
        named = {f"session {name}": slot.kv for name, slot in slots}
        living = [req for req in requests if req.kv.holds_kv or not req.finished()]
        named |= {f"request {req.rid}": req.kv for req in living}
        states = {}
        for name, kv in {id(kv): (name, kv) for name, kv in reversed(named.items())}.values():
            held = [int(kv.mamba_pool_idx)] if kv.mamba_pool_idx is not None else []
            if kv.mamba_ping_pong_track_buffer is not None:
                held += [slot for slot in kv.mamba_ping_pong_track_buffer.tolist() if slot >= 0]
            states[name] = [held]
        return states

    def _state_entry(self, name: str, slot: int, text: Text, end: int) -> CachedEntry:
        """What a node's state has consumed, and what its key promises."""
        keys = self.loop.req_to_token_pool.mamba_pool.mamba_cache.temporal.reshape(-1)
        held, promised = keys[slot : slot + 1].numpy().copy(), np.array([text.state_key(end)])
        name, note = f"{name}, the state behind {end} tokens", self.loop.state_steps.note(slot)
        return CachedEntry(name, slot, held, promised, note)

    def _mapped(self, slots: Any) -> Any:
        """The window's slots of those that have one."""
        mapped = self.loop.token_to_kv_pool_allocator.full_to_swa_index_mapping[slots.long()]
        return mapped[mapped > 0]

    def _value(self, node: Any, kind: str) -> Any:
        """What a node has of another kind of layers than full attention."""
        kinds = self.loop.tree_cache.tree_components
        return next((node.component_data[of].value for of in kinds if of.name == kind), None)

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
                text = self.text_kind(whole, self.salt(key.extra_key or ""))
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
            yield self._entry(name, model, memory, slots, keys, text, begin)

    def _window_entries(self, name: str, value: Any, text: Text, end: int) -> Iterator[CachedEntry]:
        slots, begin = value.numpy(), end - len(value)
        keys, memory = text.keys(begin, end), self.loop.simulated.window
        yield self._entry(name, "window", memory, slots, keys, text, begin)

    def _entry(
        self, name: str, model: str, memory: Any, slots: Any, keys: Keys, text: Text, begin: int
    ) -> CachedEntry:
        """What a node's slots hold, and what its key promises of positions from `begin` on."""
        held = memory.held[slots]
        wrong = (held != keys).nonzero()[0].tolist()
        at = wrong[0] if wrong else 0
        where = f"{name}, tokens {begin} to {begin + len(slots)} ({model} KV at {begin + at})"
        note = self.note(text, [begin + position for position in wrong]) if wrong else ""
        return CachedEntry(where, int(slots[at]) // self.page_size, held, keys, note)

    def _locks(self, requests: Iterable[Any]) -> dict[str, tuple[int, int]]:
        """For each node and kind of layers, the locks that it counts, and those of who lives."""
        tree = self.loop.tree_cache
        living: Counter[tuple[int, Any]] = Counter()
        slots = tree.session.slots.values()
        for lock in [owner.lock for owner in (*requests, *slots) if owner.lock is not None]:
            for kind in tree.tree_components:
                living.update((node.id, kind) for node in self._locked(lock, kind))
        return {
            name if kind is ComponentType.FULL else f"{name} ({kind.name})": (
                node.component_data[kind].lock_ref,
                living[node.id, kind],
            )
            for name, node, _, _ in self._nodes()
            for kind in tree.tree_components
        }

    def _locked(self, lock: Any, kind: Any) -> Iterator[Any]:
        """The nodes that a lock holds for a kind of layers.

        The whole path is locked for full attention, its end down to the node that is marked for a
        window, and the end alone for states.
        """
        tree = self.loop.tree_cache
        if kind in lock.receipt.skipped_lock_components:
            return
        if kind is not ComponentType.FULL and lock.swa_released:
            return
        node, root = tree.resolve_node_handle(lock.node), tree.tree_core.root_node
        mark = lock.receipt.component_lock_uuids.get(kind)
        while node is not root and node is not None:
            yield node
            if kind.name == "MAMBA":
                return
            if mark is not None and node.component_data[kind].metadata.get("uuid") == mark:
                return
            node = node.parent
