"""flashinfer in plain torch: what its kernels read from the buffers that a plan is given.

Written from the signatures and kernels of flashinfer 0.7.2, with their traps as they are there:
packed masks without their bools have offsets in bits, windows go by index, nobody checks a mask's
length (here: an error), custom masks are for "fa2" alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class _Wrapper:
    """Buffers as a plan leaves them on the device, and attention over them."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, backend: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any()
        assert kv_layout == "NHD"
        assert backend == "fa2", "only fa2 takes custom masks"
        self.num_plans = self.num_runs = 0

    def _keep(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, **sizes: Any) -> None:
        for name, array in (("indptr", indptr), ("last_page_len", last_page_len)):
            assert array.dtype == torch.int32 and array.device.type == "cpu", name
        assert indices.dtype == torch.int32 and indices.ndim == 1
        self.num_plans += 1
        # Copies: a plan does not see what becomes of its arguments.
        self.indptr, self.indices = indptr.tolist(), indices.tolist()
        self.last_page_len, self.sizes = last_page_len.tolist(), sizes

    def _kv_len(self, lane: int) -> int:
        num_pages = self.indptr[lane + 1] - self.indptr[lane]
        return (num_pages - 1) * self.sizes["page_size"] + self.last_page_len[lane]

    def _attend(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], sees: Any) -> Tensor:
        """`sees`: (lane, query in its lane) -> bool [kv_len]."""
        sizes, qo_indptr = self.sizes, self.qo_indptr
        k_cache, v_cache = paged_kv_cache
        size, heads, kv_heads = sizes["page_size"], sizes["num_qo_heads"], sizes["num_kv_heads"]
        assert q.is_contiguous() and q.dtype == sizes["q_data_type"]
        assert list(q.shape) == [qo_indptr[-1], heads, sizes["head_dim"]]
        for cache in paged_kv_cache:
            assert cache.is_contiguous() and cache.dtype == sizes["kv_data_type"]
            assert list(cache.shape[1:]) == [size, kv_heads, sizes["head_dim"]]
        self.num_runs += 1
        scale = sizes["sm_scale"]
        scale = 1 / math.sqrt(sizes["head_dim"]) if scale is None else scale
        out = torch.zeros_like(q)
        for lane in range(len(self.last_page_len)):
            pages = self.indices[self.indptr[lane] : self.indptr[lane + 1]]
            assert 1 <= self.last_page_len[lane] <= size
            keys, values = (
                cache[pages].flatten(0, 1)[: self._kv_len(lane)].float()
                for cache in (k_cache, v_cache)
            )
            groups = heads // kv_heads
            keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
            for i in range(qo_indptr[lane + 1] - qo_indptr[lane]):
                query = q[qo_indptr[lane] + i].float()
                scores = torch.einsum("hd,lhd->hl", query, keys) * scale
                cap = sizes["logits_soft_cap"]
                if cap is not None and cap > 0:
                    scores = cap * torch.tanh(scores / cap)
                seen = torch.as_tensor(sees(lane, i)) & self._in_window(lane, i)
                weights = scores.masked_fill(~seen, -math.inf).softmax(1)
                out[qo_indptr[lane] + i] = torch.einsum("hl,lhd->hd", weights, values).to(q.dtype)
        return out

    def _in_window(self, lane: int, i: int) -> Tensor:
        """flashinfer's window, by index: kv_idx + qo_len + window_left >= kv_len + qo_idx."""
        kv_len, left = self._kv_len(lane), self.sizes["window_left"]
        if left < 0:
            return torch.ones(kv_len, dtype=torch.bool)
        q_len = self.qo_indptr[lane + 1] - self.qo_indptr[lane]
        return torch.arange(kv_len) + q_len + left >= kv_len + i


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Within a graph (`use_cuda_graph`) a run reads the buffers as they are at its time.

    A plan within a graph copies into the buffers, and must keep to what the first one fixed: the
    number of lanes and of queries. A mask's buffer makes every run use the mask.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self.in_graph = use_cuda_graph
        self.buffers = {
            "qo_indptr": qo_indptr_buf,
            "indptr": paged_kv_indptr_buf,
            "indices": paged_kv_indices_buf,
            "last_page_len": paged_kv_last_page_len_buf,
            "mask": custom_mask_buf,
            "mask_indptr": mask_indptr_buf,
        }
        if use_cuda_graph:
            for name, buffer in self.buffers.items():
                assert isinstance(buffer, Tensor), name
                assert buffer.dtype == (torch.uint8 if name == "mask" else torch.int32), name
            assert len(qo_indptr_buf) == len(paged_kv_indptr_buf)  # type: ignore[arg-type]
            assert len(qo_indptr_buf) == len(paged_kv_last_page_len_buf) + 1  # type: ignore[arg-type]
        else:
            assert not any(isinstance(buffer, Tensor) for buffer in self.buffers.values())

    def reset_workspace_buffer(self, float_workspace: Tensor, int_workspace: Tensor) -> None:
        assert float_workspace.dtype == int_workspace.dtype == torch.uint8
        assert not int_workspace.any()

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = torch.float16,
        kv_data_type: Any = None,
        disable_split_kv: bool = False,
    ) -> None:
        assert qo_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu"
        if self.in_graph:
            assert custom_mask is None and packed_custom_mask is None
            fixed = (qo_indptr.tolist(), disable_split_kv, num_qo_heads, num_kv_heads, page_size)
            assert getattr(self, "fixed", fixed) == fixed, "a graph's launch is as it was captured"
            self.fixed = fixed
            for name, value in (
                ("qo_indptr", qo_indptr),
                ("indptr", paged_kv_indptr),
                ("last_page_len", paged_kv_last_page_len),
            ):
                self.buffers[name].copy_(value)
            assert len(paged_kv_indices) <= len(self.buffers["indices"])
            self.buffers["indices"][: len(paged_kv_indices)] = paged_kv_indices
        self._keep(
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            page_size=page_size,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type or q_data_type,
        )
        self.qo_indptr, self.causal = qo_indptr.tolist(), causal
        bits = [
            (end - start) * self._kv_len(lane)
            for lane, (start, end) in enumerate(
                zip(self.qo_indptr, self.qo_indptr[1:], strict=False)
            )
        ]
        self.mask_indptr = np.cumsum([0, *bits]).tolist()
        self.packed = None
        if packed_custom_mask is not None:
            self.packed = packed_custom_mask.numpy()  # mask_indptr stays in bits
        elif custom_mask is not None:
            assert custom_mask.dtype == torch.bool and custom_mask.ndim == 1
            assert len(custom_mask) >= self.mask_indptr[-1], "read past the end of a mask"
            parts = [
                np.packbits(custom_mask.numpy()[start:end], bitorder="little")
                for start, end in zip(self.mask_indptr, self.mask_indptr[1:], strict=False)
            ]
            self.packed = np.concatenate(parts)
            self.mask_indptr = np.cumsum([0, *map(len, parts)]).tolist()

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        if not self.in_graph:
            return self._attend(q, paged_kv_cache, self._sees)
        out = torch.empty_like(q)
        with _disable_current_modes():  # a launch: nothing within is an operation of torch's
            now = {name: np.from_dlpack(buffer) for name, buffer in self.buffers.items()}
            self.qo_indptr, self.indptr = now["qo_indptr"].tolist(), now["indptr"].tolist()
            self.last_page_len = now["last_page_len"].tolist()
            self.indices = now["indices"][: self.indptr[-1]].tolist()
            self.packed, self.mask_indptr = now["mask"], now["mask_indptr"].tolist()
            ends = [
                start + (b - a) * self._kv_len(lane) // 8
                for lane, (start, a, b) in enumerate(
                    zip(self.mask_indptr, self.qo_indptr, self.qo_indptr[1:], strict=False)
                )
            ]
            assert ends == self.mask_indptr[1:] and ends[-1] <= len(self.packed)
            assert self.indptr[-1] <= len(now["indices"])
            out.copy_(self._attend(q, paged_kv_cache, self._sees))
        return out

    def _sees(self, lane: int, i: int) -> Any:
        kv_len = self._kv_len(lane)
        if self.packed is not None:  # a mask wins over `causal`
            bits = np.unpackbits(self.packed[self.mask_indptr[lane] :], bitorder="little")
            return bits[i * kv_len : (i + 1) * kv_len].astype(bool)
        q_len = self.qo_indptr[lane + 1] - self.qo_indptr[lane]
        return np.arange(kv_len) <= (kv_len - q_len + i if self.causal else kv_len)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = torch.float16,
        kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:
        compiled_for = (1, 2, 3, 4, 6, 8, 16)
        assert self.use_tensor_cores or num_qo_heads // num_kv_heads in compiled_for
        self._keep(
            indptr,
            indices,
            last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type or q_data_type,
        )
        self.qo_indptr = list(range(len(self.last_page_len) + 1))

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        return self._attend(q, paged_kv_cache, lambda lane, _: [True] * self._kv_len(lane))
