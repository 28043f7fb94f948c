"""Where a kernel's cases run: on the host runner in several orders, checked, or on a GPU.

A `Kit` holds every array that a case gives to a kernel between guard words, and proves at the end
that no guard and no input changed.
"""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import torch

import kernel_reference as ref
from cuda_host import HostModule, register
from specpool.kernels import launch

GUARD = 64  # bytes on either side; also keeps what lies between them aligned
PATTERN = 0xA5
PAGE_SIZES = [1, 3, 4, 16, 64, 256]


def i32(values):
    return np.asarray(values, np.int32)


def i64(values):
    return np.asarray(values, np.int64)


class HostBackend:
    """The kernels under g++, behind the package's own launch seam."""

    def __init__(self, kind, order):
        self.module = HostModule(launch.source(), kind=kind, order=order)
        self.kernel = functools.cache(self.module.get_function)
        self.launches = []

    def launch(self, entry, grid, block, args, shared_mem, touches):
        self.launches.append(entry)
        packed = [np.int64(0) if arg is None else arg for arg in args]
        # A buffer of gigabytes is virtual: its test registers the windows.
        small = [t for t in touches if t.nbytes < 1 << 30]
        with register(*small, name="kv"):
            self.kernel(entry)(grid, block, packed, shared_mem=shared_mem)


backend = functools.cache(HostBackend)


class Kit:
    """One run of a case.

    Attributes:
        device: of the tensors.
        is_checked: every load and store is judged; only small cases.
    """

    def __init__(self, kind, order=None):
        self.kind, self.order = kind, order
        self.is_checked = kind == "check"
        self.device = torch.device("cuda" if kind == "cuda" else "cpu")
        self._arrays = []  # (all bytes, their first content or None)

    @property
    def backend(self):
        return backend(self.kind, self.order)

    @contextlib.contextmanager
    def running(self):
        if self.kind == "cuda":
            launch.prepare(self.device)
            yield self
        else:
            with launch.host_backend(self.backend):
                yield self
        self.check()

    @property
    def batches(self):
        return [1, 3] if self.is_checked else [1, 2, 3, 4, 5, 6, 7, 8, 257]

    @property
    def page_sizes(self):
        return [1, 4, 16] if self.is_checked else PAGE_SIZES

    def out(self, shape, dtype=torch.int32):
        """A tensor to write, full of the guards' pattern."""
        return self._tensor(shape, dtype)[0]

    def put(self, array):
        """An input: it must not change."""
        tensor, everything = self.var(array, whole=True)
        self._arrays[-1] = (everything, everything.clone())
        return tensor

    def var(self, array, whole=False):
        """An array that a kernel may change."""
        value = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        tensor, everything = self._tensor(value.shape, value.dtype)
        if value.numel():
            tensor.view(torch.uint8).copy_(value.contiguous().view(torch.uint8))
        return (tensor, everything) if whole else tensor

    def _tensor(self, shape, dtype):
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        everything = torch.full((size + 2 * GUARD,), PATTERN, dtype=torch.uint8, device=self.device)
        self._arrays.append((everything, None))
        between = everything[GUARD : GUARD + size].view(dtype).view(*shape)
        return between, everything

    def check(self):
        """Check that no guard word and no input has changed."""
        for everything, before in self._arrays:
            if before is not None:
                assert torch.equal(everything, before), "a kernel wrote an input"
            assert (everything[:GUARD] == PATTERN).all() and (everything[-GUARD:] == PATTERN).all()
        self._arrays.clear()


class Batch:
    """Random lanes whose rows hold all that a round of S, K, N writes in any layout."""

    def __init__(self, page_size, batch, *, topk=4, num_steps=3, num_nodes=8, seed=0, most=None):
        rng = np.random.default_rng([seed, page_size, topk, batch])
        self.rng, self.p, self.k, self.s, self.n = rng, page_size, topk, num_steps, num_nodes
        self.size = batch
        most = 2 * page_size + 8 if most is None else most
        self.roots = i32(rng.integers(0, most, batch))
        if batch > 2:
            self.roots[0] -= self.roots[0] % page_size  # no tail
        columns = ref.row_pages(self.roots.tolist(), num_steps, topk, num_nodes, page_size)
        num_rows = batch + 2
        self.table = ref.make_table(rng, num_rows, columns)
        self.rows = i32(1 + rng.permutation(num_rows)[:batch])
        if batch > 3:  # a padded lane in the middle, one at the end
            for lane in (batch // 2, batch - 1):
                self.rows[lane] = self.roots[lane] = 0
        self.num_slots = int(self.table.max() + 1) * page_size

    @property
    def place(self):
        return self.table, self.p, self.rows, self.roots

    def walks(self, width):
        """accept_index [n, width]: ascending nodes, the root first, padded with -1."""
        index = np.full((self.size, width), -1, np.int32)
        for lane in range(self.size):
            max_len = min(width, self.n)
            later = np.sort(self.rng.permutation(self.n - 1)[: self.rng.integers(0, max_len)]) + 1
            index[lane, : len(later) + 1] = lane * self.n + np.append(0, later)
        return index

    def parents(self):
        """branch_parents [n, K] with swaps and shared parents."""
        return i32(self.rng.integers(0, self.k, (self.size, self.k)))


def put_place(kit, batch):
    """The table, P, rows and roots of a batch, on the kit's device."""
    table, p, rows, roots = batch.place
    return kit.put(table), p, kit.put(rows), kit.put(roots)


def array(tensor):
    return tensor.cpu().numpy()
