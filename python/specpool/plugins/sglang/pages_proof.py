"""What proves level `pages`: operations on SGLang's allocators of KV slots, on a CPU.

Which page is given next is the pool's own affair: ours has another order than SGLang's with
`need_sort`. So pages are named in the order in which they are handed out, and a slot is a page's
name and its offset. SGLang's kernels compute slots on a GPU for both allocators alike; here plain
loops take their place.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import paged, token

from specpool.plugins import proof
from specpool.plugins.proof import Operation, Operations
from specpool.plugins.sglang import allocator as plugin

# Not names of this module that SGLang's loader would rebind.
_OWN = {"paged": paged.PagedTokenToKVPoolAllocator, "token": token.TokenToKVPoolAllocator}
#: What ours keeps in another way than SGLang's lists.
REPLACED = frozenset(
    """free_pages release_pages staged_pages num_staged_pages free_group is_not_in_free_group
    free_page_ids_group _release_page_ids num_pages""".split()
)
EPISODES = 24

#: A page's name and an offset in it.
Slot = tuple[int, int]


class TriedPagedAllocator(plugin.SpecpoolPagedAllocator):
    """Ours with wrong frees that raise."""

    is_tried = True


class TriedTokenAllocator(plugin.SpecpoolTokenAllocator):
    """The same of pages of one token."""

    is_tried = True


_OURS = {"paged": TriedPagedAllocator, "token": TriedTokenAllocator}


def difference() -> str | None:
    """Return the first thing in which ours differs from SGLang's allocators; None if nothing.

    It takes less than `proof.SECONDS` of CPU.
    """
    functions = set()
    for kind, cls in _OWN.items():
        if (line := proof.unlike_method(cls, _OURS[kind])) is not None:
            return line
        functions |= {
            function
            for name in dir(cls)
            if inspect.isfunction(function := inspect.getattr_static(cls, name))
            and "debug" not in name  # run in its debug mode only
        }
    with loops_for_kernels():
        return proof.difference(_cases(), functions, REPLACED, episodes=EPISODES)


def longer_difference(times: int = 10) -> str | None:
    """Return the same of other seeds, that many times as long; for tests of the proof itself."""
    with loops_for_kernels():
        return proof.first_difference(
            _cases(), episodes=times * EPISODES, seed=EPISODES, seconds=1e9
        )


def _cases() -> list[proof.Case]:
    return [AllocatorCase("paged"), AllocatorCase("token")]


class AllocatorSide:
    """An allocator, and the names of the pages that it handed out."""

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.page_size: int = allocator.page_size
        self.names: dict[int, int] = {}
        self.pages: dict[int, int] = {}
        self.num_names = 0
        self.saved: Any = None

    def _named(self, slots: torch.Tensor | None) -> list[Slot] | None:
        """Return new slots by name; a page is new if its first slot is among them."""
        if slots is None:
            return None
        assert slots.dtype == torch.int64
        result = []
        for slot in slots.tolist():
            page, offset = divmod(slot, self.page_size)
            if offset == 0:
                assert page not in self.names, f"page {page} is handed out twice"
                assert page > 0, "the padding page is handed out"
                self.num_names += 1
                self.names[page], self.pages[self.num_names] = self.num_names, page
            result.append((self.names[page], offset))
        return result

    def _slots(self, slots: Sequence[Slot]) -> torch.Tensor:
        numbers = [self.pages[name] * self.page_size + offset for name, offset in slots]
        return torch.tensor(numbers, dtype=torch.int64)

    def _forget(self, slots: Sequence[Slot]) -> None:
        for name in {name for name, _ in slots}:
            del self.names[self.pages.pop(name)]

    def alloc(self, need_size: int) -> Any:
        return self._named(self.allocator.alloc(need_size))

    def alloc_extend(self, rows: Sequence[tuple[int, Slot | None]], ends: Sequence[int]) -> Any:
        """Grow rows, each of a length and with a last slot, to `ends` tokens."""
        prefix, last = self._lens(rows)
        end = torch.tensor(ends, dtype=torch.int64)
        count = int((end - prefix).sum())
        return self._named(self.allocator.alloc_extend(prefix, prefix, end, end, last, count))

    def alloc_decode(self, rows: Sequence[tuple[int, Slot | None]]) -> Any:
        prefix, last = self._lens(rows)
        return self._named(self.allocator.alloc_decode(prefix + 1, prefix + 1, last))

    def _lens(self, rows: Sequence[tuple[int, Slot | None]]) -> tuple[torch.Tensor, torch.Tensor]:
        last = [-1 if slot is None else int(self._slots([slot])) for _, slot in rows]
        lens = [length for length, _ in rows]
        return torch.tensor(lens, dtype=torch.int64), torch.tensor(last, dtype=torch.int64)

    def free(self, slots: Sequence[Slot]) -> None:
        self._free(slots, lambda index: self.allocator.free(index))

    def free_full(self, slots: Sequence[Slot]) -> None:
        self._free(slots, lambda index: self.allocator.free_full(index))

    def free_segment(self, slots: Sequence[Slot], start: int) -> None:
        self._free(slots, lambda index: self.allocator.free_segment(index, start_pos=start))

    def free_full_segment(self, slots: Sequence[Slot], start: int) -> None:
        self._free(slots, lambda index: self.allocator.free_full_segment(index, start_pos=start))

    def free_segments(self, slots: Sequence[Slot], cut: int) -> None:
        self._free(
            slots,
            lambda index: self.allocator.free_segments([(index[:cut], 0), (index[cut:], cut)]),
        )

    def free_page_ids(self, names: Sequence[int]) -> None:
        self._free(
            [(name, 0) for name in names],
            lambda index: self.allocator.free_page_ids(index // self.page_size),
        )

    def _free(self, slots: Sequence[Slot], call: Any) -> None:
        index = self._slots(slots)
        call(index)
        self._forget(slots)
        if hasattr(self.allocator, "_copy_for_free_group"):
            index.fill_(0)  # the caller's; before SGLang 0.5.18 it must not change it

    def free_group_begin(self) -> None:
        self.allocator.free_group_begin()

    def free_group_end(self) -> None:
        self.allocator.free_group_end()

    def merge_and_sort_free(self) -> None:
        self.allocator.merge_and_sort_free()

    def backup(self) -> None:
        self.saved = self.allocator.backup_state(), dict(self.names), dict(self.pages)

    def restore(self) -> None:
        state, self.names, self.pages = self.saved
        self.allocator.restore_state(state)

    def clear(self) -> None:
        self.allocator.clear()
        self.names, self.pages = {}, {}

    def resize(self, num_tokens: int) -> None:
        self.allocator.resize(SimpleNamespace(max_total_num_tokens=num_tokens))
        assert self.allocator.size == num_tokens, f"the allocator has {self.allocator.size} tokens"
        self.names, self.pages = {}, {}

    def copy(self, slots: Sequence[Slot], named: dict[str, Any]) -> Any:
        index = self._slots(slots)
        down = self.allocator.get_cpu_copy(index, **named)
        return down[1], self.allocator.load_cpu_copy(down, index, **named)[2]

    def state(self) -> dict[str, Any]:
        allocator = self.allocator
        assert allocator.get_kvcache() is KV
        if hasattr(allocator, "get_all_free_pages"):
            free = allocator.get_all_free_pages()
        else:
            free = torch.cat((allocator.free_pages, allocator.release_pages))
        free_list = sorted(free.tolist())
        held = [] if _is_open(allocator) else sorted(self.names)
        num_pages = allocator.size // self.page_size
        return {
            "the free tokens": allocator.available_size(),
            "the number of free pages": len(free_list),
            "a page that is neither free nor held, or both": (
                [] if _is_open(allocator) else _odd_ones(free_list + held, num_pages)
            ),
            "the settings": (
                (allocator.size, allocator.size_full, allocator.page_size),
                (allocator.dtype, allocator.device, allocator.need_sort),
            ),
        }


def _is_open(allocator: Any) -> bool:
    if hasattr(allocator, "is_not_in_free_group"):
        return not allocator.is_not_in_free_group
    return allocator.free_group is not None


def _odd_ones(pages: list[int], num_pages: int) -> list[int]:
    return [page for page in range(num_pages + 1) if pages.count(page) != (page > 0)]


def _copied(kind: str) -> Any:
    def copy(*indices: Any, **named: Any) -> Any:
        return kind, sorted(item for item in named.items() if item[1] is not None), len(indices)

    return copy


#: Stands for the KV itself.
KV = SimpleNamespace(get_cpu_copy=_copied("down"), load_cpu_copy=_copied("up"))


class AllocatorCase:
    """Rows that are prefilled, decoded, cut and freed, alone or in groups of frees."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.name = _OWN[kind].__name__

    def sides(self, rng: random.Random) -> tuple[AllocatorSide, AllocatorSide]:
        self.page_size = rng.choice([2, 3, 16]) if self.kind == "paged" else 1
        self.num_pages = rng.randint(3, 12)
        size = self.num_pages * self.page_size
        lens = (size, self.page_size) if self.kind == "paged" else (size,)
        arguments = *lens, torch.float16, "cpu", KV, rng.random() < 0.5
        allocator = _OWN[self.kind](*arguments)
        if hasattr(allocator, "use_triton_kernels"):
            allocator.use_triton_kernels = rng.random() < 0.5
        return AllocatorSide(allocator), AllocatorSide(_OURS[self.kind](*arguments))

    def operations(self, rng: random.Random) -> Operations:
        rows: list[list[Slot]] = []
        for _ in range(40):
            yield from rng.choice([self._grow, self._grow, self._decode, self._free])(rng, rows)
            if rng.random() < 0.1:
                yield from self._group(rng, rows)
            if rng.random() < 0.1:
                yield from self._rare(rng, rows)
        if rng.random() < 0.3:
            yield Operation("clear")
        else:
            for row in rows:
                yield Operation("free", (row,))
        yield Operation("alloc", (self.num_pages * self.page_size,))

    def _grow(self, rng: random.Random, rows: list[list[Slot]]) -> Operations:
        if rng.random() < 0.3 or self.kind == "token":
            pages = rng.choice([0, 1, 2, self.num_pages + 1])
            new = yield Operation("alloc", (pages * self.page_size,))
            if new and not isinstance(new, proof.Raised):
                rows.append(new)
            return
        rows += [[] for _ in range(rng.randint(0, 2))]
        batch = rng.sample(rows, min(len(rows), rng.randint(1, 3)))
        if not batch:
            return
        ends = [len(row) + rng.choice([0, 1, rng.randint(1, 2 * self.page_size)]) for row in batch]
        new = yield Operation("alloc_extend", (_tails(batch), ends))
        if new is None or isinstance(new, proof.Raised):
            return
        taken = iter(new)
        for row, end in zip(batch, ends, strict=True):
            row += [next(taken) for _ in range(end - len(row))]

    def _decode(self, rng: random.Random, rows: list[list[Slot]]) -> Operations:
        filled = [row for row in rows if row]
        if self.kind == "token" or not filled:
            return
        batch = rng.sample(filled, rng.randint(1, len(filled)))
        new = yield Operation("alloc_decode", (_tails(batch),))
        if new is None or isinstance(new, proof.Raised):
            return
        for row, slot in zip(batch, new, strict=True):
            row.append(slot)

    def _free(self, rng: random.Random, rows: list[list[Slot]]) -> Operations:
        """Free the end of a row, from a page's edge on."""
        filled = [row for row in rows if row]
        if not filled:
            yield Operation("free", ([],))
            return
        row = rng.choice(filled)
        page_size = self.page_size
        keep = rng.randint(0, (len(row) - 1) // page_size) * page_size
        end, row[keep:] = row[keep:], []
        calls = [Operation("free", (end,)), Operation("free", (end,))]
        engine_class = _OWN[self.kind]
        if hasattr(engine_class, "free_segment"):
            calls.append(Operation("free_segment", (end, keep)))
        if hasattr(engine_class, "free_segments"):
            calls.append(
                Operation("free_segments", (end, page_size * (len(end) // page_size // 2)))
            )
        if hasattr(engine_class, "free_full"):
            calls.append(Operation("free_full", (end,)))
        if hasattr(engine_class, "free_full_segment"):
            calls.append(Operation("free_full_segment", (end, keep)))
        if hasattr(engine_class, "free_page_ids"):
            calls.append(Operation("free_page_ids", (list(dict(end)),)))
        yield rng.choice(calls)

    def _group(self, rng: random.Random, rows: list[list[Slot]]) -> Operations:
        yield Operation("free_group_begin")
        for _ in range(rng.randint(0, 3)):
            yield from self._free(rng, rows)
        yield Operation("free_group_end")

    def _rare(self, rng: random.Random, rows: list[list[Slot]]) -> Operations:
        engine_class = _OWN[self.kind]
        kind = rng.randrange(5)
        if kind == 0:
            yield Operation("merge_and_sort_free")
        elif kind == 1 and hasattr(engine_class, "resize"):
            rows.clear()
            self.num_pages = rng.randint(3, 12)
            beyond = rng.choice([0, self.page_size - 1])  # less than a page
            yield Operation("resize", (self.num_pages * self.page_size + beyond,))
        elif kind == 2:
            rows.clear()
            yield Operation("clear")
        elif kind == 3 and rows:
            known = inspect.signature(engine_class.get_cpu_copy).parameters
            named = {name: 5 for name in ("mamba_indices", "req_pool_index") if name in known}
            yield Operation("copy", (rng.choice(rows), named if rng.random() < 0.7 else {}))
        elif kind == 4 and hasattr(engine_class, "backup_state"):
            yield Operation("backup")
            yield Operation("alloc", (self.page_size,))
            yield Operation("restore")


def _tails(rows: Sequence[Sequence[Slot]]) -> list[tuple[int, Slot | None]]:
    return [(len(row), row[-1] if row else None) for row in rows]


class _Loops:
    """A kernel of SGLang's by a plain loop; the grid is not needed."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    def __getitem__(self, grid: Any) -> Any:
        return self._loop


def _extend(
    prefix: Any, ends: Any, last: Any, free: Any, out: Any, lanes: int, page_size: int
) -> None:
    written, pages = 0, iter(free.tolist())
    for start, end, slot in zip(prefix.tolist(), ends.tolist(), last.tolist(), strict=True):
        for position in range(start, end):
            if position % page_size == 0:
                slot = next(pages, 0) * page_size - 1
            slot += 1
            out[written] = slot
            written += 1


def _decode(ends: Any, last: Any, free: Any, out: Any, lanes: int, page_size: int) -> None:
    _extend(ends - 1, ends, last, free, out, lanes, page_size)


@contextmanager
def loops_for_kernels() -> Iterator[None]:
    """Within it SGLang's own allocator runs on the host."""
    loops = {"alloc_extend_kernel": _Loops(_extend), "alloc_decode_kernel": _Loops(_decode)}
    before = {name: getattr(paged, name) for name in loops}
    try:
        for name, loop in loops.items():
            setattr(paged, name, loop)
        yield
    finally:
        for name, kernel in before.items():
            setattr(paged, name, kernel)
