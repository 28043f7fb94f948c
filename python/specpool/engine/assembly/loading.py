"""`load`: loads the target, drafter and tokenizer of an engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union, cast

import torch

from specpool.checks import shown
from specpool.engine.assembly.ranked import agree_before, for_ranks
from specpool.engine.assets import resolve
from specpool.engine.config import EngineConfig
from specpool.engine.draft import (
    BlockDrafter,
    Drafter,
    EagleDrafter,
    LMDrafter,
    MTPDrafter,
    named_drafter,
)
from specpool.engine.models import TargetModel
from specpool.engine.models.files.checkpoint import find_folder
from specpool.engine.models.files.draft_kind import is_block_head, is_language_model
from specpool.engine.models.files.names import MTP, fetch_config, find_model
from specpool.engine.models.placement import check_dtype
from specpool.engine.models.target_folder import find_target, load_config
from specpool.engine.ranks.group import Ranks
from specpool.engine.text.tokenizer import check_tokenizer, load_tokenizer
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger("specpool")

#: What a drafter is made of: a folder, a hub name, `mtp`, a name of `named_drafter`, or a loaded
#: model; or it is a drafter already.
Draft: TypeAlias = Union[str, PathLike[str], Drafter, "PreTrainedModel"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A target model, with a drafter and a tokenizer if there are any."""

    target: TargetModel
    drafters: dict[str, Drafter]
    tokenizer: PreTrainedTokenizerBase | None
    config: EngineConfig  # as ranks need it, if there are any
    folder: Path | None  # of the target; None if it was passed in

    def close(self) -> None:
        """Restore the attention of models that were passed in."""
        close_models(self.target, self.drafters)


def close_models(target: TargetModel, drafters: Mapping[str, Drafter]) -> None:
    """Close the target, and the drafters that have a model of their own."""
    for drafter in drafters.values():
        if isinstance(drafter, LMDrafter | MTPDrafter):
            drafter.close()
    target.close()


def load(
    target: str | PathLike[str] | PreTrainedModel,
    draft: Draft | Sequence[Draft] | Mapping[str, Draft] | None,
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
    if ranks is not None and not isinstance(ranks, Ranks):
        raise ConfigError(f"ranks must be what `Ranks.join` returns, got {shown(ranks)}")
    config = for_ranks(config, ranks)
    if feature_layers is not None and not (
        isinstance(feature_layers, Sequence)
        and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in feature_layers)
    ):
        raise ConfigError(f"feature_layers must be layer numbers, got {shown(feature_layers)}")
    check_tokenizer(tokenizer)
    drafts = _drafts_by_name(draft)
    if feature_layers is not None and not any(map(_is_head, drafts.values())):
        raise ConfigError(
            f"feature_layers {shown(feature_layers)} are for an EAGLE head that is read from a "
            "checkpoint, and no draft is one: leave them out"
        )
    for spec in drafts.values():
        _check_exists(spec)
    check_dtype(dtype)
    folder = None
    if isinstance(target, str | PathLike):
        name = resolve(target) if isinstance(target, str) else target
        with_mtp = any(isinstance(spec, str) and spec == MTP for spec in drafts.values())
        source = find_target(name, trust_remote_code=trust_remote_code, with_mtp=with_mtp)
        load_config(source)  # refuse a wrong model before a wrong tokenizer
        folder = source.path
        if tokenizer is None:
            tokenizer = load_tokenizer(source.path, trust_remote_code=trust_remote_code)
        device = device if ranks is None else ranks.device
        dtype = ("float32" if str(device) == "cpu" else "auto") if dtype is None else dtype
        if ranks is not None:
            known = [_folder_or_kind(spec) for spec in drafts.values()]
            agree_before(ranks, config, target=source.path, drafts=known, dtype=dtype)
        model = TargetModel.from_pretrained(
            source, dtype=dtype, device=device, world=1 if ranks is None else ranks.world
        )
        if ranks is None and config.packed_weight_bytes:  # each rank would choose by its own clock
            num_bytes = model.pack(config.packed_weight_bytes)
            if num_bytes:
                _log.info("a second copy of %d bytes of weights is packed for oneDNN", num_bytes)
    elif ranks is not None:
        raise ConfigError(f"{ranks.world} ranks load their parts themselves: give a folder")
    else:
        model = TargetModel.from_pretrained(target, dtype=dtype)
    loaded = Loaded(model, {}, tokenizer, config, folder)
    try:
        for name, spec in drafts.items():
            loaded.drafters[name] = _drafter(
                spec, loaded, config, feature_layers, trust_remote_code=trust_remote_code
            )
        return loaded
    except BaseException:
        loaded.close()
        raise


