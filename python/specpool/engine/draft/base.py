"""`Drafter`, the protocol of all drafters, and `DraftTree`, their proposals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from specpool._core import Shape, find_broken_trees
from specpool.arrays import Int32, Int64
from specpool.engine.attention.lanes import Lanes
from specpool.engine.memory.kv_cache import KVCache, LayerKV
from specpool.errors import ShapeError
from specpool.kernels import twins as kernels
from specpool.kernels.transfer import upload

Links = tuple[Tensor, Tensor, Tensor, Tensor]  # depths, mask, first_child, next_sibling


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The trees of one round, one per lane. Node 0 is the root; parents precede children.

    The fields must describe the same tree. The worker checks them before the target sees the tree.
    If they do not agree in a lane, the request of that lane ends with an error.

    All fields are on one device: the engine's, or a CPU for proposals that the host made.

    `is_chain` says whether the host knows that in every tree node i continues node i - 1; the
    target then reads them without a mask. `chain` and `from_parents` know it. A tree that is made
    of five fields on a GPU counts as one with branches.
    """

    tokens: Tensor  # int64 [B, N]
    depths: Tensor  # int32 [B, N], the root's is 0
    mask: Tensor  # bool [B, N, N], a node's ancestors and itself
    first_child: Tensor  # int32 [B, N], -1 means none
    next_sibling: Tensor  # int32 [B, N], -1 means none
    is_chain: bool = field(init=False, default=False)

    def check(self, shape: Shape, batch: int) -> None:
        """Check types, dtypes and sizes for trees of this shape, without reading values.

        Raises:
            ShapeError: a field has another type, dtype, size or device; the message names it.
        """
        num_nodes = shape.num_draft_tokens
        flat, square = (batch, num_nodes), (batch, num_nodes, num_nodes)
        for name, dtype, size in (
            ("tokens", torch.int64, flat),
            ("depths", torch.int32, flat),
            ("mask", torch.bool, square),
            ("first_child", torch.int32, flat),
            ("next_sibling", torch.int32, flat),
        ):
            value = getattr(self, name)
            if not isinstance(value, Tensor):
                raise ShapeError(f"{name} of a draft tree is a tensor, got {type(value).__name__}")
            if value.dtype != dtype or value.shape != size or value.device != self.tokens.device:
                expected, actual = (
                    str(kind).removeprefix("torch.") for kind in (dtype, value.dtype)
                )
                raise ShapeError(
                    f"{name} of the draft trees is {expected} {list(size)} on "
                    f"{self.tokens.device}, got {actual} {list(value.shape)} on {value.device}"
                )

    def check_values(self, root_tokens: Int64, vocab_size: int) -> None:
        """Check that the fields describe one tree; a wrong tree could change the text.

        The arguments are those of `broken_lanes`.

        Raises:
            ShapeError: a value is wrong; the message names the field, or the token.
        """
        if broken := self.broken_lanes(root_tokens, vocab_size):
            raise ShapeError(broken[0][1])

    def broken_lanes(self, root_tokens: Int64, vocab_size: int) -> list[tuple[int, str]]:
        """Return the lanes whose fields do not describe one tree, each with what is wrong.

        The fields must be on a CPU.

        Args:
            root_tokens: int64 [B], the tokens that node 0 must have.
            vocab_size: the target's.
        """
        return find_broken_trees(
            self.tokens.numpy(),
            self.depths.numpy(),
            self.mask.numpy(),
            self.first_child.numpy(),
            self.next_sibling.numpy(),
            root_tokens,
            vocab_size=vocab_size,
        )

    def paths(self) -> list[Int64]:
        """Return each lane's paths from the root to its leaves, on the host.

        Each is int64 [number of leaves, most nodes of a path], padded with the leaf. It is of use
        for lanes whose fields describe one tree; for others it is some nodes.
        """
        mask, depths = self.mask.cpu().numpy(), self.depths.cpu().numpy()
        num_nodes = mask.shape[1]
        # Only a leaf is seen by itself alone. Lanes that are no tree may have none.
        is_leaf = mask.sum(1) <= 1
        is_leaf[:, -1] = True
        by_lane = []
        for seen, depth, leaves in zip(mask, depths, is_leaf, strict=True):
            (ends,) = leaves.nonzero()
            paths = np.repeat(ends[:, None], num_nodes, 1)
            path, node = seen[ends].nonzero()
            paths[path, depth[node]] = node
            by_lane.append(paths[:, : int(depth[ends].max()) + 1])
        return by_lane

    @classmethod
    def joined(cls, first: DraftTree, second: DraftTree) -> DraftTree:
        """Return the trees of both, one after the other; both are on one device."""
        pairs = zip(first._fields, second._fields, strict=True)
        return cls._of([torch.cat(pair) for pair in pairs], first.is_chain and second.is_chain)

    def select(self, lanes: Tensor) -> DraftTree:
        """Return the trees of some lanes, int64 [n] on the trees' device."""
        return self._of([field.index_select(0, lanes) for field in self._fields], self.is_chain)

    def to(self, device: torch.device) -> DraftTree:
        """Return the same trees on `device`; trees of a GPU stay there if `device` is a CPU."""
        if self.tokens.device == device or device.type == "cpu":
            return self
        fields = upload(device, *(field.numpy() for field in self._fields))
        return self._of(fields, self.is_chain)

    def made_safe(self, tokens: Tensor, depths: Tensor) -> DraftTree:
        """Return the trees with the tokens and depths that `kernels.check_tree` returned."""
        _, _, *links = self._fields
        return self._of([tokens, depths, *links], self.is_chain)

    @classmethod
    def from_parents(cls, tokens: Int64, parents: Int32) -> DraftTree:
        """Build trees on the host from tokens, int64 [B, N], and parents, int32 [B, N].

        `parents[:, 0] == -1`, and `parents[b, i] < i` for all other nodes.
        """
        links = _links(parents, torch.device("cpu"))
        are_chains = bool((parents == np.arange(-1, parents.shape[1] - 1)).all())
        return cls._of([torch.from_numpy(tokens), *links], are_chains)

    @classmethod
    def chain(cls, tokens: Tensor, links: Links | None = None) -> DraftTree:
        """Build chains from tokens, int64 [B, N]: each token continues the one before.

        `links` are those of `chain_links` for this size, if the caller has kept them.
        """
        batch, num_nodes = tokens.shape
        links = chain_links(batch, num_nodes, tokens.device) if links is None else links
        return cls._of([tokens, *links], True)

    @property
    def _fields(self) -> tuple[Tensor, ...]:
        return self.tokens, self.depths, self.mask, self.first_child, self.next_sibling

    @classmethod
    def _of(cls, fields: Sequence[Tensor], is_chain: bool) -> DraftTree:
        trees = cls(*fields)
        object.__setattr__(trees, "is_chain", is_chain)
        return trees


