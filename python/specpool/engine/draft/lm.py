"""`LMDrafter`: a small language model that drafts over pages of its own.

Draft KV cell p of a row is that of the token at p, as in the model itself. A round reads the root
and then its own drafts, one forward for each step. Step j of branch b goes to the cell that the
layout gives (see `eagle.py`); step 0 is the root, which all branches share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specpool._core import Shape
from specpool.engine.attention import AttentionBatch, AttentionView, View, attend
from specpool.engine.attention.lanes import Lanes, causal_view
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.draft.base import DraftTree
from specpool.engine.draft.branches import Branches, DenseBranches, HoleyBranches, draft_window
from specpool.engine.draft.expansion import Chains, check_shapes, draft_trees
from specpool.engine.draft.side_by_side import (
    Ask,
    ByParts,
    Drafting,
    DraftPart,
    Level,
    run_side_by_side,
)
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.models import TargetModel
from specpool.engine.models.eagle.likeliest import likeliest
from specpool.engine.models.eagle.plain import PlainStack
from specpool.engine.models.gate import has_recurrent_layers
from specpool.engine.models.target_folder import find_target, load_config
from specpool.engine.text.tokenizer import load_tokenizer
from specpool.errors import ConfigError
from specpool.kernels.launch import runs_kernels

if TYPE_CHECKING:
    from os import PathLike

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LMDrafter(ByParts):
    """A drafter with a small language model of the target's tokenizer.

    The model may know fewer or more tokens than the target: it never proposes a token that the
    target lacks, and reads its own last token in place of one that it lacks. It keeps no state
    beside its KV.

    Attributes:
        model: the language model.
        max_context_len: the longest context of the model, in tokens.
    """

    reads_tokens = False
    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: TargetModel, *, vocab_size: int) -> None:
        """Draft with `model` for a target whose vocabulary has `vocab_size` tokens.

        Raises:
            ConfigError: the model has recurrent layers, or layers with chunked attention.
        """
        kind = model.config.model_type
        _check_attention(model.config)
        if any(layer.is_chunked for layer in model.layer_kv):
            raise ConfigError(f"the draft model {kind!r} has chunked attention: it cannot draft")
        self.model, self.max_context_len = model, model.max_context_len
        # The group keeps what the engine says; a window of the model itself is in its masks.
        self.layers = tuple(replace(layer, window=None) for layer in model.layer_kv)
        self._num_tokens = min(vocab_size, model.vocab_size)
        self._lacks_tokens = model.vocab_size < vocab_size
        self._stack = PlainStack.from_model(model)  # None means the model's modules run
        self._attached = False

    @classmethod
    def from_pretrained(
        cls,
        source: str | PathLike[str] | PreTrainedModel,
        target: TargetModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_context_len: int | None = None,
        trust_remote_code: bool = False,
    ) -> LMDrafter:
        """Load a language model that drafts for `target`, in its dtype and on its device.

        Args:
            source: a folder, a hub name, or a loaded model.
            target: the model that verifies.
            tokenizer: the target's, to compare with the draft model's.
            max_context_len: the context that the draft model has to reach; None means any.
            trust_remote_code: as in `TargetModel.from_pretrained`.

        Raises:
            ConfigError: the model has recurrent layers, another tokenizer or too short a context,
                or cannot run over pages.
            CheckpointError: its files cannot be read.
        """
        from transformers import PreTrainedModel

        if isinstance(source, PreTrainedModel):
            model = TargetModel.from_pretrained(source, dtype=target.dtype, device=target.device)
        else:
            folder = find_target(source, trust_remote_code=trust_remote_code)
            config = load_config(folder)  # refuse a wrong model before its weights are read
            _check_attention(config)
            draft_tokenizer = load_tokenizer(folder.path, trust_remote_code=trust_remote_code)
            sizes = target.vocab_size, _vocab_size(config)
            check_same_tokenizer(tokenizer, draft_tokenizer, *sizes)
            model = TargetModel.from_pretrained(folder, dtype=target.dtype, device=target.device)
        try:
            if isinstance(source, PreTrainedModel):
                check_same_tokenizer(None, None, target.vocab_size, model.vocab_size)
            if max_context_len is not None:
                _check_context(model, max_context_len)
            return cls(model, vocab_size=target.vocab_size)
        except BaseException:
            model.close()
            raise

    def close(self) -> None:
        """Restore the attention of a model that was passed in."""
        self.model.close()

    def attach(
        self, cache: KVCache, first_layer: int, group: int, layout: str, shapes: Sequence[Shape]
    ) -> None:
        """Take the cache; see `Drafter.attach`.

        Raises:
            ConfigError: the drafter is attached already, its context is too short, the model knows
                fewer tokens than topk, or a shape's trees cannot be drafted level by level.
        """
        if self._attached:
            raise ConfigError(
                "this drafter is attached to another engine: make a new one of the same model"
            )
        knower = "the draft model and its target share"
        check_shapes(shapes, self._num_tokens, knower)
        _check_context(self.model, cache.max_context_len)
        self._attached = True
        self._cache, self._group, self._layout = cache, group, layout
        self._last_position = cache.max_context_len - 1
        self._window = draft_window(cache, group)
        self._chains = Chains(cache, group, 1)
        layers = range(first_layer, first_layer + len(self.layers))
        self._kv = [
            (layer, cache.keys[i], cache.values[i])
            for layer, i in zip(self.model.kv_layers, layers, strict=True)
        ]
        self._fields = cache.fields([*layers])
        if self._stack is not None:
            self._stack.head.reserve_positions(cache.max_context_len)

    def extend(self, lanes: Lanes, tokens: Tensor, features: Tensor) -> None:
        """Do nothing: the worker calls `read` instead."""

    def read(self, lanes: Lanes, tokens: Tensor) -> None:
        """Write draft KV of tokens; see `Reader.read`."""
        no_lanes = lanes.index[:0]
        self._forward(
            tokens, lanes.positions, causal_view(self._cache, self._group, lanes), no_lanes
        )

    def keep(self, lanes: Lanes, tokens: Tensor, num_steps: int) -> None:
        """Write the one cell that a chain has not written; see `Reader.keep`.

        A chain of S drafts reads the root and all drafts but the last, so only a chain that was
        accepted as a whole lacks a cell.
        """
        if not runs_kernels(self._cache.device):
            are_whole = lanes.counts.numpy() > num_steps
            if are_whole.any():
                last = tokens.index_select(0, lanes.last_indices)[torch.from_numpy(are_whole)]
                self.read(lanes.filter(are_whole).ahead(num_steps), last)
            return
        # The host does not know which chains these are. All others become row 0, which writes to
        # the sink.
        is_whole = lanes.counts > num_steps
        starts = (lanes.starts + num_steps).masked_fill(~is_whole, 0)
        lens = SeqLens(starts, lanes.seq_lens.lo * 0, lanes.seq_lens.hi + num_steps)
        last = tokens.view(len(starts), -1)[:, num_steps]
        self.read(Lanes(lanes.rows.masked_fill(~is_whole, 0), lens, 1), last)

    def propose_parts(self, parts: Sequence[DraftPart]) -> list[DraftTree]:
        """Propose the trees of each part; see `SideBySide.propose_parts`."""
        topk = max(part.shape.topk for part in parts)

        def run(ask: Ask) -> Level:
            logits = self._forward(ask.tokens, ask.positions, ask.view)
            return Level(*likeliest(logits, topk)) if topk > 1 else Level(None, _best(logits))

        return run_side_by_side([self._draft(part) for part in parts], run)

    def _draft(self, part: DraftPart) -> Drafting:
        """Draft a part: read the roots, then go on level by level."""
        root = part.lanes.ahead(0)
        view = causal_view(self._cache, self._group, root)
        level = yield Ask(part.root_tokens, root.positions, view)
        assert level is not None  # drafting does not end before its first level
        if part.shape.topk == 1:
            return (yield from self._chains.draft(part, level))
        where = self._cache, self._group, part.lanes, part.shape
        branches: Branches = (
            HoleyBranches(*where, self._fields, True)
            if self._layout == "holey"
            else DenseBranches(*where, True)
        )
        # The root is step 0 of branch 0.
        size = len(part.lanes.seq_lens), part.shape.topk
        branches.view(0, torch.zeros(size, dtype=torch.int32, device=self._cache.device))
        return (yield from draft_trees(part, level, branches, 1))

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        view: View,
        logits_at: Tensor | None = None,
    ) -> Tensor:
        """Run the model; return the logits of the tokens that the target knows too, [n, V]."""
        if self._lacks_tokens:
            tokens = tokens.clamp(max=self._num_tokens - 1)
        at = positions.clamp(max=self._last_position).long()
        if self._stack is not None:
            return self._run_stack(self._stack, tokens, at, view, logits_at)
        kv = {layer: (keys, values, view) for layer, keys, values in self._kv}
        output = self.model.forward(tokens, at, AttentionBatch([view], kv, self._window), logits_at)
        return output.logits[:, : self._num_tokens]

    @torch.inference_mode()
    def _run_stack(
        self,
        stack: PlainStack,
        tokens: Tensor,
        positions: Tensor,
        view: View,
        logits_at: Tensor | None,
    ) -> Tensor:
        """Do the same with the layers alone; if nobody wants logits, the last one only writes."""

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            _, keys, values = self._kv[layer]
            if not len(q):
                assert isinstance(view, AttentionView)  # only drafts are joined
                keys.index_copy_(0, view.write_slots, k)
                values.index_copy_(0, view.write_slots, v)
                return q
            scaling = q.shape[-1] ** -0.5
            return attend(view, keys, values, q, k, v, scaling=scaling, window=self._window)

        hidden = stack.forward(tokens, positions, attention, logits_at)
        return stack.logits(hidden)[:, : self._num_tokens]


def check_same_tokenizer(
    target_tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
    target_size: int,
    draft_size: int,
) -> None:
    """Check that a token of the draft model means what it means to the target.

    Args:
        target_tokenizer: the target's tokenizer; None if it has none.
        draft_tokenizer: the draft model's; None if it has none.
        target_size: tokens of the target's vocabulary, padding included.
        draft_size: tokens of the draft model's.

    Raises:
        ConfigError: a token has two meanings; or a tokenizer is missing and the sizes differ.
    """
    if target_tokenizer is None or draft_tokenizer is None:
        if target_size != draft_size:
            raise ConfigError(
                f"the draft model knows {draft_size} tokens, the target {target_size}, and not "
                "both have a tokenizer to compare: they must be of one vocabulary"
            )
        return
    target_tokens = {i: token for token, i in target_tokenizer.get_vocab().items()}
    draft_tokens = {i: token for token, i in draft_tokenizer.get_vocab().items()}
    common = target_tokens.keys() & draft_tokens.keys()
    differ = sorted(i for i in common if target_tokens[i] != draft_tokens[i])
    lacking = [i for i in target_tokens.keys() - common if i < draft_size]
    if differ or len(lacking) * 10 > len(target_tokens):
        at = differ[0] if differ else min(lacking)
        raise ConfigError(
            f"the draft model has another tokenizer: {len(differ) + len(lacking)} of "
            f"{len(target_tokens)} tokens differ; token {at} is {target_tokens[at]!r:.40} to the "
            f"target and {draft_tokens.get(at)!r:.40} to the draft model"
        )


def _best(logits: Tensor) -> Tensor:
    """Return the most probable token of each row, int64 [T, 1]."""
    return logits.argmax(-1, keepdim=True)


def _vocab_size(config: Any) -> int:
    return int(getattr(config, "get_text_config", lambda: config)().vocab_size)


def _check_attention(config: Any) -> None:
    """Refuse a model with recurrent layers: the ledger keeps a target's states alone."""
    if has_recurrent_layers(config):
        raise ConfigError(
            f"the draft model {config.model_type!r} has recurrent layers, so it cannot draft: its"
            " state would have to follow every draft, and go back with those that are refused"
        )


def _check_context(model: TargetModel, needs: int) -> None:
    context_len, reason = model.max_context_len, model.context_reason
    if context_len < needs:
        raise ConfigError(
            f"the draft model has {context_len} positions, a sequence may have {needs} tokens: "
            f"lower max_context_len to {context_len}" + (f" ({reason})" if reason else "")
        )
