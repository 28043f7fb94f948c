"""`TargetReader`: what a target says of texts, by the forward over pages that serves requests.

A head that is trained on other features than those it will read when it drafts is trained for
another model. So the features come from `TargetModel.forward`, with the pages, the views and the
attention back end of an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specpool.engine.assembly.assembly import assemble
from specpool.engine.attention import AttentionBatch
from specpool.engine.attention.lanes import Lanes, causal_view
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.config import EngineConfig
from specpool.engine.models import TargetModel
from specpool.train.texts import Text

_PAGE_SIZE = 16
# The most tokens whose logits over the target's whole vocabulary are in memory at the same time.
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class TargetReading:
    """What the target says of a batch of texts.

    Entry i of a text is what a head reads at position i: the features of i and the token at i + 1.
    It predicts the token at i + 2, for which the target's distribution is known at i + 1. An entry
    counts if its token is to be learned.

    Attributes:
        tokens: int64 [B, n], the token at i + 1; 0 behind a text's end.
        features: [B, n, f], the features of i; 0 behind a text's end.
        entries: int64 [M], the entries that count, as indices into [B * n].
        wanted: float32 [M, Vd], the target's distribution over the draft vocabulary, normalized.
        best: int64 [M], the target's likeliest token.
        loss: the sum of the target's own losses of the texts' tokens, in nats.
        num_losses: the tokens of `loss`.
    """

    tokens: Tensor
    features: Tensor
    entries: Tensor
    wanted: Tensor
    best: Tensor
    loss: float
    num_losses: int

    @property
    def num_tokens(self) -> int:
        """The tokens of the batch, padding included."""
        return self.tokens.numel()


class TargetReader:
    """A reader of batches of texts, each from its first token, over pages that it reuses."""

    def __init__(
        self, target: TargetModel, feature_layers: Sequence[int], *, batch_size: int, length: int
    ) -> None:
        """Reserve pages for `batch_size` texts of `length` tokens.

        Raises:
            ConfigError: there is no memory for the pages.
        """
        self.target, self._feature_layers = target, tuple(feature_layers)
        parts = assemble(
            target,
            {},
            EngineConfig(
                page_size=_PAGE_SIZE,
                max_batch=batch_size,
                overlap_depth=0,  # no rounds run here
                max_sessions=0,
                max_context_len=length + 1,
                prefill_tokens=batch_size * length,
                num_pages=batch_size * (-(-(length + 1) // _PAGE_SIZE) + 1),
                prefix_cache=False,
                graph_sizes=(),
            ),
        )
        self._cache, ledger = parts.cache, parts.ledger
        rows = np.array([ledger.admit() for _ in range(batch_size)], np.int32)
        # The step stays in flight, so every row keeps the pages of its whole text, also those
        # before a window.
        plan = ledger.prepare_extend(rows, np.full_like(rows, length))
        ledger.launch(plan.step)
        self._cache.apply_delta(plan.step)
        self._ledger = ledger
        self._rows = torch.from_numpy(rows).to(target.device)

    @torch.no_grad()
    def forward(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
        """Run texts through the target, at most `batch_size` of at most `length` tokens.

        Returns:
            Features [T, f] and hidden states after the final norm [T, h], text after text.
        """
        cache, device = self._cache, self.target.device
        zeros = np.zeros(len(texts), np.int32)
        widths = np.array([len(text.tokens) for text in texts], np.int32)
        lens = SeqLens(torch.zeros(len(texts), dtype=torch.int32, device=device), zeros, zeros)
        lanes = Lanes(self._rows[: len(texts)], lens, widths)
        views = {group: causal_view(cache, group, lanes) for group in set(cache.layer_groups)}
        layers = zip(
            self.target.kv_layers, cache.keys, cache.values, cache.layer_groups, strict=True
        )
        batch = AttentionBatch(
            list(views.values()), {i: (k, v, views[group]) for i, k, v, group in layers}
        )
        tokens = torch.from_numpy(np.concatenate([text.tokens for text in texts])).to(device)
        self.target.capture(self._feature_layers)
        no_logits = torch.empty(0, dtype=torch.int64, device=device)
        output = self.target.forward(tokens.long(), lanes.positions, batch, no_logits)
        assert output.features is not None
        # Copies, because a tensor of inference mode cannot take part in a backward pass.
        return output.features.clone(), output.hidden.clone()

    @torch.no_grad()
    def read(self, texts: Sequence[Text], draft_ids: Tensor) -> TargetReading:
        """Return what a head learns from texts.

        Args:
            texts: at most `batch_size` of at most `length` tokens.
            draft_ids: int64 [Vd], the target's ids of the draft vocabulary.

        Cost: one forward of the target, and logits of all tokens.
        """
        features, hidden = self.forward(texts)
        device, lens = hidden.device, [len(text.tokens) for text in texts]
        starts = np.cumsum([0, *lens[:-1]])
        num_entries = max(lens) - 1
        entries, positions, follow = [], [], []
        for lane, (text, start) in enumerate(zip(texts, starts, strict=True)):
            learned = np.flatnonzero(text.learned[1:])
            entries.append(lane * num_entries + learned)
            positions.append(start + 1 + learned)
            follow.append(np.append(text.tokens, -1)[learned + 2])  # -1: the text ends
        entry_index, predicting, targets = (
            torch.from_numpy(np.concatenate(parts)).long().to(device)
            for parts in (entries, positions, follow)
        )
        wanted, best, loss, count = [], [], 0.0, 0
        blocks = zip(torch.split(predicting, _BLOCK), torch.split(targets, _BLOCK), strict=True)
        for block, next_token in blocks:
            logits = self.target.compute_logits(hidden[block]).float()
            best.append(logits.argmax(-1))
            wanted.append(logits[:, draft_ids].softmax(-1))
            has_next = next_token >= 0
            losses = F.cross_entropy(logits[has_next], next_token[has_next], reduction="sum")
            loss, count = loss + float(losses), count + int(has_next.sum())
        tokens = [torch.from_numpy(text.tokens[1:]).long() for text in texts]
        parts = [part[:-1] for part in torch.split(features, lens)]
        return TargetReading(
            tokens=pad_sequence(tokens, batch_first=True).to(device),
            features=pad_sequence(parts, batch_first=True),
            entries=entry_index,
            wanted=torch.cat(wanted),
            best=torch.cat(best),
            loss=loss,
            num_losses=count,
        )
