"""The attention function that transformers calls for each layer of a target."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from specpool.engine.attention import AttentionBatch, attend
from specpool.engine.models.probe import ProbeBatch
from specpool.engine.models.recurrent import ATTENDING
from specpool.errors import ConfigError

_ATTENTION = "specpool"
# The batch of the running forward; None outside of one.
_BATCH: ContextVar[AttentionBatch | None] = ContextVar("specpool_batch", default=None)
_NO_MODULE = nn.Identity()  # stands for the module in calls whose layer is in ATTENDING


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
    """Attend over pages, as transformers' attention function of a layer.

    `query` is [B, H, n, D] after RoPE, `key` and `value` are [B, Hkv, n, D]; the result is
    ([B, n, H, Dv], None). If lanes are flattened to one sequence, B is 1 and n counts all tokens.
    `attention_mask` is not used, because the batch's views say what a query may see.
    """
    batch = _BATCH.get()
    if batch is None:
        raise ConfigError(
            "this model runs over specpool's pages: close its Engine (or TargetModel) first"
        )
    layer_of_call = ATTENDING.get()
    layer = int(module.layer_idx) if layer_of_call is None else layer_of_call  # type: ignore[arg-type]
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
        window=batch.window_of(sliding_window),
        softcap=softcap,
        sinks=s_aux,
    )
    # Some models rely on a contiguous result, as transformers' own functions give.
    return out.contiguous().view(query.shape[0], query.shape[2], *out.shape[1:]), None


def _torch_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Do the same for models that call torch's function; return [B, H, n, Dv]."""
    out, _ = _paged_attention(_NO_MODULE, query, key, value, None)
    return out.transpose(1, 2)


def _register() -> None:
    """Register paged attention with transformers by its name.

    NOTE: no mask function of that name is registered, so that transformers builds no mask.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _paged_attention)