def _drafts_by_name(
    draft: Draft | Sequence[Draft] | Mapping[str, Draft] | None,
) -> dict[str, Draft]:
    """Return the drafts by name: a mapping's keys, else what a string says, or a type's name.

    Raises:
        ConfigError: a draft has a wrong type, or two have one name.
    """
    if draft is None or draft == "none":
        return {}
    if isinstance(draft, Mapping):
        pairs = list(draft.items())
    elif isinstance(draft, Sequence) and not isinstance(draft, str):
        pairs = [(_name(spec), spec) for spec in draft]
    else:
        pairs = [(_name(draft), draft)]
    if not pairs:
        raise ConfigError("draft is empty: give a draft, or None for plain decoding")
    by_name: dict[str, Draft] = {}
    for name, spec in pairs:
        is_known = isinstance(spec, str | PathLike) or hasattr(spec, "propose")
        if not (is_known or hasattr(spec, "generate")) or spec in ("", "none"):
            raise ConfigError(
                f"draft must be a folder, a hub name, a model, a drafter or None, got {shown(spec)}"
            )
        by_name[name] = (named_drafter(spec) or spec) if isinstance(spec, str) else spec
    names = [name for name, _ in pairs]
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a drafter's name must be a string, got {shown(name)}")
        if names.count(name) > 1:
            raise ConfigError(f"two drafters are named {shown(name)}: name them, in a mapping")
    return by_name


def _check_exists(draft: Draft) -> None:
    """Refuse the path or the hub name of no draft, before the target's weights are read."""
    if isinstance(draft, PathLike):
        find_folder(draft)
    elif isinstance(draft, str) and draft != MTP and find_model(draft) is None:
        fetch_config(draft)


def _name(draft: object) -> str:
    return str(draft) if isinstance(draft, str | PathLike) else type(draft).__name__


def _drafter(
    draft: Draft,
    loaded: Loaded,
    config: EngineConfig,
    feature_layers: Sequence[int] | None,
    *,
    trust_remote_code: bool,
) -> Drafter:
    """Load one draft for the target: its MTP layer, or by files, a head or a model."""
    if hasattr(draft, "propose"):
        return cast("Drafter", draft)
    if draft == MTP:
        if loaded.folder is None:
            raise ConfigError(
                "draft 'mtp' is in the target's checkpoint, and a loaded model has none: give the "
                "target's folder, or MTPDrafter.from_pretrained(folder, ...)"
            )
        return MTPDrafter.from_pretrained(loaded.folder, loaded.target)
    if isinstance(draft, str | PathLike):
        source = _source(draft)
        if is_block_head(source):
            return BlockDrafter.from_pretrained(source, loaded.target)
        if not is_language_model(source):
            return EagleDrafter.from_pretrained(
                source, loaded.target, feature_layers=feature_layers
            )
        draft = source
    return LMDrafter.from_pretrained(
        cast("str | PathLike[str] | PreTrainedModel", draft),
        loaded.target,
        tokenizer=loaded.tokenizer,
        max_context_len=config.max_context_len,
        trust_remote_code=trust_remote_code,
    )


def _is_head(draft: Draft) -> bool:
    """Return whether a draft is the checkpoint of an EAGLE head."""
    if draft == MTP or not isinstance(draft, str | PathLike):
        return False
    source = _source(draft)
    return not (is_block_head(source) or is_language_model(source))


def _source(draft: str | PathLike[str]) -> str | PathLike[str]:
    """Return the folder or hub name of a draft."""
    return resolve(draft) if isinstance(draft, str) else draft


def _folder_or_kind(draft: Draft) -> Path | str:
    """Return a draft model's folder; without one, the name of the draft's kind."""
    if draft == MTP:
        return MTP  # in the target's files, which are compared too
    source = find_model(draft) if isinstance(draft, str) else draft
    return Path(source) if isinstance(source, str | PathLike) else type(draft).__name__
