"""`routed`: chooses the worker: v2, or the synchronous v1."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from specpool._core import Shape
from specpool.engine.config import EngineConfig, WorkerName
from specpool.engine.draft.base import Drafter
from specpool.engine.models.target import TargetModel
from specpool.errors import ConfigError

_log = logging.getLogger("specpool")


def routed(
    config: EngineConfig,
    target: TargetModel,
    drafters: Sequence[Drafter],
    shapes: Sequence[Shape],
) -> WorkerName:
    """Return the worker's name: the configured one, or v2; v1 for a target with recurrent layers.

    For such a target with worker `auto`, log a warning with the reason.

    Raises:
        ConfigError: a target with recurrent layers cannot run with these options.
    """
    if not target.keeps_state:
        return "v2" if config.worker == "auto" else config.worker
    kind = f"{target.config.model_type!r} has recurrent layers: a row's state holds all its tokens"
    if config.worker == "v2" or config.overlap_depth:
        raise ConfigError(
            f"{kind} and cannot run ahead of them: it needs worker 'v1' and overlap_depth 0, got "
            f"{config.worker!r} and {config.overlap_depth}"
        )
    if config.host_bytes:
        raise ConfigError(
            f"{kind} and cannot wait on the host: host_bytes must be 0, got {config.host_bytes}"
        )
    for shape in shapes:
        if shape.topk > 1 or shape.num_draft_tokens > shape.num_steps + 1:
            raise ConfigError(
                f"{kind}, and a tree would need one for each node: it needs chains (topk 1), got "
                f"{shape}"
            )
    if any(drafter.layers or not drafter.reads_tokens for drafter in drafters):
        raise ConfigError(f"{kind}, and no drafter with a model runs beside it: draft with 'ngram'")
    if config.worker == "auto":
        _log.warning(
            "%s, which is saved before each round and replayed over what the round accepted: "
            "it runs on the synchronous worker (v1)",
            kind,
        )
    return "v1"
