"""Tensor parallelism: which models can be cut into ranks, and by which plan of transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from specpool.engine.models.gate import has_recurrent_layers, text_config
from specpool.errors import ConfigError


def sharded(config: Any, model_class: type, world: int) -> dict[str, Any]:
    """Return the options of `from_pretrained` that load one rank's part of a model.

    Raises:
        ConfigError: the model has no plan, the plan leaves attention whole, or heads do not divide;
            the message has the numbers.
    """
    name, text = config.model_type, text_config(config)
    if has_recurrent_layers(config):
        raise ConfigError(f"{name!r} has recurrent layers, which {world} ranks cannot share")
    plan = _plan(config, model_class)
    if not plan:
        raise ConfigError(
            f"{name!r} cannot be shared by {world} ranks: transformers has no tensor parallel plan "
            f"for {model_class.__name__}"
        )
    options = _options(world)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    for kind, heads in (("KV heads", kv_heads), ("attention heads", text.num_attention_heads)):
        if not isinstance(heads, int) or heads % world:
            raise ConfigError(f"{name!r} has {heads} {kind}, which {world} ranks cannot share")
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    if get_kv_heads_per_rank(plan, kv_heads, world) == kv_heads:
        raise ConfigError(
            f"{name!r} cannot be shared by {world} ranks: transformers' plan for it leaves all "
            f"{kv_heads} KV heads on each rank"
        )
    return options


def _plan(config: Any, model_class: type) -> dict[str, str]:
    """Return transformers' plan for a class, before a model of it is built."""
    plan: dict[str, str] = {}
    base = getattr(text_config(config), "base_model_tp_plan", None)
    for part in (base, getattr(config, "base_model_tp_plan", None)):
        plan |= part if isinstance(part, Mapping) else {}
    return plan and plan | dict(getattr(model_class, "_tp_plan", None) or {})


def _options(world: int) -> dict[str, Any]:
    import transformers

    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(f"{world} ranks need accelerate: pip install 'specpool[ranks]'")
    try:
        from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]
        from transformers.distributed.tensor_parallel import get_kv_heads_per_rank  # noqa: F401

        return {"distributed_config": DistributedConfig(tp_size=world)}
    except (ImportError, TypeError):
        raise ConfigError(
            f"{world} ranks need transformers' DistributedConfig with tp_size, which version "
            f"{transformers.__version__} does not have: update transformers"
        ) from None
