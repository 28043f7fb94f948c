"""The flashinfer back end: CUDA kernels that read whole pages, or single slots, in place.

Prefill is causal, verify has a custom mask, plain decoding and the steps of a draft have one query
per reader. Each is planned once per view and kind of layer; layers of a kind share the plan.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from specpool.attention.page_indices import DecodeIndices, Indices, indices_of
from specpool.attention.view import Attend, AttentionView
from specpool.errors import ConfigError
from specpool.memory.layer_kv import LayerKV

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_DIMS = (64, 128, 256)
# Query heads per KV head that the decode kernel without tensor cores is compiled for, below the
# number from which tensor cores are faster.
_SMALL_GROUPS = (1, 2, 3)
_WORKSPACE_BYTES = 128 << 20  # what flashinfer recommends


def missing() -> str | None:
    """What this machine lacks to run flashinfer; None = nothing."""
    if importlib.util.find_spec("flashinfer") is None:
        return "the package is not installed: pip install 'specpool[flashinfer]'"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None


def start(
    device: torch.device, dtype: torch.dtype, layers: Sequence[LayerKV], model_type: str
) -> Attend:
    """An `attend` for one engine; see `BackEnd.start`.

    Raises:
        ConfigError: it is not here, or these layers ask for what it cannot do.
    """
    lack = missing()
    if lack is not None:
        raise _refusal(lack)
    if device.type != "cuda":
        raise _refusal(f"it needs a CUDA device, the model is on {device}")
    check_layers(dtype, layers, model_type)
    try:
        library = importlib.import_module("flashinfer")
    except Exception as error:  # what a broken installation raises is of many types
        raise _refusal(f"importing it failed: {error!r:.200}") from error
    return FlashInfer(library, device).attend


def check_layers(dtype: torch.dtype, layers: Sequence[LayerKV], model_type: str) -> None:
    """Raise `ConfigError` for layers that it has no kernel for."""
    if dtype not in _DTYPES:
        raise _refusal(f"it computes in float16 or bfloat16, the model in {_name(dtype)}")
    for number, layer in enumerate(layers):
        where = f"layer {number} of {model_type}"
        if layer.has_sinks:
            raise _refusal(f"{where} has attention sinks, which it does not know")
        if layer.k_head_dim != layer.v_head_dim or layer.k_head_dim not in _HEAD_DIMS:
            raise _refusal(
                f"{where} has heads of {layer.k_head_dim} (keys) and {layer.v_head_dim} (values), "
                f"its kernels both of {', '.join(map(str, _HEAD_DIMS))}"
            )


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"attention 'flashinfer' cannot be used: {reason}; 'torch' works")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a plan depends on beside the view: layers that agree in it share one."""

    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scaling: float
    softcap: float | None


class _Plan:
    """A wrapper of flashinfer's that is planned for one view and kind of layer."""

    def __init__(self, wrapper: Any, page_size: int) -> None:
        self.wrapper, self.page_size = wrapper, page_size


class FlashInfer:
    """flashinfer for the views of one engine."""

    def __init__(self, library: Any, device: torch.device) -> None:
        """Take the working memory that all plans share.

        Args:
            library: the flashinfer module.
            device: of the pages.
        """
        self._library, self._device = library, device
        # Zeros: flashinfer wants it so at its first use.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # Wrappers that no view uses, by kind, in the order in which they became idle; and when the
        # copies of their last plan are through.
        self._idle: dict[str, deque[tuple[Any, Any]]] = {}

    def attend(
        self,
        view: AttentionView,
        k_buffer: Tensor,
        v_buffer: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `specpool.attention.attend`.

        Raises:
            ConfigError: sinks.
            ShapeError: a mask or lengths that do not fit the view; nothing is written.
        """
        if sinks is not None:
            raise _refusal("a layer has attention sinks, which it does not know")
        layer = _Layer(
            window,
            q.shape[1],
            k_buffer.shape[1],
            q.shape[2],
            k_buffer.dtype,
            scaling,
            softcap,
        )
        plan = view.plans.get(layer)
        if not isinstance(plan, _Plan):
            plan = view.plans[layer] = self._plan(indices_of(view, window), layer)
        k_buffer.index_copy_(0, view.write_slots, k.to(k_buffer.dtype))
        v_buffer.index_copy_(0, view.write_slots, v.to(v_buffer.dtype))
        pages = tuple(
            buffer.view(-1, plan.page_size, *buffer.shape[1:]) for buffer in (k_buffer, v_buffer)
        )
        # Queries that a model made in float32 are read as its keys are.
        out: Tensor = plan.wrapper.run(q.to(layer.dtype).contiguous(), pages)
        return out.to(q.dtype)

    def _plan(self, indices: Indices, layer: _Layer) -> _Plan:
        options: dict[str, Any] = {
            # NOTE: flashinfer counts a window by index, so it is in the mask, and off here.
            "window_left": -1,
            "logits_soft_cap": layer.softcap,
            "sm_scale": layer.scaling,
            "q_data_type": layer.dtype,
            "kv_data_type": layer.dtype,
        }
        sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim, indices.pages.page_size)
        csr = (
            indices.pages.kv_indptr,
            indices.pages.kv_indices,
            indices.pages.kv_last_page_len,
        )
        if isinstance(indices, DecodeIndices):
            is_small = layer.num_heads // layer.num_kv_heads in _SMALL_GROUPS
            kind = "decode" if is_small else "decode, tensor cores"
            wrapper = self._take(kind)
            wrapper.plan(*csr, *sizes, **options)
        else:
            kind = "prefill"
            wrapper = self._take(kind)
            # NOTE: never `packed_custom_mask`: its offsets are taken for bits (flashinfer#2201).
            mask = indices.custom_mask
            options |= {"custom_mask": mask, "causal": mask is None}
            wrapper.plan(indices.qo_indptr, *csr, *sizes, **options)
        plan = _Plan(wrapper, indices.pages.page_size)
        planned = None
        if self._device.type == "cuda":
            make_event: Any = torch.cuda.Event  # which has types in some versions of torch only
            planned = make_event()
            planned.record()
        finalize(plan, self._idle[kind].append, (wrapper, planned)).atexit = False
        return plan

    def _take(self, kind: str) -> Any:
        """A wrapper that no view uses.

        NOTE: one plan's numbers go to the device out of the wrapper's pinned memory: until they are
        there, the next plan must not write it.
        """
        idle = self._idle.setdefault(kind, deque())
        if idle:
            wrapper, planned = idle[0]
            if planned is None or planned.query():
                idle.popleft()
                return wrapper
        # "fa2" is the kernel that takes custom masks.
        if kind == "prefill":
            return self._library.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend="fa2"
            )
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=kind != "decode", backend="fa2"
        )
