"""The attention function that transformers calls for each layer of a target."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from specpool.attention import AttentionBatch, attend
from specpool.errors import ConfigError
from specpool.models.probe import ProbeBatch
from specpool.models.recurrent import ATTENDING

_ATTENTION = "specpool"
# The batch of the forward that is running, None outside.
_BATCH: ContextVar[AttentionBatch | None] = ContextVar("specpool_batch", default=None)
_NO_MODULE = nn.Identity()  # of calls whose layer a cache has noted


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: query [B, H, n, D] after rope -> ([B, n, H, Dv], None).

    Where lanes are flattened to one sequence, B is 1 and n all tokens.

    `attention_mask` is not used: what a query may see comes from the batch's views.
    """
    batch = _BATCH.get()
    if batch is None:
        raise ConfigError(
            "this model runs over specpool's pages: close its Engine (or TargetModel) first"
        )
    told = ATTENDING.get()
    layer = int(module.layer_idx) if told is None else told  # type: ignore[arg-type]
    if isinstance(batch, ProbeBatch):
        batch.observe(layer, query, key, value, attention_mask, sliding_window, s_aux, others)
    k_buffer, v_buffer, view = batch.kv[layer]
    out = attend(
        view,
        k_buffer,
        v_buffer,
        query.transpose(1, 2).flatten(0, 1),
        key.transpose(1, 2).flatten(0, 1),
        value.transpose(1, 2).flatten(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    # Transformers' own functions give one block of memory, and some models rely on it.
    return out.contiguous().view(query.shape[0], query.shape[2], *out.shape[1:]), None


def _torch_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same for models that call torch's function: -> [B, H, n, Dv]."""
    out, _ = _paged_attention(_NO_MODULE, query, key, value, None)
    return out.transpose(1, 2)


def _register() -> None:
    """Have transformers find our attention by its name.

    NOTE: only the function is registered. Without a mask function of the same name transformers
    builds no mask at all, which is what we want.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _paged_attention)
