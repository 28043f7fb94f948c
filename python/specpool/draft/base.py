"""What every drafter answers: which KV it keeps, which features it wants, and its proposals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from specpool import kernels
from specpool._core import Shape
from specpool.errors import ShapeError
from specpool.kv_cache import KVCache, LayerKV

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Links = tuple[Int32, Bool, Int32, Int32, Int32]  # depths, mask, first_child, next_sibling, parents


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The trees of one round, one per lane. Node 0 is the root; parents precede children."""

    tokens: Int64  # [B, N]
    depths: Int32  # [B, N], the root's is 0
    mask: Bool  # [B, N, N], a node's ancestors and itself
    first_child: Int32  # [B, N], -1 = none
    next_sibling: Int32  # [B, N], -1 = none

    def check(self, shape: Shape, root_tokens: Int64, vocab_size: int) -> None:
        """Refuse what no verify could walk, or would walk to another text than the target's.

        Raises:
            ShapeError: names the field, or the token.
        """
        batch, num_nodes = len(root_tokens), shape.num_draft_tokens
        flat, square = (batch, num_nodes), (batch, num_nodes, num_nodes)
        _check_array("tokens", self.tokens, np.int64, flat)
        _check_array("depths", self.depths, np.int32, flat)
        _check_array("mask", self.mask, np.bool_, square)
        if (self.tokens[:, 0] != root_tokens).any():
            raise ShapeError(f"node 0 of each tree is the root {root_tokens}: {self.tokens[:, 0]}")
        for token in (self.tokens.min(), self.tokens.max()):
            if not 0 <= token < vocab_size:
                raise ShapeError(
                    f"draft token {token}: the target's vocabulary is [0, {vocab_size})"
                )
        if (self.mask.sum(-1) != self.depths + 1).any():
            raise ShapeError("mask and depths disagree: a node sees its ancestors and itself")

    @classmethod
    def of(cls, tokens: Int64, links: Links) -> DraftTree:
        """Tokens with the links that `build_tree` or `tree_from_parents` returns."""
        depths, mask, first_child, next_sibling, _ = links
        return cls(tokens, depths, mask, first_child, next_sibling)

    @classmethod
    def from_parents(cls, tokens: Int64, parents: Int32) -> DraftTree:
        """Build the links from `parents` [B, N]; `parents[:, 0] == -1`, `parents[b, i] < i`."""
        return cls.of(tokens, kernels.tree_from_parents(parents))

    @classmethod
    def chain(cls, tokens: Int64) -> DraftTree:
        """Each token [B, N] continues the one before."""
        return cls.of(tokens, _chain_links(*tokens.shape))


def _check_array(name: str, array: object, dtype: type, size: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray):
        raise ShapeError(f"{name} of a draft tree is a NumPy array, got {type(array).__name__}")
    if array.dtype != dtype or array.shape != size:
        raise ShapeError(
            f"{name} of the draft trees is {np.dtype(dtype)} {list(size)}, "
            f"got {array.dtype} {list(array.shape)}"
        )


@lru_cache(maxsize=64)
def _chain_links(batch: int, num_nodes: int) -> Links:
    parents = np.arange(-1, num_nodes - 1, dtype=np.int32)
    return kernels.tree_from_parents(np.tile(parents, (batch, 1)))


@dataclass(frozen=True, slots=True)
class Lanes:
    """The rows of one step's batch and what each of them gets, lane by lane."""

    rows: Int32  # [B]
    starts: Int32  # [B], positions below have KV already
    q_lens: Int32  # [B], tokens of this forward


class Drafter(Protocol):
    """Proposes trees; keeps its own state per row."""

    @property
    def layers(self) -> Sequence[LayerKV]:
        """Layers whose KV it keeps in our pages; empty = it keeps none."""

    @property
    def feature_layers(self) -> Sequence[int]:
        """Target layers whose inputs it wants as features; empty = the last hidden state."""

    @property
    def reads_tokens(self) -> bool:
        """Whether `propose` needs the rows' tokens on the host."""

    def attach(
        self, cache: KVCache, first_layer: int, group: int, layout: str, shape: Shape
    ) -> None:
        """Its layers are `first_layer, ...` of `cache`, in `group`; `shape` is the largest."""

    def extend(self, lanes: Lanes, tokens: torch.Tensor, features: torch.Tensor) -> None:
        """Take over tokens whose target KV is final.

        Args:
            lanes: which positions of which rows.
            tokens: int64 [T], for each position p of `lanes` the token at p + 1.
            features: [T, f], the target's features at p.
        """

    def propose(
        self, lanes: Lanes, shape: Shape, root_tokens: Int64, tokens: Sequence[Sequence[int]] | None
    ) -> DraftTree:
        """Propose a tree of `shape` for each lane.

        Args:
            lanes: `starts` are the roots' positions.
            shape: one shape for the whole batch.
            root_tokens: int64 [B].
            tokens: prompt and output of each lane, the root last, if `reads_tokens`.
        """
