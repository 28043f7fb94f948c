"""What a drafter proposes, beside what its model alone would: recorded trees, and their paths."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specpool import Engine, Shape

Path = tuple[int, ...]
#: (text, path) -> logits [V] of the token that follows text and path.
Logits = Callable[[list[int], Path], torch.Tensor]


def record(engine: Engine) -> list:
    """Every tree that is proposed from here on, with the roots' positions."""
    trees, propose = [], engine.drafter.propose

    def recording(lanes, shape, roots, tokens):
        tree = propose(lanes, shape, roots, tokens)
        trees.append((lanes.starts.clone(), shape, tree))
        return tree

    engine.drafter.propose = recording
    return trees


def expand(logits: Logits, text: list[int], shape: Shape) -> set[Path]:
    """The tree as a set of paths: expand, keep K a level, then the N - 1 best of all."""
    level, everything = [(1.0, ())], []
    for _ in range(shape.num_steps):
        children = []
        for score, path in level:
            p, ids = logits(text, path).softmax(-1).topk(shape.topk)
            pairs = zip(p.tolist(), ids.tolist(), strict=True)
            children += [(score * q, (*path, token)) for q, token in pairs]
        everything += children
        level = sorted(children, key=lambda child: -child[0])[: shape.topk]
    everything.sort(key=lambda candidate: -candidate[0])
    return {path for _, path in everything[: shape.num_draft_tokens - 1]}


def paths(tree, lane: int) -> set[Path]:
    tree_paths = set()
    for node in range(1, tree.tokens.shape[1]):
        line = [i for i in range(1, node + 1) if tree.mask[lane, node, i]]
        tree_paths.add(tuple(tree.tokens[lane, line].tolist()))
    return tree_paths


def check(logits: Logits, texts: list[list[int]], trees: list) -> None:
    """Compare proposals with the plain model's; lane i belongs to text i."""
    checked = differing = 0
    for starts, shape, tree in trees:
        for lane, start in enumerate(starts.tolist()):
            text = texts[lane][: start + 1]
            checked += 1
            differing += expand(logits, text, shape) != paths(tree, lane)
    assert checked >= 6
    assert differing <= 1  # a near-tie of two candidates may go either way
