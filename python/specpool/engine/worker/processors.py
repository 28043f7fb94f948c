"""`Processors`: change the target's logits before tokens are chosen: bias, penalties, forms, bans.

They run at every node of a tree, each by the text up to that node. So the text is that of plain
decoding. `SamplingParams.changes_logits` says which rows have processors; others are left alone.
Temperature, top_k, top_p and min_p come afterwards, in `RowState.draw`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specpool.arrays import Int32, Int64
from specpool.engine.attention.lanes import Lanes
from specpool.engine.draft.base import DraftTree
from specpool.engine.scheduler.request import Request
from specpool.engine.worker.penalties import TokenCounts
from specpool.kernels.transfer import Download, upload

# The tree of a root alone: its token, no child, no sibling.
_ROOT = np.array([[0], [-1], [-1]], np.int64)


class Processors:
    """The processors of all rows; order: bias, repetition, frequency, presence, form, bans."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Keep nothing yet; `num_rows` is without row 0."""
        self._device = device
        self._counts = TokenCounts(num_rows, vocab_size, device)

    def start(self, lanes: Lanes, requests: Sequence[Request], done: Sequence[bool]) -> None:
        """Count the tokens of the lanes whose prefill is `done`: they get their first token."""
        chosen = [i for i, request in enumerate(requests) if request.penalizes and done[i]]
        if chosen:
            rows = lanes.index[self._put(chosen)]
            self._counts.start(rows, [requests[i] for i in chosen])

    def look(self, tree: DraftTree, requests: Sequence[Request]) -> Download | None:
        """Start the copy of trees to the host if a lane's form or bans follow the drafts.

        Call it before the target's forward is launched, so that the host works meanwhile.
        """
        if not any(request.waits_for_tokens for request in requests):
            return None
        links = tree.first_child.long(), tree.next_sibling.long()
        return Download(torch.stack([tree.tokens, *links]))

    def process(
        self,
        logits: Tensor,
        lanes: Lanes,
        requests: Sequence[Request],
        tree: DraftTree | None = None,
        on_host: Download | None = None,
        done: Sequence[bool] | None = None,
    ) -> Tensor:
        """Return the logits that the lanes' tokens are chosen from.

        Args:
            logits: [B * N, V], not changed.
            lanes: B lanes.
            requests: one per lane; empty in a graph, whose lanes have no processors.
            tree: B trees of N nodes; None means the lanes' roots alone.
            on_host: the result of `look`.
            done: whether a lane's token is kept; None if every lane's is.

        Returns:
            The same tensor if no lane has a processor; else float32, a copy.
        """
        chosen = [
            i
            for i, request in enumerate(requests)
            if request.changes_logits and (done is None or done[i])
        ]
        if not chosen:
            return logits
        processed = logits.to(torch.float32, copy=True)
        by_lane = processed.view(len(requests), -1, logits.shape[1])
        self._bias(by_lane, requests, chosen)
        self._penalize(by_lane, lanes, requests, chosen, tree)
        trees = None if on_host is None else on_host.array()
        allowed = self._constrain(processed, requests, chosen, trees)
        self._ban(processed, requests, chosen, trees, allowed)
        return processed

    def add(
        self,
        lanes: Lanes,
        requests: Sequence[Request],
        tokens: Tensor,
        lens: Tensor | Sequence[bool] | None = None,
    ) -> None:
        """Count the tokens that a step gave the lanes' rows.

        Args:
            lanes: B lanes.
            requests: one per lane; empty in a graph.
            tokens: int64 [B, A].
            lens: int32 [B], how many of them count; or whether a lane's one token is kept; None =
                one of each lane counts.
        """
        is_kept = lens if isinstance(lens, list) else None
        chosen = [
            i
            for i, request in enumerate(requests)
            if request.penalizes and (is_kept is None or is_kept[i])
        ]
        if chosen:
            lane_index = self._put(chosen)
            num = lens[lane_index] if isinstance(lens, Tensor) else torch.ones_like(lane_index)
            self._counts.add(lanes.index[lane_index], tokens[lane_index], num)

    def _bias(self, by_lane: Tensor, requests: Sequence[Request], chosen: Sequence[int]) -> None:
        entries = [
            (lane, token, value)
            for lane in chosen
            for token, value in requests[lane].params.logit_bias.items()
        ]
        if not entries:
            return
        lane_of, token_of, values = upload(
            self._device,
            np.array([lane for lane, _, _ in entries], np.int64),
            np.array([token for _, token, _ in entries], np.int64),
            np.array([value for _, _, value in entries], np.float32),
        )
        by_lane[lane_of, :, token_of] += values.unsqueeze(1)

    def _penalize(
        self,
        by_lane: Tensor,
        lanes: Lanes,
        requests: Sequence[Request],
        chosen: Sequence[int],
        tree: DraftTree | None,
    ) -> None:
        penalized = [i for i in chosen if requests[i].penalizes]
        if not penalized:
            return
        lane_index = self._put(penalized)
        logits = by_lane[lane_index]
        lane_trees = None if tree is None else tree.select(lane_index)
        self._counts.penalize(
            logits, lanes.index[lane_index], [requests[i] for i in penalized], lane_trees
        )
        by_lane[lane_index] = logits

    def _constrain(
        self,
        processed: Tensor,
        requests: Sequence[Request],
        chosen: Sequence[int],
        trees: Int64 | None,
    ) -> dict[int, dict[int, Int32]]:
        """Rule out, at each node, the tokens that the form does not allow behind it.

        Returns:
            Of each lane with a form, the tokens that it allows, as bits by nodes.
        """
        formed = [(i, m) for i in chosen if (m := requests[i].matcher) is not None]
        if not formed:
            return {}
        num_nodes = len(processed) // len(requests)
        masks = []
        allowed_by_lane = {}
        for lane, matcher in formed:
            matcher.follow(requests[lane].tokens, requests[lane].prompt_len)
            nodes, bits = matcher.masks(*(_ROOT if trees is None else trees[:, lane]))
            allowed_by_lane[lane] = dict(zip(nodes.tolist(), bits, strict=True))
            masks.append((nodes + lane * num_nodes, bits))
        places, words = upload(
            self._device,
            np.concatenate([nodes for nodes, _ in masks]),
            np.concatenate([bits for _, bits in masks]),
        )
        shifts = torch.arange(32, dtype=torch.int32, device=self._device)
        allowed = (words.unsqueeze(2) >> shifts & 1).flatten(1)[:, : processed.shape[1]] > 0
        masked = processed.index_select(0, places).masked_fill(~allowed, -torch.inf)
        processed.index_copy_(0, places, masked)
        return allowed_by_lane

    def _ban(
        self,
        processed: Tensor,
        requests: Sequence[Request],
        chosen: Sequence[int],
        trees: Int64 | None,
        allowed_by_lane: Mapping[int, Mapping[int, Int32]],
    ) -> None:
        """Rule out, at each node, the tokens that may not follow the text up to it.

        Where they are all that a form allows, the form comes first.
        """
        num_nodes = len(processed) // len(requests)
        pairs = []
        for lane in chosen:
            request = requests[lane]
            if request.bans is not None:
                drafts, first_child, next_sibling = _ROOT if trees is None else trees[:, lane]
                nodes, tokens = request.bans.of_tree(
                    request.tokens,
                    drafts,
                    first_child,
                    next_sibling,
                    allowed_by_lane.get(lane, {}),
                )
                pairs.append((nodes + lane * num_nodes, tokens))
        if not pairs:
            return
        places, banned_tokens = upload(
            self._device,
            np.concatenate([nodes for nodes, _ in pairs]),
            np.concatenate([tokens for _, tokens in pairs]),
        )
        processed[places, banned_tokens] = -torch.inf

    def _put(self, lanes: Sequence[int]) -> Tensor:
        """Return lane numbers on the device, int64 [n]."""
        (lane_index,) = upload(self._device, np.array(lanes, np.int64))
        return lane_index
