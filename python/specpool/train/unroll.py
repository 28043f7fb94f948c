"""`unroll`: the loss of a head that drafts several tokens in a row from its own output.

A head drafts in a chain: step 0 reads the target's features, each later step the output of the step
before. So it is trained that way ("training-time test" in EAGLE-3, arXiv 2503.01840; HASS, arXiv
2408.15766). All entries of a text draft at once. In step j, entry i reads what entry i - 1 put out
in step j - 1, and attends to what drafting would show it: the entries of step 0 up to i - j, then
one entry of each step between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from specpool.engine.models import EagleHead
from specpool.train.reader import TargetReading

#: Step j of an unroll counts STEP_WEIGHT^j.
STEP_WEIGHT = 0.8


@dataclass(frozen=True, slots=True)
class Unrolled:
    """The result of an unroll of S steps.

    Attributes:
        loss: the weighted mean of the steps' losses: a scalar, cross entropy in nats between the
            target's distribution and the head's, over the draft vocabulary.
        agreeing: float32 [S]: entries whose likeliest token is the target's, in each step.
        drafted: float32 [S]: entries that count in each step.
    """

    loss: Tensor
    agreeing: Tensor
    drafted: Tensor


def unroll(head: EagleHead, reading: TargetReading, draft_ids: Tensor, num_steps: int) -> Unrolled:
    """Return the loss of `num_steps` draft steps at all entries of a batch.

    The target's likeliest token may be outside the draft vocabulary. Such an entry has no loss, and
    counts as one that does not agree.

    Args:
        head: the head, differentiable.
        reading: the batch, [B, n] entries.
        draft_ids: int64 [Vd], the target's ids of the draft vocabulary.
        num_steps: S, at least 1.
    """
    places = reading.entries % reading.tokens.shape[1]
    can_draft = torch.isin(reading.best, draft_ids)
    losses, weights = [], []
    agreeing, drafted = [], []
    for step, out in enumerate(draft_steps(head, reading, num_steps)):
        counts = places >= step  # earlier entries have no chain of this length behind them
        entries, best, learns = (
            array[counts] for array in (reading.entries, reading.best, can_draft)
        )
        logits = head.logits(out.index_select(0, entries)).float()
        agreeing.append((draft_ids[logits.detach().argmax(-1)] == best).sum())
        drafted.append(counts.sum())
        cross_entropy = -(reading.wanted[counts] * logits.log_softmax(-1)).sum(-1)
        losses.append((cross_entropy * learns).sum() / learns.sum().clamp(min=1))
        weights.append(STEP_WEIGHT**step)
    mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    assert isinstance(mean, Tensor)
    return Unrolled(mean, torch.stack(agreeing).float(), torch.stack(drafted).float())


def draft_steps(head: EagleHead, reading: TargetReading, num_steps: int) -> Iterator[Tensor]:
    """Yield what the head puts out at all entries in each step, [B * n, h]."""
    batch, n = reading.tokens.shape
    tokens = reading.tokens.flatten()
    positions = torch.arange(n, device=tokens.device).repeat(batch)
    hidden = head.combine(reading.features.to(head.dtype).flatten(0, 1))
    attention = _ChainAttention(batch)
    for _ in range(num_steps):
        out = head.forward(tokens, hidden, positions, attention.attend)
        yield out
        hidden = F.pad(out.view(batch, n, -1), (0, 0, 1, 0))[:, :n].flatten(0, 1)


class _ChainAttention:
    """The attention of one unroll; it keeps the keys and values of the steps so far."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._keys: list[Tensor] = []  # of each step, [B, H, n, D]
        self._values: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend as `EagleHead.forward` asks: q [B * n, H, D], k and v [B * n, Hk, D]."""
        groups = q.shape[1] // k.shape[1]
        q, k, v = (self._by_text(part) for part in (q, k, v))
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
        self._keys.append(k)
        self._values.append(v)
        if len(self._keys) == 1:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = self._chain(q)
        return out.transpose(1, 2).flatten(0, 1)

    def _by_text(self, x: Tensor) -> Tensor:
        """Return x [B * n, H, D] as [B, H, n, D]."""
        return x.reshape(self._batch, -1, *x.shape[1:]).transpose(1, 2)

    def _chain(self, q: Tensor) -> Tensor:
        """Attend to the prefix of step 0, and to one entry of each later step."""
        n, step, scale = q.shape[2], len(self._keys) - 1, q.shape[-1] ** -0.5
        places = torch.arange(n, device=q.device)
        prefix = q @ self._keys[0].transpose(2, 3) * scale
        hidden = places > (places - step).unsqueeze(1)
        prefix = prefix.masked_fill(hidden, torch.finfo(prefix.dtype).min)
        # Step s at entry i - (step - s): this step's own entry is the last.
        keys = [_shift(self._keys[s], step - s) for s in range(1, step + 1)]
        values = [_shift(self._values[s], step - s) for s in range(1, step + 1)]
        chain = [(q * k).sum(-1, keepdim=True) * scale for k in keys]
        p = torch.cat([prefix, *chain], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        out = p[..., :n] @ self._values[0]
        for s, v in enumerate(values):
            out = out + p[..., n + s, None] * v
        return out


def _shift(x: Tensor, distance: int) -> Tensor:
    """Return x [B, H, n, D] with entry i - `distance` at entry i, and zeros before."""
    return F.pad(x, (0, 0, distance, 0))[:, :, : x.shape[2]] if distance else x
