"""One launch of each kernel on the device, with inputs as a round of a served model has them.

Every `Case` runs without allocating, so that it can be captured in a CUDA graph. Its bytes are
those that a kernel must read and write, each counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specpool import kernels
from specpool.kernels import Fields, launch


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model and its draft tree; bfloat16."""

    layers: int
    heads: int = 8  # of the keys, and as many of the values
    head_dim: int = 128
    num_steps: int = 5
    topk: int = 8
    nodes: int = 64
    sampled: int = 16  # nodes of a lane that `sample_tokens` draws at
    vocab: int = 128_256
    context: int = 2048


MODELS = {"8B": Sizes(layers=32), "70B": Sizes(layers=80)}


@dataclass(frozen=True, slots=True)
class Case:
    """One launch: `run` allocates nothing, `num_bytes` are read and written together."""

    kernel: str
    run: Callable[[], object]
    num_bytes: int


class Pool:
    """The KV of a model: [layers, 2, num_slots, heads, head_dim], and values as gathered."""

    def __init__(self, sizes: Sizes, batch: int, page_size: int, device: torch.device) -> None:
        # Rows of up to P tokens and N nodes; twice `batch` pages to move.
        self.columns = 1 + -(-sizes.nodes // page_size)
        self.num_pages = batch * max(self.columns, 2) + 1
        num_slots = self.num_pages * page_size
        tail = (sizes.heads, sizes.head_dim)
        shape = (sizes.layers, 2, num_slots, *tail)
        self.kv = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        self.fields = Fields.of([self.kv], page_size, slot_dim=2)
        self.values = self.fields.empty(batch * page_size)
        self.slot_bytes = sum(self.fields.widths)


def _int32(values: object, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)


def _table(
    rng: np.random.Generator, batch: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A page table of `batch` rows, pages in random order, and the rows."""
    pages = 1 + rng.permutation(batch * columns).reshape(batch, columns)
    table = np.concatenate([np.zeros((1, columns), np.int64), pages])
    return _int32(table, device), _int32(np.arange(1, batch + 1), device)


def empty_launch(device: torch.device) -> Case:
    """A kernel that returns at once, through the same seam."""
    cell, none = _int32([[0]], device), np.int32(0)
    single = np.int32(1)
    args = (cell, single, single, cell, cell, cell, none)
    return Case("empty launch", partial(launch.launch, "apply_table_delta", (1,), (32,), args), 0)


def move_cases(
    sizes: Sizes, pool: Pool, page_size: int, batch: int, device: torch.device
) -> Iterator[Case]:
    """Kernels 7, 8 and 9 over all layers: five moves a lane; a page of each of `batch` rows."""
    rng = np.random.default_rng([page_size, batch])
    p, fields = page_size, pool.fields
    pages = 1 + rng.permutation(pool.num_pages - 1)
    src, dst = (
        _int32(some[:, None] * p + np.arange(p), device).view(-1)
        for some in (pages[:batch], pages[batch : 2 * batch])
    )
    once = src.numel() * pool.slot_bytes
    move = partial(kernels.move_kv, fields, src, dst, disjoint=True)
    yield Case("move_kv", move, 2 * once)
    yield Case("gather_kv", partial(kernels.gather_kv, fields, src, out=pool.values), 2 * once)
    yield Case("scatter_kv", partial(kernels.scatter_kv, fields, src, pool.values), 2 * once)
    if src.numel() <= 2816:
        # As copies go whose slots may be both read and written.
        held = partial(kernels.move_kv, fields, src, src.roll(1))
        yield Case("move_kv, overlapping", held, 2 * once)

    table, rows = _table(rng, batch, pool.columns, device)
    roots = _int32(rng.integers(0, p, batch), device)
    walks = np.zeros((batch, sizes.num_steps + 1), np.int64)
    for lane in range(batch):
        later = np.arange(sizes.num_steps + 1, sizes.nodes)  # no node stands in its place
        walks[lane, 1:] = np.sort(rng.permutation(later)[: sizes.num_steps])
    accept_index = _int32(walks + sizes.nodes * np.arange(batch)[:, None], device)
    layout = (table, p, rows, roots, accept_index)
    compact = partial(kernels.compact_accepted, fields, *layout, num_draft_tokens=sizes.nodes)
    yield Case("compact_accepted", compact, 2 * batch * sizes.num_steps * pool.slot_bytes)


@dataclass(frozen=True, slots=True)
class Tails:
    """What `duplicate_prefix_tail` works on: one draft layer."""

    kv: Tensor  # bfloat16 [1, 2, num_slots, heads, head_dim]
    table: Tensor
    rows: Tensor
    roots: Tensor
    page_size: int
    sizes: Sizes

    @classmethod
    def drawn(cls, sizes: Sizes, page_size: int, batch: int, device: torch.device) -> Tails:
        """Random roots inside the first page, so that each has a tail; the drafts lie behind."""
        rng = np.random.default_rng([page_size, batch])
        p = page_size
        columns = sizes.topk * -(-(p - 1 + sizes.num_steps) // p)
        table, rows = _table(rng, batch, columns, device)
        kv = torch.zeros(
            1, 2, (batch * columns + 1) * p, sizes.heads, sizes.head_dim,
            dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        return cls(kv, table, rows, _int32(rng.integers(1, p, batch), device), p, sizes)

    def case(self) -> Case:
        """One launch."""
        fields = Fields.of([self.kv], self.page_size, slot_dim=2)
        layout = (fields, self.table, self.page_size, self.rows, self.roots)
        sizes = {"num_steps": self.sizes.num_steps, "topk": self.sizes.topk}
        tokens = int((self.roots % self.page_size).sum()) * (self.sizes.topk - 1)
        run = partial(kernels.duplicate_prefix_tail, *layout, **sizes)
        return Case("duplicate_prefix_tail", run, 2 * tokens * sum(fields.widths))

    def in_torch(self) -> None:
        """The same in torch operations, as upstream does it (sgl#7725): indices, then KV."""
        p, s, k = self.page_size, self.sizes.num_steps, self.sizes.topk
        last = self.roots % p
        base = self.roots - last
        stride = (last + s + p - 1) // p * p
        offsets = torch.arange(p, device=last.device)
        branches = torch.arange(1, k, device=last.device)
        read = (base[:, None, None] + offsets).expand(-1, k - 1, -1)
        written = read + (stride[:, None] * branches)[:, :, None]
        is_tail = (offsets < last[:, None, None]).expand(-1, k - 1, -1)
        rows = self.rows[:, None, None]
        source = (self.table[rows, read // p] * p + read % p)[is_tail]
        target = (self.table[rows, written // p] * p + written % p)[is_tail]
        self.kv[:, :, target] = self.kv[:, :, source]


def table_cases(sizes: Sizes, page_size: int, batch: int, device: torch.device) -> Iterator[Case]:
    """Kernels 1, 2, 3, 5 and 6: tables, slots and what is read, at contexts of about `context`."""
    rng = np.random.default_rng([page_size, batch])
    p, n, s, k = page_size, batch, sizes.num_steps, sizes.topk
    columns = -(-sizes.context // p) + k * (1 + -(-(s + p) // p))
    table, rows = _table(rng, n, columns, device)
    host_roots = rng.integers(sizes.context // 2, sizes.context, n).astype(np.int32)
    roots = _int32(host_roots, device)
    tokens, cells = int(host_roots.sum()), int((-(-host_roots // p)).sum())
    layout = (table, p, rows, roots)

    cell = rng.permutation(n * columns)[: 4 * n]
    delta = [_int32(1 + cell // columns, device), _int32(cell % columns, device)]
    delta.append(_int32(rng.integers(1, n + 1, 4 * n), device))
    changed = table.clone()
    run = partial(kernels.apply_table_delta, changed, *delta)
    yield Case("apply_table_delta", run, 4 * n * 16)

    node_rows = rows.repeat_interleave(sizes.nodes)
    positions = roots.repeat_interleave(sizes.nodes)
    out = torch.empty_like(node_rows)
    run = partial(kernels.slots_at, table, p, node_rows, positions, out=out)
    yield Case("slots_at", run, 16 * node_rows.numel())

    zeros, slots = torch.zeros_like(roots), torch.empty(tokens, dtype=torch.int32, device=device)
    run = partial(kernels.slot_ranges, table, p, rows, zeros, roots, hi=host_roots, out=slots)
    yield Case("slot_ranges", run, 4 * (tokens + cells + 3 * n))

    out = torch.empty(n, k, s, dtype=torch.int32, device=device)
    named = {"num_steps": s, "topk": k}
    run = partial(kernels.draft_write_slots, *layout, **named, layout="holey", out=out)
    yield Case("draft_write_slots", run, 4 * (2 * out.numel() + 2 * n))

    step = s - 1
    capacity = kernels.read_capacity(host_roots.astype(np.int64), num_steps=s, topk=k)
    csr = (
        torch.empty(n * k + 1, dtype=torch.int32, device=device),
        torch.empty(capacity, dtype=torch.int32, device=device),
    )
    ancestors = torch.zeros(n, k, s, dtype=torch.int32, device=device)
    reads = partial(kernels.draft_read_indices, *layout, **named, step=step, layout="holey")
    run = partial(reads, ancestors=ancestors, hi=host_roots, out=csr)
    written = k * (tokens + n * (step + 1)) + n * k
    yield Case("draft_read_indices", run, 4 * (written + cells + 2 * n + n * k * s))

    width = (int(host_roots.max()) + step) // p + 1
    out = torch.empty(n * k, width, dtype=torch.int32, device=device)
    run = partial(kernels.branch_pages, *layout, **named, step=step, hi=host_roots, out=out)
    yield Case("branch_pages", run, 4 * (out.numel() + cells + 2 * n))

    parents = _int32(rng.integers(0, k, (n, k)), device)
    run = partial(kernels.advance_ancestors, ancestors, parents, step)
    yield Case("advance_ancestors", run, 4 * (2 * n * k * step + n * k))

    csr3 = (
        torch.empty(n + 1, dtype=torch.int32, device=device),
        torch.empty(cells, dtype=torch.int32, device=device),
        torch.empty(n, dtype=torch.int32, device=device),
    )
    run = partial(kernels.page_csr, table, p, rows, roots, hi=host_roots, out=csr3)
    yield Case("page_csr", run, 4 * (2 * cells + 4 * n))


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def tree_cases(sizes: Sizes, batch: int, device: torch.device) -> Iterator[Case]:
    """Kernels 10 and 12, and select before them."""
    generator = torch.Generator(device).manual_seed(batch)
    n, s, k, nodes = batch, sizes.num_steps, sizes.topk, sizes.nodes
    total = k + (s - 1) * k * k
    buffers = (
        torch.zeros(n, total, device=device),
        torch.zeros(n, total, dtype=torch.int64, device=device),
        torch.zeros(n, 1 + k * s, dtype=torch.int64, device=device),
    )
    scores = None
    for step in range(s):
        lines = n if step == 0 else n * k
        p = torch.rand(lines, k, generator=generator, device=device)
        p = p.sort(1, descending=True).values
        ids = torch.randint(0, sizes.vocab, p.shape, generator=generator, device=device)
        given = (step, p, ids, scores, *buffers)
        out = kernels.select_topk(*given)
        run, before, scores = partial(kernels.select_topk, *given, out=out), scores, out[2]
    moved = 2 * _bytes(p, ids) + _bytes(*out) + 8 * n * k + (0 if before is None else before.nbytes)
    yield Case("select_topk", run, moved)

    root_tokens = torch.zeros(n, dtype=torch.int64, device=device)
    named = {"topk": k, "num_draft_tokens": nodes}
    tree = kernels.build_tree(*buffers, root_tokens, **named)
    run = partial(kernels.build_tree, *buffers, root_tokens, **named, out=tree)
    yield Case("build_tree", run, _bytes(*buffers, root_tokens, *tree))

    links = tree[:5]
    checked = kernels.check_tree(*links, root_tokens, vocab_size=sizes.vocab)
    run = partial(kernels.check_tree, *links, root_tokens, vocab_size=sizes.vocab, out=checked)
    yield Case("check_tree", run, _bytes(*links, root_tokens, *checked))

    tokens, _, _, first_child, next_sibling, _ = tree
    # Every walk goes down to a leaf.
    child = tokens.gather(1, first_child.clamp(min=0).long())
    target = torch.where(first_child < 0, -1, child)
    walk = (tokens, first_child, next_sibling, target)
    out = kernels.verify_tree(*walk, num_steps=s)
    run = partial(kernels.verify_tree, *walk, num_steps=s, out=out)
    yield Case("verify_tree", run, _bytes(*walk, *out))


def layer_cases(sizes: Sizes, batch: int, device: torch.device) -> Iterator[Case]:
    """Kernels 9 and 14 in one layer, whose queries have four times as many heads as its keys."""
    generator = torch.Generator(device).manual_seed(batch)
    n = batch * sizes.nodes

    def drawn(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    q, k = (drawn(n, heads, sizes.head_dim) for heads in (4 * sizes.heads, sizes.heads))
    angles = drawn(n, sizes.head_dim), drawn(n, sizes.head_dim)
    named = {"rotary_dim": sizes.head_dim, "is_rounded": True}
    out = kernels.rotate_heads(q, k, *angles, **named)
    run = partial(kernels.rotate_heads, q, k, *angles, **named, out=out)
    yield Case("rotate_heads", run, _bytes(q, k, *angles, *out))

    gate, up = (drawn(n, 14 * sizes.heads * sizes.head_dim) for _ in range(2))
    product = torch.empty_like(gate)
    run = partial(kernels.gated_silu, gate, up, out=product)
    yield Case("gated_silu", run, _bytes(gate, up, product))

    buffers = drawn(2 * n, *k.shape[1:]), drawn(2 * n, *k.shape[1:])
    slots = torch.arange(0, 2 * n, 2, device=device)
    run = partial(kernels.write_kv, *buffers, k, k, slots)
    yield Case("write_kv", run, 4 * k.nbytes + slots.nbytes)


def state_cases(sizes: Sizes, batch: int, device: torch.device) -> Iterator[Case]:
    """Kernels over a recurrent layer, a gated delta rule of Qwen3-Next's sizes if `sizes` are 8B's.

    Each lane folds two records into its state, and then runs over a root and three drafts.
    """
    generator = torch.Generator(device).manual_seed(batch)
    records, tokens = 2, 4
    length = batch * (records + tokens)
    key_heads, heads, dim = 2 * sizes.heads, 4 * sizes.heads, sizes.head_dim
    channels = (2 * key_heads + heads) * dim

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    slots, zeros = np.arange(1, batch + 1, dtype=np.int32), np.zeros(batch, np.int32)
    lanes = kernels.StateLanes.build(
        src=slots,
        dst=slots,
        begin=zeros,
        end=zeros + records,
        num_records=zeros + records,
        num_tokens=zeros + tokens,
        roots=torch.full((batch,), records, dtype=torch.int32, device=device),
    )
    mixed, weight = drawn(length, channels), drawn(channels, 4)
    state, out = drawn(batch + 1, channels, 3), torch.empty_like(mixed)
    run = partial(kernels.convolve_lanes, mixed, weight, None, state, lanes, out=out)
    yield Case("convolve_lanes", run, _bytes(mixed, weight, out) + 2 * state[1:].nbytes)

    q, k = (drawn(length, key_heads, dim) for _ in range(2))
    v = drawn(length, heads, dim)
    decay, beta = (drawn(length, heads, dtype=torch.float32).sigmoid_() for _ in range(2))
    matrices = drawn(batch + 1, heads, dim, dim, dtype=torch.float32)
    scanned = torch.empty(length, heads, dim, device=device)
    scan = partial(kernels.scan_lanes, q, k, v, decay, beta, matrices, lanes, out=scanned)
    run = partial(scan, is_delta=True, is_normed=True, scale=dim**-0.5)
    num_bytes = _bytes(q, k, v, decay, beta, scanned) + 2 * matrices[1:].nbytes
    yield Case("scan_lanes", run, num_bytes)


def sample_cases(sizes: Sizes, batch: int, device: torch.device) -> Iterator[Case]:
    """Kernel 11: argmax, and draws after temperature, top-k and top-p."""
    generator = torch.Generator(device).manual_seed(batch)
    n = batch * sizes.sampled
    logits = torch.empty(n, sizes.vocab, dtype=torch.bfloat16, device=device)
    logits.normal_(generator=generator)
    logits[:, :3] += 12  # as peaked as a model's
    u = torch.rand(n, dtype=torch.float64, generator=generator, device=device)
    tokens = torch.empty(n, dtype=torch.int64, device=device)
    ones = torch.ones(n, device=device)
    for name, temperature, top_k, top_p in (
        ("argmax", 0.0, 0, 1.0),
        ("temperature", 0.8, 0, 1.0),
        ("top-k, top-p", 0.8, 50, 0.9),
    ):
        how = (ones * temperature, torch.full((n,), top_k, dtype=torch.int32, device=device))
        args = (logits, *how, ones * top_p, u)
        run = partial(kernels.sample_tokens, *args, out=tokens)
        yield Case(f"sample_tokens, {name}", run, _bytes(*args, tokens))

    p = torch.softmax(logits[:batch], -1, dtype=torch.float32)
    yield Case("likeliest, k=8", partial(kernels.likeliest, p, 8), _bytes(p))

    seeds = torch.arange(n, device=device)
    run = partial(kernels.uniform, seeds, seeds, out=u)
    yield Case("uniform", run, _bytes(seeds, seeds, u))
