"""Index buffers for kernels that read pages by CSR, built from a view; the names are flashinfer's.

Nothing here waits for the device: the host computes sizes from the view's host lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specpool.arrays import Int32
from specpool.engine.attention.view import AttentionView, TokenReads, first_columns
from specpool.errors import ShapeError
from specpool.kernels.transfer import upload

#: The most entries of a mask, because flashinfer's offsets into it are int32.
MAX_MASK = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PageCSR:
    """The pages that each of n readers reads, and how much of the last page.

    Attributes:
        page_size: slots per page, P; 1 if `kv_indices` are slots.
        kv_indptr: int32 [n + 1], host.
        kv_indices: int32 [kv_indptr[-1]], device.
        kv_last_page_len: int32 [n], each in 1..=P, host.

    Raises:
        ShapeError: sizes do not fit together, or a host array is on another device.
    """

    page_size: int
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor

    def __post_init__(self) -> None:
        _on_host("kv_indptr", self.kv_indptr)
        _on_host("kv_last_page_len", self.kv_last_page_len)
        size, need = len(self.kv_indices), int(self.kv_indptr[-1])
        if size != need or len(self.kv_last_page_len) != len(self.kv_indptr) - 1:
            raise ShapeError(
                f"kv_indptr of {len(self.kv_indptr)} ends at {need}: there are {size} kv_indices "
                f"and {len(self.kv_last_page_len)} kv_last_page_len"
            )

    @property
    def kv_lens(self) -> Tensor:
        """int32 [n], host: the cells of each reader."""
        return (self.kv_indptr.diff() - 1) * self.page_size + self.kv_last_page_len


@dataclass(frozen=True, slots=True)
class DecodeIndices:
    """Indices of a decode: one query per reader, which sees its last cells.

    Attributes:
        pages: the pages of n readers.
        window: how many cells a query sees; None means all that its reader reads.
    """

    pages: PageCSR
    window: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillIndices:
    """Indices of a prefill or verify: several queries per reader, with a mask or causal.

    Attributes:
        pages: the pages of n lanes.
        qo_indptr: int32 [n + 1], host: offsets of each lane's queries.
        custom_mask: bool [sum(q_len * kv_len)], device: for each lane and each of its queries, the
            cells that the query sees; None means causal, the last query sees all.
        window: of a causal one, how many cells up to its own a query sees; None means all.

    Raises:
        ShapeError: the mask has another length (flashinfer would read past its end) or is too long
            for int32 offsets, or `qo_indptr` is on another device.
    """

    pages: PageCSR
    qo_indptr: Tensor
    custom_mask: Tensor | None
    window: int | None = None

    def __post_init__(self) -> None:
        _on_host("qo_indptr", self.qo_indptr)
        if len(self.qo_indptr) != len(self.pages.kv_indptr):
            raise ShapeError(
                f"qo_indptr has {len(self.qo_indptr)} entries, kv_indptr "
                f"{len(self.pages.kv_indptr)}"
            )
        if self.custom_mask is None:
            return
        need = check_mask_size(self.qo_indptr.diff().numpy(), self.pages.kv_lens.numpy())
        if self.custom_mask.shape != (need,) or self.custom_mask.dtype != torch.bool:
            raise ShapeError(
                f"custom_mask must be bool [{need}], sum of q_len * kv_len, got "
                f"{self.custom_mask.dtype} {list(self.custom_mask.shape)}"
            )


Indices = DecodeIndices | PrefillIndices


def _on_host(name: str, array: Tensor) -> None:
    """Raise `ShapeError` unless `array` is int32 on the host; fetching it would wait."""
    if array.device.type != "cpu" or array.dtype != torch.int32:
        raise ShapeError(f"{name} must be int32 on the host, got {array.dtype} on {array.device}")


def check_mask_size(q_lens: NDArray[np.integer], kv_lens: NDArray[np.integer]) -> int:
    """Return the sum of q_len * kv_len; raise `ShapeError` if it exceeds int32."""
    size = int((q_lens.astype(np.int64) * kv_lens).sum())
    if size > MAX_MASK:
        raise ShapeError(
            f"a mask of {int(q_lens.sum())} queries over up to {int(kv_lens.max())} cells has "
            f"{size} entries, at most {MAX_MASK} can be counted: take shorter prefill chunks or "
            "fewer lanes"
        )
    return size


def page_csr(read_pages: Tensor, kv_lens: Int32, page_size: int) -> PageCSR:
    """Build the CSR of the pages that hold each lane's first `kv_lens` cells.

    Args:
        read_pages: int32 or int64 [B, C].
        kv_lens: int32 [B], on the host, each in 1..=C * P.
        page_size: P.

    Raises:
        ShapeError: a length is outside 1..=C * P.
    """
    columns = read_pages.shape[1]
    if len(kv_lens) != len(read_pages) or kv_lens.min() < 1 or kv_lens.max() > columns * page_size:
        raise ShapeError(
            f"kv_lens of {len(read_pages)} lanes must be in 1..={columns * page_size}, got "
            f"{len(kv_lens)} in {int(kv_lens.min())}..={int(kv_lens.max())}"
        )
    counts = -(-kv_lens // page_size)
    indptr = _indptr(counts)
    if counts.min() == counts.max():
        indices = read_pages[:, : int(counts[0])].reshape(-1)
    else:
        (at,) = upload(read_pages.device, first_columns(counts, columns))
        indices = read_pages.reshape(-1).index_select(0, at)
    return PageCSR(
        page_size,
        torch.from_numpy(indptr),
        indices.int(),
        torch.from_numpy((kv_lens - 1) % page_size + 1),
    )


def token_csr(reads: TokenReads, window: int | None) -> PageCSR:
    """Build a CSR of single slots, as pages of size 1; a window keeps each reader's last slots."""
    indptr, indices = reads.kv_indptr, reads.kv_indices[: int(reads.kv_indptr[-1])]
    lens = np.diff(indptr)
    if window is not None and window < lens.max():
        kept_lens = np.minimum(lens, window)
        ends = _indptr(kept_lens)
        shifts = np.repeat(indptr[1:].astype(np.int64) - ends[1:], kept_lens)
        (at,) = upload(indices.device, shifts + np.arange(ends[-1]))
        indptr, indices = ends, indices.index_select(0, at)
    ones = torch.ones(len(lens), dtype=torch.int32)
    return PageCSR(1, torch.from_numpy(indptr), indices.int(), ones)


