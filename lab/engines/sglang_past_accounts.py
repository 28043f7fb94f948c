"""`PastAccounts`: who holds each page and row of an old SGLang, counted beside SGLang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lab.engines.accounts import Accounts
from lab.engines.content import Text
from lab.engines.device import LateDevice
from lab.engines.laws import CachedEntry, EngineView, Extent
from lab.engines.sglang_pages import PageAccounts


def slots_of(tree: Any) -> dict[str, Any]:
    """Return the records of sessions, by their names."""
    slots: dict[str, Any] = getattr(getattr(tree, "session", tree), "slots", {})
    return slots


def held_by(holder: Any, name: str) -> Any:
    """Return a length or the row of a request or of a session; since 0.5.16 its `kv` has some."""
    kv = getattr(holder, "kv", None)
    return getattr(kv if hasattr(kv, name) else holder, name, None)


def part_of(node: Any, at: int) -> Any:
    """Return what a node of a tree of components has of one: 0 are all slots, 1 the window's."""
    return node.component_data[at]


def is_unified(node: Any) -> bool:
    """Whether a node is of a tree of components, which is the only one since 0.5.19."""
    return hasattr(node, "component_data")


def _components(tree: Any) -> list[Any]:
    """The parts of a tree of components; none of another tree."""
    parts = getattr(getattr(tree, "inner", tree), "components", ())
    return list(parts.values()) if isinstance(parts, dict) else list(parts)


