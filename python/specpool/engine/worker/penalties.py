"""`TokenCounts`: how often each row's text has each token, on the device, for the penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specpool.engine.draft.base import DraftTree
from specpool.engine.scheduler.request import Request
from specpool.kernels.transfer import upload

# A cell counts an output token as _OUTPUT. The lowest bit says that the prompt has the token.
_OUTPUT, _PROMPT = 2, 1
# Cells that `penalize` works on at once, so that it needs little memory beside the logits.
_CELLS = 1 << 24


class TokenCounts:
    """The counts of each row's tokens, kept up to date on the device, so that no round waits.

    They take 4 bytes for each row and token of the vocabulary, from the first request with a
    penalty on.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Count nothing yet; `num_rows` is without row 0."""
        self._size = (num_rows + 1, vocab_size)
        self._device = device
        self._cells: Tensor | None = None  # int32 [num_rows + 1, V]

    def start(self, rows: Tensor, requests: Sequence[Request]) -> None:
        """Count the prompt and the output so far of requests, one for each of `rows`, int64 [B]."""
        if self._cells is None:
            self._cells = torch.zeros(self._size, dtype=torch.int32, device=self._device)
        lanes, tokens, values = [], [], []
        for lane, request in enumerate(requests):
            text = request.token_array()
            prompt = np.unique(text[: request.prompt_len])
            output, times = np.unique(text[request.prompt_len :], return_counts=True)
            lanes.append(np.full(len(prompt) + len(output), lane))
            tokens += [prompt, output]
            values += [np.full(len(prompt), _PROMPT), times * _OUTPUT]
        (lane_of, token_of, value_of) = upload(
            self._device,
            np.concatenate(lanes),
            np.concatenate(tokens).astype(np.int64),
            np.concatenate(values).astype(np.int32),
        )
        self._cells.index_fill_(0, rows, 0)
        self._cells.index_put_((rows[lane_of], token_of), value_of, accumulate=True)

    def add(self, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """Count the first `lens` of each row's new tokens.

        Args:
            rows: int64 [B].
            tokens: int64 [B, A]; below 0 for none.
            lens: int32 [B].
        """
        assert self._cells is not None, "`start` comes first"
        places = torch.arange(tokens.shape[1], device=self._device)
        counted = (places < lens.unsqueeze(1)) & (tokens >= 0)
        rows = rows.unsqueeze(1).expand_as(tokens)
        self._cells.index_put_((rows, tokens.clamp(min=0)), counted.int() * _OUTPUT, True)

    def penalize(
        self, logits: Tensor, rows: Tensor, requests: Sequence[Request], tree: DraftTree | None
    ) -> None:
        """Apply the requests' penalties in place, at each node by the text up to that node.

        Repetition is as in transformers, and counts prompt and output. Frequency and presence are
        as OpenAI defines them, and count the output alone.

        Args:
            logits: float32 [B, N, V].
            rows: int64 [B].
            requests: one per lane.
            tree: B trees of N nodes; None if N is 1: the root's text ends the row's.
        """
        params = [request.params for request in requests]
        fields = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        values = [np.array([[[getattr(p, name)]] for p in params], np.float32) for name in fields]
        repetition, frequency, presence = upload(self._device, *values)
        batch, num_nodes, vocab_size = logits.shape
        step = max(1, _CELLS // (num_nodes * vocab_size))
        for start in range(0, batch, step):
            lanes = slice(start, start + step)
            cells = self._cells_of(rows[lanes], num_nodes, tree, lanes)
            lane_logits = logits[lanes]
            stale = torch.where(
                lane_logits < 0, lane_logits * repetition[lanes], lane_logits / repetition[lanes]
            )
            lane_logits.copy_(torch.where(cells > 0, stale, lane_logits))
            counts = cells // _OUTPUT
            lane_logits -= frequency[lanes] * counts
            lane_logits -= presence[lanes] * (counts > 0)

    def _cells_of(
        self, rows: Tensor, num_nodes: int, tree: DraftTree | None, lanes: slice
    ) -> Tensor:
        """Return the cells at each node, int32 [b, N, V]: the row's, and the drafts above it."""
        assert self._cells is not None, "`start` comes first"
        cells = self._cells.index_select(0, rows).unsqueeze(1).expand(-1, num_nodes, -1)
        if tree is None or num_nodes == 1:
            return cells
        # A node's path is the drafts that it sees. The root is counted in the row already.
        path = tree.mask[lanes, :, 1:].int() * _OUTPUT
        tokens = tree.tokens[lanes, None, 1:].expand(-1, num_nodes, -1)
        return cells.scatter_add(2, tokens, path)
