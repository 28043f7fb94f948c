"""The flashinfer back end: CUDA kernels that read whole pages, or single slots, in place.

A prefill is causal, a verify has a custom mask, and plain decoding and draft steps have one query
per reader. A forward is planned once per view and kind of layer; layers of one kind share the plan.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from specpool.capacity.layer_kv import LayerKV
from specpool.engine.attention.flashinfer.graphs import Recorder, Wrapper, splits_no_lane
from specpool.engine.attention.flashinfer.page_indices import DecodeIndices, Indices, indices_of
from specpool.engine.attention.view import AttentionView
from specpool.engine.attention.writes import write_kv
from specpool.errors import ConfigError
from specpool.kernels.transfer import mark

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_DIMS = (64, 128, 256)
# Query heads per KV head that the decode kernel without tensor cores is compiled for, below the
# number from which tensor cores are faster.
_SMALL_GROUPS = (1, 2, 3)
_OLDEST = (0, 7, 2)  # the first version that was read; older ones name buffers differently
_WORKSPACE_BYTES = 128 << 20  # what flashinfer recommends


def missing() -> str | None:
    """Return what this machine lacks to run flashinfer, as a sentence; None if it lacks nothing."""
    if importlib.util.find_spec("flashinfer") is None:
        return "the package is not installed: pip install 'specpool[flashinfer]'"
    version = _version()
    if version is not None and _numbers(version) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        return f"version {version} is older than {oldest}: pip install 'specpool[flashinfer]'"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None


def _version() -> str | None:
    """Return the installed version; None if the package does not say."""
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, as (0, 7, 2) of 0.7.2rc1+cu130."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def start(
    device: torch.device, dtype: torch.dtype, layers: Sequence[LayerKV], model_type: str
) -> FlashInfer:
    """Return flashinfer for one engine; see `BackEnd.start`.

    Raises:
        ConfigError: flashinfer is missing, too old or broken, there is no CUDA device, or
            flashinfer cannot serve these layers.
    """
    lack = missing()
    if lack is not None:
        raise _refusal(lack)
    if device.type != "cuda":
        raise _refusal(f"it needs a CUDA device, the model is on {device}")
    check_layers(dtype, layers, model_type)
    try:
        library = importlib.import_module("flashinfer")
    except Exception as error:  # a broken installation may raise anything
        raise _refusal(f"importing it failed: {error!r:.200}") from error
    return FlashInfer(library, device)


def check_layers(dtype: torch.dtype, layers: Sequence[LayerKV], model_type: str) -> None:
    """Raise `ConfigError` if flashinfer has no kernel for one of these layers."""
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
    """The key of a plan within a view: layers with equal keys share a plan."""

    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scaling: float
    softcap: float | None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of a wrapper's `plan` that follow from the layer."""
        return {
            "logits_soft_cap": self.softcap,
            "sm_scale": self.scaling,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


class _Plan:
    """A flashinfer wrapper that is planned for one view and kind of layer."""

    def __init__(self, wrapper: Any, page_size: int) -> None:
        self.wrapper, self.page_size = wrapper, page_size


class FlashInfer:
    """The flashinfer wrappers and workspace of one engine."""

    def __init__(self, library: Any, device: torch.device) -> None:
        """Allocate the workspace that all plans share (128 MiB).

        Args:
            library: the flashinfer module.
            device: where the pages are.
        """
        self._library, self._device = library, device
        # flashinfer needs a workspace of zeros at its first use.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # Kind -> idle wrappers, longest idle first, each with the event after its last plan's
        # copies.
        self._idle: dict[str, deque[tuple[Any, Any]]] = {}
        # The wrappers within graphs, by place in the graph, layer, lanes, queries and page size.
        self._in_graphs: dict[Hashable, Wrapper] = {}

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
        recorder: Recorder | None = None,
    ) -> Tensor:
        """Attend with flashinfer; see `specpool.engine.attention.attend`.

        `recorder`: the recorder of the graph whose work this is; None if it is not a graph's.

        Raises:
            ConfigError: the layer has attention sinks.
            ShapeError: a mask or lengths do not fit the view; nothing is written.
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
        if recorder is None:
            plan = view.plans.get(layer)
            if not isinstance(plan, _Plan):
                plan = view.plans[layer] = self._plan(indices_of(view, window), layer)
            wrapper, page_size = plan.wrapper, plan.page_size
        else:
            wrapper, page_size = recorder.wrapper(view, layer, window), view.page_size
        write_kv(k_buffer, v_buffer, view.write_slots, k, v)
        pages = tuple(
            buffer.view(-1, page_size, *buffer.shape[1:]) for buffer in (k_buffer, v_buffer)
        )
        # A model may compute queries in float32; convert them to the dtype of the keys.
        out: Tensor = wrapper.run(q.to(layer.dtype).contiguous(), pages)
        return out.to(q.dtype)

    def recorder(self, bound: int) -> Recorder:
        """Return a recorder for a graph whose roots lie up to `bound`."""
        return Recorder(bound, self._wrapper_in_graphs, self.attend)

    def _wrapper_in_graphs(
        self, use_index: int, view: AttentionView, num_columns: int, layer: Hashable
    ) -> Wrapper:
        assert isinstance(layer, _Layer)
        key = (use_index, layer, view.num_lanes, view.max_q_len, view.page_size)
        wrapper = self._in_graphs.get(key)
        if wrapper is None or wrapper.num_columns < num_columns:
            options = {
                "num_qo_heads": layer.num_heads,
                "num_kv_heads": layer.num_kv_heads,
                "head_dim_qk": layer.head_dim,
                "page_size": view.page_size,
                "disable_split_kv": splits_no_lane(
                    view.num_lanes, view.max_q_len, layer.num_heads, layer.num_kv_heads
                ),
                **layer.options,
            }
            wrapper = Wrapper(self._library, self._workspace, view, num_columns, options)
            self._in_graphs[key] = wrapper
        return wrapper

    def _plan(self, indices: Indices, layer: _Layer) -> _Plan:
        window = indices.window
        options = layer.options | {"window_left": -1 if window is None else window - 1}
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
        finalize(plan, self._idle[kind].append, (wrapper, mark(self._device))).atexit = False
        return plan

    def _take(self, kind: str) -> Any:
        """Return a wrapper that no view uses, an idle one or a new one.

        NOTE: a plan is copied to the device from the wrapper's pinned memory. A wrapper must not be
        planned again before that copy is done.
        """
        idle = self._idle.setdefault(kind, deque())
        if idle:
            wrapper, planned = idle[0]
            if planned is None or planned.query():
                idle.popleft()
                return wrapper
        # Only the "fa2" kernels take custom masks.
        if kind == "prefill":
            return self._library.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend="fa2"
            )
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=kind != "decode", backend="fa2"
        )
