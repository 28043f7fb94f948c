"""`load`: loads the target, drafter and tokenizer of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specpool.assembly.ranked import agree_before, for_ranks
from specpool.assets import resolve
from specpool.config import EngineConfig
from specpool.draft import Drafter, EagleDrafter, named_drafter
from specpool.errors import ConfigError
from specpool.models import TargetModel
from specpool.models.files.names import find_model
from specpool.models.placement import check_dtype
from specpool.models.target_folder import find_target, load_config
from specpool.ranks.group import Ranks
from specpool.text.tokenizer import check_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Loaded:
    """A target model, with a drafter and a tokenizer if there are any."""

    target: TargetModel
    drafter: Drafter | None
    tokenizer: PreTrainedTokenizerBase | None
    config: EngineConfig  # as ranks need it, if there are any


def load(
    target: str | PathLike[str] | PreTrainedModel,
    draft: str | PathLike[str] | Drafter | None,
    *,
    config: EngineConfig,
    dtype: str | torch.dtype | None,
    device: str | torch.device,
    tokenizer: PreTrainedTokenizerBase | None,
    feature_layers: Sequence[int] | None,
    trust_remote_code: bool,
    ranks: Ranks | None = None,
) -> Loaded:
    """Load the models of `Engine.from_pretrained`, which documents the arguments.

    Raises:
        ConfigError: a path, an option or a checkpoint does not fit.
    """
    config = for_ranks(config, ranks)
    if feature_layers is not None and not (
        isinstance(feature_layers, Sequence)
        and all(isinstance(layer, int) for layer in feature_layers)
    ):
        raise ConfigError(f"feature_layers must be layer numbers, got {feature_layers!r:.80}")
    check_tokenizer(tokenizer)
    if isinstance(draft, str):
        draft = None if draft == "none" else named_drafter(draft) or draft
    if not (draft is None or isinstance(draft, str | PathLike) or hasattr(draft, "propose")) or (
        draft == ""
    ):
        raise ConfigError(
            f"draft must be a folder, a hub name, a drafter or None, got {draft!r:.80}"
        )
    check_dtype(dtype)
    if isinstance(target, str | PathLike):
        name = resolve(target) if isinstance(target, str) else target
        source = find_target(name, trust_remote_code=trust_remote_code)
        load_config(source)  # refuse a wrong model before a wrong tokenizer
        if tokenizer is None:
            tokenizer = load_tokenizer(source.path, trust_remote_code=trust_remote_code)
        device = device if ranks is None else ranks.device
        dtype = ("float32" if str(device) == "cpu" else "auto") if dtype is None else dtype
        if ranks is not None:
            agree_before(ranks, config, target=source.path, draft=_known(draft), dtype=dtype)
        model = TargetModel.from_pretrained(
            source, dtype=dtype, device=device, world=1 if ranks is None else ranks.world
        )
    elif ranks is not None:
        raise ConfigError(f"{ranks.world} ranks load their parts themselves: give a folder")
    else:
        model = TargetModel.from_pretrained(target, dtype=dtype)
    try:
        drafter: Drafter | None
        if isinstance(draft, str | PathLike):
            drafter = EagleDrafter.from_pretrained(
                resolve(draft) if isinstance(draft, str) else draft,
                model,
                ancestry=config.ancestry,
                feature_layers=feature_layers,
            )
        else:
            drafter = draft
        return Loaded(model, drafter, tokenizer, config)
    except BaseException:
        model.close()
        raise


def _known(draft: str | PathLike[str] | Drafter | None) -> Path | str | None:
    """Return a draft model's folder, or the name of what is no folder."""
    draft = find_model(draft) if isinstance(draft, str) else draft
    if isinstance(draft, str | PathLike) or draft is None:
        return None if draft is None else Path(draft)
    return type(draft).__name__
