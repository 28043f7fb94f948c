"""Functions that choose which kinds of rounds get CUDA graphs, and for which batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

from specpool._core import Shape
from specpool.capacity.group_sizes import DEFAULT_BATCH
from specpool.engine.attention import BackEnd
from specpool.engine.config import EngineConfig
from specpool.engine.draft import Drafter
from specpool.engine.shapes import config_of
from specpool.engine.shapes.router import StepRouter
from specpool.engine.worker.graphs.round_graph import RoundKind
from specpool.errors import ConfigError


def graph_sizes(
    config: EngineConfig, attention: BackEnd, *, has_capture: bool, keeps_state: bool
) -> tuple[int, ...]:
    """Return the batch sizes to capture, ascending; none if graphs cannot be captured.

    Raises:
        ConfigError: graphs cannot be captured, but `config.graph_sizes` asks for some.
    """
    why = None
    if not has_capture:
        why = "they need a CUDA device, and torch's cache of its memory"
    elif not attention.runs_in_graphs:
        why = f"attention {attention.name!r} plans each forward on the host"
    elif keeps_state:
        why = (
            "the target has recurrent layers, and how many recorded inputs a round reads differs "
            "from round to round"
        )
    if config.graph_sizes is None:
        return () if why else default_sizes(config.max_batch or DEFAULT_BATCH)
    if why and config.graph_sizes:
        raise ConfigError(f"graph_sizes {list(config.graph_sizes)} cannot be captured: {why}")
    return tuple(sorted(config.graph_sizes))


def default_sizes(max_batch: int) -> tuple[int, ...]:
    """Return the batch sizes that are captured if no option names any, up to `max_batch`.

    A round pays for all rows of its graph. Above 16 rows powers of two would waste up to half of
    them, these steps at most a third. There are 11 sizes up to 64 rows, 23 up to 256.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_batch, 16)]
    return (*(size for size in sizes if size < max_batch), max_batch)


def round_kinds(
    config: EngineConfig, sizes: Sequence[int], drafters: Sequence[Drafter], shape: Shape
) -> dict[RoundKind, list[int]]:
    """Return the kinds of rounds to capture, with the batch sizes of each.

    A controller's candidate is captured for the sizes at which it can be chosen.

    Args:
        config: gives the shapes and the candidates.
        sizes: all batch sizes to capture.
        drafters: the engine's; rounds of the first are captured.
        shape: the engine's own shape.
    """
    keeps_draft_kv = any(drafter.layers for drafter in drafters)
    kinds: dict[RoundKind, list[int]] = {}
    named = list(config.shapes)
    if config.adaptive is None:
        named.append(shape)
    else:
        ranges = config_of(config.adaptive).ranges
        router = StepRouter(ranges, graph_sizes=sizes)
        reach = router.graph_sizes_of(
            {key: batch_range.candidates for key, batch_range in ranges.items()}
        )
        kinds = {
            RoundKind(candidate, keeps_draft_kv): kind_sizes or []
            for candidate, kind_sizes in reach.items()
        }
    kinds |= {
        RoundKind(candidate, keeps_draft_kv): list(sizes)
        for candidate in named
        if candidate.num_steps
    }
    kinds[RoundKind(Shape.none(), False)] = list(sizes)  # for requests that opt out
    reads_tokens = bool(drafters) and drafters[0].reads_tokens  # which only the host knows
    return {
        kind: kind_sizes
        for kind, kind_sizes in kinds.items()
        if kind_sizes and not (reads_tokens and kind.shape.num_draft_tokens > 1)
    }
