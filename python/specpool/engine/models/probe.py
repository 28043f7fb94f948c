"""`probe`: runs a model over a few pages once, and compares it with its own attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from specpool.engine.attention import AttentionBatch, AttentionView, View
from specpool.engine.memory.kv_cache import LayerKV
from specpool.engine.models.gate import refusal, text_config

if TYPE_CHECKING:
    from specpool.engine.models.device_lanes import DeviceLanes
    from specpool.engine.models.lane_states import LaneStates
    from specpool.engine.models.target_output import TargetOutput

# Keyword arguments of attention that paged attention may ignore. Any other argument that is not
# None asks for something that it does not do.
_HARMLESS_ARGUMENTS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
_PROBE_PAGE_SIZE = 2
_PROBE_TABLE = [[5, 2, 4], [6, 3, 1]]  # the pages of two lanes, in no particular order
_PROBE_PAGES = 6
# The first token of each text. One text that agrees is enough: in 16 bits a router of experts may
# choose another expert at a near tie, but a model that cannot run over pages differs on every text.
PROBE_TEXTS = (17, 60, 101, 150)
# The greatest relative difference of the logits, by dtype. Noise is far below it. A token that sees
# a wrong set of tokens is above it.
_TOLERANCE_16_BIT = 0.2
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}


def probe_tolerance(dtype: torch.dtype) -> float:
    """Return the greatest relative difference of logits that a probe accepts."""
    return _TOLERANCE.get(dtype, _TOLERANCE_16_BIT)


class Probed(Protocol):
    """The attributes of a model that a probe needs; `TargetModel` has them."""

    @property
    def config(self) -> Any:
        """The model's own config."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""

    @property
    def max_context_len(self) -> int:
        """The longest context in tokens."""

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that keep KV."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        *,
        states: Sequence[LaneStates | DeviceLanes] = (),
    ) -> TargetOutput:
        """Run one forward over pages; see `TargetModel.forward`."""

    def plain_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits of one text by the model's own attention."""


@dataclass(slots=True)
class ProbeBatch(AttentionBatch):
    """A batch that allocates a layer's buffers at its first call, and records each call."""

    kv: dict[int, tuple[Tensor, Tensor, View]] = field(default_factory=dict)
    calls: list[tuple[int, LayerKV]] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)

    def observe(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        window: int | None,
        sinks: Tensor | None,
        others: dict[str, Any],
    ) -> None:
        """Record one call of attention; query, key and value are [1, heads, T, D]."""
        kv_heads, num_tokens = key.shape[1:3]
        if value.shape[1:3] != key.shape[1:3] or query.shape[2] != num_tokens:
            self.objections.append(
                f"layer {layer} attends with {query.shape[2]} queries to {num_tokens} keys and"
                f" {value.shape[2]} values of one forward"
            )
        if kv_heads < 1 or query.shape[1] % kv_heads:
            self.objections.append(
                f"layer {layer} has {query.shape[1]} query heads for {kv_heads} KV heads"
            )
        if mask is not None and mask.is_floating_point():
            hidden = mask <= torch.finfo(mask.dtype).min / 2  # -inf, or the least number
            if (mask.masked_fill(hidden, 0) != 0).any():
                self.objections.append(f"layer {layer} adds a bias to its scores by its mask")
        for name, argument in others.items():
            if argument is not None and name not in _HARMLESS_ARGUMENTS:
                self.objections.append(f"layer {layer} gives attention an unknown {name!r}")
        shape = LayerKV(kv_heads, key.shape[3], value.shape[3], window, sinks is not None)
        self.calls.append((layer, shape))
        if layer not in self.kv:
            num_slots = (_PROBE_PAGES + 1) * _PROBE_PAGE_SIZE
            self.kv[layer] = (
                key.new_zeros(num_slots, kv_heads, key.shape[3]),
                value.new_zeros(num_slots, kv_heads, value.shape[3]),
                self.views[0],
            )


def probe(target: Probed) -> tuple[LayerKV, ...]:
    """Run a short text through the model's own attention and, in two parts, over pages.

    The text shares its batch with another lane, and its last token has a separate forward. So its
    logits change if the model has a state outside KV, takes positions from the order of the batch,
    or leaks from lane to lane.

    Returns:
        The KV of each layer, as seen in its calls.

    Raises:
        ConfigError: the model cannot run; the message has its type, the reason and the numbers.
    """
    limit = probe_tolerance(target.dtype)
    differences = []
    for start in PROBE_TEXTS:
        layer_kv, difference = _probe_text(target, start)
        if not difference > limit:  # NaN passes: broken weights are not a fault of paging
            return layer_kv
        differences.append(difference)
    raise refusal(
        target.config.model_type,
        "over pages it does not compute what it computes by itself: its logits differ by"
        f" {min(differences):.1e} (relative), more than {limit:.0e}; it may mix tokens outside"
        " attention, or transform logits in a way that specpool does not know",
    )