def _links(parents: Int32, device: torch.device) -> Links:
    depths, mask, first_child, next_sibling, _ = kernels.tree_from_parents(parents)
    depth, visible, child, sibling = upload(device, depths, mask, first_child, next_sibling)
    return depth, visible, child, sibling


def chain_links(batch: int, num_nodes: int, device: torch.device) -> Links:
    """Return depths, mask and links of B chains of N nodes."""
    parents = np.arange(-1, num_nodes - 1, dtype=np.int32)
    return _links(np.tile(parents, (batch, 1)), device)


class TextDrafter:
    """The part of a `Drafter` that reads the rows' tokens alone: it keeps no KV."""

    layers: tuple[LayerKV, ...] = ()
    feature_layers: tuple[int, ...] = ()
    reads_tokens = True

    def attach(
        self, cache: KVCache, first_layer: int, group: int, layout: str, shapes: Sequence[Shape]
    ) -> None:
        """Do nothing, because the drafter keeps no KV."""

    def extend(self, lanes: Lanes, tokens: Tensor, features: Tensor) -> None:
        """Do nothing, because the drafter reads the text alone."""


class Drafter(Protocol):
    """The protocol of a drafter. It proposes trees, and keeps its own state per row."""

    @property
    def layers(self) -> Sequence[LayerKV]:
        """The layers whose KV the drafter keeps in the engine's pages; empty if there are none."""

    @property
    def feature_layers(self) -> Sequence[int]:
        """The target layers whose inputs are its features; empty means the last hidden state."""

    @property
    def reads_tokens(self) -> bool:
        """Whether `propose` needs the rows' tokens on the host.

        If True, `extend` is never called, and a row's next round waits until the tokens of its last
        round are on the host.
        """

    def attach(
        self, cache: KVCache, first_layer: int, group: int, layout: str, shapes: Sequence[Shape]
    ) -> None:
        """Take the cache; called once, before anything runs.

        Args:
            cache: its layers `first_layer, ...` are the drafter's.
            first_layer: index of the drafter's first layer.
            group: the group of the drafter's layers.
            layout: `dense` or `holey`.
            shapes: the shapes that may run.
        """

    def extend(self, lanes: Lanes, tokens: Tensor, features: Tensor) -> None:
        """Write draft KV for tokens whose target KV is final.

        Args:
            lanes: the rows and positions; `lens` says how many tokens of each lane count.
            tokens: int64 [T], for each position p of `lanes` the token at p + 1.
            features: [T, f], the target's features at p.
        """

    def propose(
        self,
        lanes: Lanes,
        shape: Shape,
        root_tokens: Tensor,
        tokens: Sequence[Sequence[int]] | None,
    ) -> DraftTree:
        """Propose a tree of `shape` for each lane.

        Args:
            lanes: B lanes; `starts` are the roots' positions.
            shape: the shape of all lanes.
            root_tokens: int64 [B], on the device.
            tokens: prompt and output of each lane, the root last, if `reads_tokens`; else None.

        Returns:
            B trees of `shape.num_draft_tokens` nodes.
        """