class PastAccounts:
    """Accounts of the pages of each pool, and of the rows, of one scheduler."""

    def __init__(
        self, loop: Any, salt: Callable[[str], int], note: Callable[[Text, list[int]], str]
    ) -> None:
        """`salt` is of the name of an adapter, `note` of positions of a text with other KV."""
        self.loop, self.salt, self.note = loop, salt, note
        self.device = LateDevice()
        self.page_size = loop.page_size
        allocator = loop.token_to_kv_pool_allocator
        self.window = getattr(allocator, "swa_attn_allocator", None)
        full = getattr(allocator, "full_attn_allocator", allocator)
        self.pools = {"pages": PageAccounts(self.device, full, self.page_size)}
        if self.window is not None:
            self.pools["window"] = PageAccounts(self.device, self.window, self.page_size)
        for part in _components(loop.tree_cache):
            if hasattr(part, "_free_full"):  # 0.5.16 took the call before it was wrapped
                part._free_full = full.free
        free = loop.req_to_token_pool.free_slots  # without row 0 since 0.5.13
        sinks = {*range(max(free) + 1)} - {*free}
        self.rows = Accounts(self.device, max(free) + 1, sinks)
        self.texts: dict[tuple[int, int], Text] = {}  # by node and tokens up to its end

    def views(self, requests: Iterable[Any]) -> dict[str, EngineView]:
        """Return the pools as the laws see them; `requests` are all that ever came."""
        requests, pool = list(requests), self.loop.req_to_token_pool
        holdings: dict[str, dict[str, list[list[int]]]] = {name: {} for name in self.pools}
        taken: dict[str, list[list[int]]] = {}
        extents = {}
        free = list(pool.free_slots)
        self.rows.holders = Counter(self.rows.blocks - set(free))
        counts_lengths = all(
            hasattr(req, "kv_allocated_len") or hasattr(req, "kv") for req in requests[:1]
        )
        if not counts_lengths:  # a request of an old release names its row when it has none
            taken = {f"row {row}": [[row]] for row in self.rows.held()}
        for name, holder in self._holders(requests).items() if counts_lengths else ():
            at = held_by(holder, "req_pool_idx")
            taken[name] = [[at]]
            row = pool.req_to_token[at]
            begin, end = held_by(holder, "cache_protected_len"), held_by(holder, "kv_allocated_len")
            self._name(holdings, name, row[begin:end])
            extents[name] = Extent(begin, held_by(holder, "kv_committed_len"), end, len(row))
        entries = []
        locked = {}
        for name, node, text, end in self._nodes():
            if is_unified(node):
                value, locks = part_of(node, 0).value, part_of(node, 0).lock_ref
                is_tombstone = part_of(node, 1).value is None
            else:
                value, locks = node.value, getattr(node, "lock_ref", None)
                locks = getattr(node, "full_lock_ref", 0) if locks is None else locks
                is_tombstone = bool(getattr(node, "swa_tombstone", False))
            self._name(holdings, name, value, is_tombstone)
            entries += list(self._entries(name, value, text, end))
            locked[name] = (locks, locks)  # who lives is not told by old releases
        views = {}
        for name, pages in self.pools.items():
            if not counts_lengths:  # old releases keep no lengths
                holdings[name] = {f"page {page}": [[page]] for page in pages.accounts.held()}
            views[name] = EngineView(
                pages.accounts,
                pages.free_pages(),
                pages.allocator.available_size() // self.page_size,
                holdings[name],
                {},
                {},
                entries=entries if name == "pages" else None,
                extents=extents if name == "pages" else {},
                locks=locked if name == "pages" else {},
            )
        views["rows"] = EngineView(self.rows, free, pool.available_size(), taken, {}, {})
        return views

    def _name(
        self,
        holdings: dict[str, dict[str, list[list[int]]]],
        name: str,
        slots: Any,
        is_tombstone: bool = False,
    ) -> None:
        holdings["pages"][name] = [self.pools["pages"].pages_of(slots)]
        if self.window is not None and not is_tombstone:
            mapping = self.loop.token_to_kv_pool_allocator.full_to_swa_index_mapping
            mapped = mapping[slots.long()]
            holdings["window"][name] = [self.pools["window"].pages_of(mapped[mapped > 0])]

    def _holders(self, requests: Iterable[Any]) -> dict[str, Any]:
        """What holds a row, each row once: a turn borrows the one of its session."""
        slots = slots_of(self.loop.tree_cache)
        named = {f"session {name}": slot for name, slot in slots.items()}
        named |= {f"request {req.rid}": req for req in requests}
        rows = {name: held_by(holder, "req_pool_idx") for name, holder in named.items()}
        held = {row: (name, named[name]) for name, row in rows.items() if row is not None}
        return dict(held.values())

    def _nodes(self) -> Iterator[tuple[str, Any, Text, int]]:
        """Each node of the tree with KV: its text, and how many of its tokens end at the node."""
        tree = getattr(self.loop.tree_cache, "inner", self.loop.tree_cache)
        if not hasattr(tree, "root_node"):
            return
        waiting: list[tuple[Any, list[int]]] = [
            (node, []) for node in tree.root_node.children.values()
        ]
        while waiting:
            node, before = waiting.pop()
            key = node.key
            raw = list(getattr(key, "token_ids", key))
            end = len(before) + len(key)  # a key of pairs has one token more
            if raw and isinstance(raw[0], tuple):  # pairs, for EAGLE
                raw = [pair[0] for pair in raw] + [raw[-1][1]]
            whole = before + raw
            text = self.texts.get((node.id, end))
            if text is None or text.tokens[: len(whole)] != whole:
                text = Text(whole, self.salt(getattr(key, "extra_key", None) or ""))
                self.texts[node.id, end] = text
            if (part_of(node, 0) if is_unified(node) else node).value is not None:
                yield f"node {node.id}", node, text, end
            waiting += [(child, whole[:end]) for child in node.children.values()]

    def _entries(self, name: str, value: Any, text: Text, end: int) -> Iterator[CachedEntry]:
        slots, begin = value.numpy(), end - len(value)
        simulated = self.loop.simulated
        pairs = [("target", simulated.target, text.keys(begin, end))]
        if self.loop.settings["shape"] is not None:
            # A key of pairs names the token behind its end too, another one does not.
            known = len(text.tokens) > end
            last = end if known else end - 1
            pairs.append(("draft", simulated.draft, text.draft_keys(begin, last)))
        for model, memory, keys in pairs:
            held = memory.held[slots[: len(keys)]]
            wrong = (held != keys).nonzero()[0].tolist()
            at = wrong[0] if wrong else 0
            where = f"{name}, tokens {begin} to {end} ({model} KV at {begin + at})"
            note = self.note(text, [begin + position for position in wrong]) if wrong else ""
            yield CachedEntry(where, int(slots[at]) // self.page_size, held, keys, note)