def _probe_text(target: Probed, start: int) -> tuple[tuple[LayerKV, ...], float]:
    """Probe one text; return the KV of the layers and the relative difference of the logits."""
    text, other = ([(first + 7 * i) % target.vocab_size for i in range(4)] for first in (start, 5))
    plain = target.plain_logits(text)
    first, pieces = _probe_forward(target, [other[:2], text[:3]], [0, 0], None)
    layer_kv = layers_seen(target, first, target.kv_layers)
    second, last = _probe_forward(target, [other[2:], text[3:]], [0, 3], first)
    layers_seen(target, second, target.kv_layers)
    paged = torch.cat([pieces[2:5], last[2:3]])
    return layer_kv, float((paged.float() - plain.float()).norm() / plain.float().norm())


def _probe_forward(
    target: Probed, lanes: list[list[int]], starts: list[int], earlier: ProbeBatch | None
) -> tuple[ProbeBatch, Tensor]:
    """Run one forward of two ragged lanes; return its batch and logits [T, V]."""
    batch, positions = probe_batch(target.device, [len(lane) for lane in lanes], starts, earlier)
    tokens = torch.tensor([token for lane in lanes for token in lane], device=target.device)
    try:
        logits = target.forward(tokens, positions, batch).logits
    except (TypeError, AttributeError) as error:
        raise refusal(
            target.config.model_type, f"its forward does not take a flattened batch ({error})"
        ) from error
    return batch, logits


def probe_batch(
    device: torch.device, widths: list[int], starts: list[int], earlier: ProbeBatch | None
) -> tuple[ProbeBatch, Tensor]:
    """Make a batch of two lanes from `starts` on, and its positions [T].

    It uses the buffers of an earlier forward, if there is one.
    """
    position_lists = [
        range(start, start + width) for start, width in zip(starts, widths, strict=True)
    ]

    def slot(lane: int, position: int) -> int:
        page, offset = divmod(position, _PROBE_PAGE_SIZE)
        return _PROBE_TABLE[lane][page] * _PROBE_PAGE_SIZE + offset

    def mask_for(window: int | None) -> Tensor:
        columns = len(_PROBE_TABLE[0]) * _PROBE_PAGE_SIZE
        visible = torch.zeros(2, max(widths), columns, dtype=torch.bool)
        visible[:, :, 0] = True  # padding queries must see something
        for lane, positions in enumerate(position_lists):
            for i, position in enumerate(positions):
                for j in range(columns):
                    is_in_window = window is None or position - j < window
                    visible[lane, i, j] = j <= position and is_in_window
        return visible

    slots = [
        slot(b, position) for b, positions in enumerate(position_lists) for position in positions
    ]
    view = AttentionView(
        page_size=_PROBE_PAGE_SIZE,
        write_slots=torch.tensor(slots, device=device),
        read_pages=torch.tensor(_PROBE_TABLE, device=device),
        q_lens=widths,
        mask_for=mask_for,
    )
    kv: dict[int, tuple[Tensor, Tensor, View]] = {}
    if earlier is not None:
        kv = {i: (k, v, view) for i, (k, v, _) in earlier.kv.items()}
    positions = torch.tensor([p for positions in position_lists for p in positions], device=device)
    return ProbeBatch(views=(view,), kv=kv), positions


def chunk_size(text: Any, layer: int) -> int | None:
    """Return the layer's chunk size by the config; None without chunked attention."""
    kinds = getattr(text, "layer_types", None) or ()
    if layer >= len(kinds) or kinds[layer] != "chunked_attention":
        return None
    return int(text.attention_chunk_size)


def _with_chunks(
    model_type: str, text: Any, layers: Sequence[tuple[int, LayerKV]]
) -> tuple[LayerKV, ...]:
    """Return the layers with their chunk sizes, which are in the config but not in the calls."""
    chunks = {chunk for layer, _ in layers if (chunk := chunk_size(text, layer)) is not None}
    if any(shape.window in chunks for _, shape in layers):
        raise refusal(model_type, f"some layers see chunks, others windows, both of {chunks}")
    return tuple(
        shape
        if (chunk := chunk_size(text, layer)) is None
        else replace(shape, window=chunk, is_chunked=True)
        for layer, shape in layers
    )


def layers_seen(target: Probed, batch: ProbeBatch, expected: Sequence[int]) -> tuple[LayerKV, ...]:
    """Check that each expected layer attended once, with the window that the config states.

    Returns:
        The KV of each layer.

    Raises:
        ConfigError: a layer did not, or a call asked for something that paging cannot do.
    """
    model_type, text = target.config.model_type, text_config(target.config)
    if batch.objections:
        raise refusal(model_type, batch.objections[0])
    seen = [layer for layer, _ in batch.calls]
    if sorted(seen) != list(expected):
        raise refusal(
            model_type,
            f"{len(expected)} layers should each call attention once; the calls came from"
            f" layers {seen}",
        )
    calls = sorted(batch.calls, key=lambda call: call[0])
    layers = _with_chunks(model_type, text, calls)
    # Some models put a window only into their masks, which paged attention ignores.
    window = getattr(text, "sliding_window", None)
    if window is None or window >= target.max_context_len:
        return layers
    kinds = getattr(text, "layer_types", None)
    for index, layer in zip(expected, layers, strict=True):
        windowed = kinds is not None and kinds[index] == "sliding_attention"
        if kinds is None:
            windowed = all(kv.window is None for kv in layers)
        if windowed and layer.window is None:
            raise refusal(
                model_type,
                f"the config gives layer {index} a window of {window}, but the layer does not ask"
                " attention for it",
            )
    return layers