def flat_mask(mask: Tensor, q_lens: Int32, kv_lens: Int32) -> Tensor:
    """Return the mask as bool [sum(q_len * kv_len)], without padding queries and cells.

    Args:
        mask: [B, Q, C * P], bool or float (0 = visible).
        q_lens: int32 [B], on the host, each at most Q.
        kv_lens: int32 [B], on the host, each at most C * P.

    Raises:
        ShapeError: the mask would have more than `MAX_MASK` entries.
    """
    size = check_mask_size(q_lens, kv_lens)
    visible = mask if mask.dtype == torch.bool else mask == 0
    if q_lens.min() == visible.shape[1] and kv_lens.min() == kv_lens.max():
        return visible[:, :, : int(kv_lens[0])].reshape(-1)
    # Entry i, of the n-th query that counts, is column i - (sum of lens before n) of its row.
    _, num_queries, width = visible.shape
    rows = np.flatnonzero(np.arange(num_queries) < q_lens[:, None])
    lens = np.repeat(kv_lens, q_lens).astype(np.int64)
    shifts, counts = upload(visible.device, rows * width - (np.cumsum(lens) - lens), lens)
    at = torch.repeat_interleave(shifts, counts, output_size=size)
    return visible.reshape(-1).index_select(0, at + torch.arange(size, device=visible.device))


def indices_of(view: AttentionView, window: int | None) -> Indices:
    """Return the indices of what a layer with this window reads, in the cheapest form.

    flashinfer's own window counts cells. In a causal view these are positions. The nodes of a tree
    would see less than their window, which counts positions, so there the window is in the mask.

    Raises:
        ShapeError: a mask or lengths do not fit the view.
    """
    if view.read_tokens is not None:
        return DecodeIndices(token_csr(view.read_tokens(), window))
    width = view.read_pages.shape[1] * view.page_size
    kv_lens = np.full(view.num_lanes, width, np.int32) if view.kv_lens is None else view.kv_lens
    if not view.is_causal:  # upper bounds, which may exceed the pages
        kv_lens = np.minimum(kv_lens, np.int32(width))
    pages = page_csr(view.read_pages, kv_lens, view.page_size)
    index_window = window if window is not None and window < kv_lens.max() else None
    if view.is_causal and view.q_lens == 1:
        return DecodeIndices(pages, index_window)
    q_lens = np.broadcast_to(np.asarray(view.q_lens, np.int32), view.num_lanes)
    starts = torch.from_numpy(_indptr(q_lens))
    if view.is_causal:
        return PrefillIndices(pages, starts, None, index_window)
    return PrefillIndices(pages, starts, flat_mask(view.mask(index_window), q_lens, kv_lens))


def _indptr(lens: NDArray[np.integer]) -> Int32:
    return np.concatenate([[0], np.cumsum(lens, dtype=np.int64)]).astype(np.int32)