@runtime_checkable
class Reader(Protocol):
    """A drafter that needs no features: it reads each token at its own position, like a model.

    The worker calls these methods in place of `extend`.
    """

    def read(self, lanes: Lanes, tokens: Tensor) -> None:
        """Write draft KV for final tokens.

        Args:
            lanes: the rows and positions; `lens` says how many tokens of each lane count.
            tokens: int64 [T], the tokens at the positions of `lanes`.
        """

    def keep(self, lanes: Lanes, tokens: Tensor, num_steps: int) -> None:
        """Complete the KV of chains that this drafter has proposed in this round.

        Args:
            lanes: as in `read`; a lane has the root and its accepted drafts.
            tokens: as in `read`.
            num_steps: drafts of each chain.
        """


@runtime_checkable
class Patient(Protocol):
    """A drafter that can put off, in plain rounds, the work that only a drafting round needs."""

    def write(self, lanes: Lanes, tokens: Tensor, features: Tensor) -> None:
        """Write draft KV as `Drafter.extend` does, but put the rest off until `catch_up`.

        The worker calls `catch_up` before these rows draft again.
        """

    def catch_up(self, lanes: Lanes, root_tokens: Tensor) -> None:
        """Do the work that `write` has put off.

        Args:
            lanes: rows whose latest call was `write`; `starts` are the roots' positions.
            root_tokens: int64 [B], on the device.
        """


@runtime_checkable
class Choosy(Protocol):
    """A drafter that can say that a round is not worth drafting; the row then decodes plainly."""

    def is_promising(self, tokens: Sequence[int]) -> bool:
        """Return whether the next round of a row with these tokens is worth drafting.

        `tokens` are prompt and output, the root last.
        """
