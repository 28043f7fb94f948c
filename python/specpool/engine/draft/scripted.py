"""`ScriptedDrafter`: a drafter that knows the text and errs at a given rate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specpool._core import Shape
from specpool.engine.attention.lanes import Lanes
from specpool.engine.draft.base import DraftTree, TextDrafter
from specpool.errors import ConfigError


class ScriptedDrafter(TextDrafter):
    """A drafter for tests: it proposes known continuations, with errors, in trees of random form.

    The true continuation runs along a spine of random node ids, so that accepted nodes are
    scattered and compaction has work to do. All other nodes are wrong on purpose.
    """

    def __init__(
        self,
        references: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        error_rate: float = 0.2,
        seed: int = 0,
    ) -> None:
        """Keep the references.

        Args:
            references: token ids, each list a prompt with its continuation. A lane whose tokens are
                no prefix of any reference gets random proposals.
            vocab_size: wrong tokens are drawn from `[0, vocab_size)`; at least 2.
            error_rate: probability that a spine token is wrong, in [0, 1].
            seed: seeds the errors and the trees.

        Raises:
            ConfigError: `vocab_size` or `error_rate` is out of range.
        """
        if vocab_size < 2:
            raise ConfigError(f"vocab_size must be at least 2, got {vocab_size}")
        if not 0 <= error_rate <= 1:
            raise ConfigError(f"error_rate must be in [0, 1], got {error_rate}")
        self._references = [list(reference) for reference in references]
        self._vocab_size = vocab_size
        self._error_rate = error_rate
        self._rng = np.random.default_rng(seed)

    def propose(
        self,
        lanes: Lanes,
        shape: Shape,
        root_tokens: Tensor,
        tokens: Sequence[Sequence[int]] | None,
    ) -> DraftTree:
        """Propose a tree for each lane; see the class."""
        if tokens is None:
            raise ConfigError("a scripted drafter needs the lanes' tokens")
        trees = [self._tree(shape, list(text)) for text in tokens]
        return DraftTree.from_parents(
            np.array([t for t, _ in trees], np.int64), np.array([p for _, p in trees], np.int32)
        )

    def _tree(self, shape: Shape, text: list[int]) -> tuple[list[int], list[int]]:
        """Return one lane's tree as N tokens and N parents."""
        num_nodes, rng = shape.num_draft_tokens, self._rng
        truth = self._continuation(text, shape.num_steps)
        spine_len = min(shape.num_steps, num_nodes - 1)
        spine = np.sort(rng.choice(np.arange(1, num_nodes), spine_len, replace=False)).tolist()
        tokens, parents, depths = [text[-1]], [-1], [0]
        path = [0]  # the root and the spine so far
        for node in range(1, num_nodes):
            if node in spine:
                parent, right = path[-1], truth[len(path) - 1]
                path.append(node)
                token = self._wrong_token(right) if rng.random() < self._error_rate else right
            else:
                parent = int(rng.choice([i for i in range(node) if depths[i] < shape.num_steps]))
                on_path = parent in path
                token = self._wrong_token(truth[path.index(parent)] if on_path else -1)
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return tokens, parents

    def _continuation(self, text: list[int], num_tokens: int) -> list[int]:
        """Return the `num_tokens` tokens after `text`; random tokens fill up what is not known."""
        for reference in self._references:
            if reference[: len(text)] == text:
                known = reference[len(text) : len(text) + num_tokens]
                break
        else:
            known = []
        missing = num_tokens - len(known)
        return known + [int(t) for t in self._rng.integers(0, self._vocab_size, missing)]

    def _wrong_token(self, right: int) -> int:
        token = int(self._rng.integers(0, self._vocab_size - 1))
        return token + (token >= right >= 0)
