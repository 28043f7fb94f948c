"""A ledger, its cache and a host tier, with an oracle of what each slot was given."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import torch

from specpool import Group, Ledger, NotReady, OutOfPages, Shape
from specpool.engine.memory.host.copies import HostMemory
from specpool.engine.memory.host.handle import Handle
from specpool.engine.memory.host.reload import reload
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.memory.kv_cache import KVCache, LayerKV

TREE = Shape.eagle(2, 3, 6)

#: Two layers in the first group, one in every other; K and V of different widths.
WIDTHS = [(2, 3, 5), (1, 4, 4), (1, 2, 6), (3, 1, 2)]


def groups(*page_sizes: int, num_slots: int = 128, windows=()) -> list[Group]:
    """Window groups (page_size, window, sink?), then full groups of these page sizes.

    The last one is the draft's.
    """
    last = len(page_sizes) - 1
    sliding = [
        Group(
            f"window{i}",
            page_size=size,
            num_pages=num_slots // size,
            window=window,
            sink=sink[0] if sink else 0,
        )
        for i, (size, window, *sink) in enumerate(windows)
    ]
    full = [
        Group(f"full{i}", page_size=size, num_pages=num_slots // size, hosts_drafts=i == last)
        for i, size in enumerate(page_sizes)
    ]
    return [*sliding, *full]


class World:
    """Requests whose forwards write random KV; `kv` says what each position of a row has."""

    def __init__(
        self,
        specs: list[Group],
        *,
        host_rows: float = 3,
        num_rows: int = 6,
        context: int = 48,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        **options,
    ) -> None:
        self.ledger = Ledger(
            specs, [TREE], num_rows=num_rows, max_context_len=context, **options
        )  # fmt: skip
        self.context, self.device = context, torch.device(device)
        layer_groups = [0, *range(len(specs))]
        layers = [
            LayerKV(*widths)
            for widths in itertools.islice(itertools.cycle(WIDTHS), len(layer_groups))
        ]
        self.cache = KVCache(self.ledger, layers, layer_groups, dtype=dtype, device=self.device)
        self.random = torch.Generator().manual_seed(0)
        row_bytes = self.row_bytes()
        self.memory = HostMemory(self.ledger, self.cache, int(host_rows * row_bytes))
        self.tier = HostTier(self.ledger, self.memory)
        self.kv: dict[int, list[torch.Tensor]] = {}  # by row: [context + N, ...] of each buffer
        self.away: dict[Handle, list[torch.Tensor]] = {}

    def row_bytes(self) -> int:
        """Host bytes of a row of the whole context, reckoned anew."""
        total = 0
        last = self.context - 1
        needs = self.ledger.pages_needed(last, last, 0)
        for buffer, group in zip(self.buffers, self.buffer_groups, strict=True):
            size = self.ledger.groups[group].page_size
            pages = min(int(needs[group]), -(-self.context // size))
            total += pages * size * buffer[0].numel() * buffer.element_size()
        return total

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [*self.cache.keys, *self.cache.values]

    @property
    def buffer_groups(self) -> list[int]:
        return self.cache.layer_groups * 2

    def noise(self, *shape: int) -> torch.Tensor:
        """Random bytes as numbers, NaNs among them."""
        dtype = self.cache.dtype
        size = (*shape[:-1], shape[-1] * dtype.itemsize)
        made = torch.randint(0, 256, size, generator=self.random, dtype=torch.uint8)
        return made.view(dtype).to(self.device)

    def held(self, row: int, group: int, start: int, end: int) -> np.ndarray:
        """The positions of [start, end) that the row holds: its sink, and the window's."""
        positions, sink = np.arange(start, end), self.ledger.groups[group].sink
        first = int(self.ledger.evicted_len(group)[row])
        return positions[(positions < sink) | (positions >= first)]

    def slots(self, row: int, group: int, positions: np.ndarray) -> torch.Tensor:
        size = self.ledger.groups[group].page_size
        pages = self.ledger.page_table(group)[row][positions // size].astype(np.int64)
        assert pages.all()
        return torch.from_numpy(pages * size + positions % size).to(self.device)

    def write(self, row: int, start: int, end: int) -> None:
        """Write what a forward of these positions writes."""
        for at, (buffer, group) in enumerate(zip(self.buffers, self.buffer_groups, strict=True)):
            new = self.noise(end - start, *buffer.shape[1:])
            self.kv[row][at][start:end] = new
            # What slid out of the window since is written nowhere.
            held = self.held(row, group, start, end)
            buffer[self.slots(row, group, held)] = new[torch.from_numpy(held - start)]

    def launch(self, plan) -> None:
        self.ledger.launch(plan.step)
        self.cache.apply_delta(plan.step)
        self.cache.copy_pages(plan.page_copies)

    def admit(self, length: int, tag: str | None = None) -> int:
        row = self.ledger.admit(tag)
        shape = (self.context + 64,)
        self.kv[row] = [self.noise(*shape, *b.shape[1:]) for b in self.buffers]
        try:
            self.extend(row, length)
        except OutOfPages:
            self.ledger.abort(row)
            del self.kv[row]
            raise
        return row

    def extend(self, row: int, length: int, writes_draft: bool = True) -> None:
        start = int(self.ledger.resolved_len[row])
        while start < length:
            end = min(length, start + (self.ledger.max_chunk or length))
            plan = self.ledger.prepare_extend([row], [end], writes_draft=writes_draft)
            self.launch(plan)
            self.write(row, start, end)
            self.ledger.complete(plan.step)
            start = end

    def decode(self, row: int, shape: int = 1, writes_draft: bool = True):
        """Launch a round; its plan."""
        plan = self.ledger.prepare_decode([row], [shape], writes_draft=writes_draft)
        self.launch(plan)
        start = int(plan.lo[0])
        self.write(row, start, start + (TREE.num_draft_tokens if shape else 1))
        return plan

    def finish(self, plan, accept_len: int) -> None:
        self.ledger.resolve(plan.step, [accept_len])
        self.ledger.complete(plan.step)

    def fork(self, row: int) -> int:
        new = self.ledger.fork(row)
        self.kv[new] = [kv.clone() for kv in self.kv[row]]
        return new

    def give_back(self, row: int) -> None:
        self.ledger.abort(row)
        del self.kv[row]
        self.scribble()

    def offload(self, row: int) -> Handle | None:
        """Offload the row; everything that it gives back is overwritten at once."""
        handle = self.tier.save(row)
        if handle is not None:
            self.ledger.retract(row)
            self.away[handle] = self.kv.pop(row)
            self.scribble()
        return handle

    def reload(self, handle: Handle) -> int | None:
        row = reload(self.tier, self.cache, handle)
        kv = self.away.pop(handle)
        if row is not None:
            self.kv[row] = kv
        return row

    def scribble(self) -> None:
        """Other traffic: all free pages are written."""
        for buffer, group in zip(self.buffers, self.buffer_groups, strict=True):
            states, _, _ = self.ledger.ownership_map(group)
            pages = np.flatnonzero(states == 0)
            pages = torch.from_numpy(pages[pages > 0]).to(self.device)
            size = self.ledger.groups[group].page_size
            buffer.view(-1, size, *buffer.shape[1:])[pages] = self.noise(
                len(pages), size, *buffer.shape[1:]
            )

    def wrong(self, row: int) -> list[tuple[int, int]]:
        """(buffer, position) of the row that do not have what they were given."""
        mismatches = []
        length = int(self.ledger.resolved_len[row])
        for at, (buffer, group) in enumerate(zip(self.buffers, self.buffer_groups, strict=True)):
            held = self.held(row, group, 0, length)
            if not len(held):
                continue
            now = buffer[self.slots(row, group, held)].view(torch.uint8)
            given = self.kv[row][at][torch.from_numpy(held)].view(torch.uint8)
            different = (now != given).flatten(1).any(1).cpu().numpy()
            mismatches += [(at, int(position)) for position in held[different]]
        return mismatches

    def check(self) -> None:
        """Both audits; every row that is at rest has what it was given."""
        self.ledger.check()
        self.tier.check()
        assert set(self.tier.handles) == set(self.away)
        for row in self.kv:
            with contextlib.suppress(NotReady):  # the copy of a fork's tail is still to come
                self.ledger.check_quiet(row)
                assert not self.wrong(row), (row, self.wrong(row)[:5])

    def is_clean(self) -> None:
        """Check that nothing is left on the device or on the host."""
        self.ledger.check()
        self.tier.check()
        for g, group in enumerate(self.ledger.groups):
            assert self.ledger.free_pages(g) == group.num_pages
        assert self.ledger.num_free_rows == self.ledger.num_rows
        assert all(group.free_pages == group.num_pages for group in self.tier.stats().groups)

    def state(self) -> tuple:
        """Everything that decides what ledger and host tier will do."""
        owners = [pages._owners.tolist() for pages in self.tier._pages]
        return self.ledger.state_hash(), owners, self.tier.handles
