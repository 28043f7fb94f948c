"""Slow, obvious twins of the index functions: plain Python, one element at a time."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from reference import draft_position


def make_table(rng: np.random.Generator, num_rows: int, columns: int) -> np.ndarray:
    """A page table whose rows hold shuffled pages, each once; row 0 is padding."""
    table = np.zeros((num_rows + 1, columns), np.int32)
    table[1:] = 1 + rng.permutation(num_rows * columns).reshape(num_rows, columns)
    return table


def slot(table: np.ndarray, page_size: int, row: int, position: int) -> int:
    return int(table[row, position // page_size]) * page_size + position % page_size


# --- tree ---------------------------------------------------------------------------------------


def best(scores: list[float], count: int) -> list[int]:
    """Indices of the greatest scores, greatest first, ties to the lower index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def draft_tree(outputs: list[tuple[Any, Any]], topk: int, num_draft_tokens: int) -> dict[str, Any]:
    """One lane's tree from what the draft model returned per step, as paths rather than indices."""
    live: list[tuple[tuple[int, ...], np.float32]] = []
    candidates: list[tuple[tuple[int, ...], np.float32, int]] = []  # path of candidate ids
    input_ids, branch_parents = [], []
    for step, (p, index) in enumerate(outputs):
        first = len(candidates)
        level: list[tuple[tuple[int, ...], np.float32, int]] = []
        if step == 0:
            for child in range(topk):
                level.append(((first + child,), np.float32(p[child]), int(index[child])))
            survivors, parents = list(range(topk)), list(range(topk))
        else:
            for branch, (path, score) in enumerate(live):
                for child in range(topk):
                    number = first + branch * topk + child
                    cumulative = np.float32(score * np.float32(p[branch][child]))
                    level.append(((*path, number), cumulative, int(index[branch][child])))
            survivors = best([float(score) for _, score, _ in level], topk)
            parents = [i // topk for i in survivors]
        candidates += level
        live = [(level[i][0], level[i][1]) for i in survivors]
        input_ids.append([level[i][2] for i in survivors])
        branch_parents.append(parents)
    chosen = sorted(best([float(score) for _, score, _ in candidates], num_draft_tokens - 1))
    node_of = {number: node + 1 for node, number in enumerate(chosen)}
    parents = [-1]
    for number in chosen:
        path = candidates[number][0]
        parents.append(node_of[path[-2]] if len(path) > 1 else 0)
    return {
        "input_ids": input_ids,
        "branch_parents": branch_parents,
        "chosen": chosen,
        "draft_tokens": [candidates[number][2] for number in chosen],
        "parents": parents,
    }


def tree(parents: list[int]) -> dict[str, Any]:
    """Depths, ancestor mask and links from each node's parent."""
    n = len(parents)
    depths, mask = [0] * n, [[False] * n for _ in range(n)]
    for node in range(n):
        at = node
        while at != -1:
            mask[node][at] = True
            depths[node] += at != node
            at = parents[at]
    children = [[i for i in range(n) if parents[i] == node] for node in range(n)]
    first_child = [c[0] if c else -1 for c in children]
    next_sibling = [-1] * n
    for c in children:
        for a, b in itertools.pairwise(c):
            next_sibling[a] = b
    return {
        "depths": depths,
        "mask": mask,
        "first_child": first_child,
        "next_sibling": next_sibling,
    }


def verify(
    tokens: list[int], parents: list[int], target: list[int], num_steps: int
) -> tuple[list[int], list[int]]:
    """The walk (nodes) and the tokens won."""
    node, walk, won = 0, [0], [target[0]]
    while len(walk) <= num_steps and target[node] != -1:
        same = [i for i in range(len(tokens)) if parents[i] == node and tokens[i] == target[node]]
        if not same:
            break
        node = same[0]
        walk.append(node)
        won.append(target[node])
    return walk, won


def random_parents(rng: np.random.Generator, n: int) -> list[int]:
    return [-1] + [int(rng.integers(0, i)) for i in range(1, n)]


# --- sampling -----------------------------------------------------------------------------------


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as in Salmon et al., SC 2011."""
    c, k = list(counter), list(key)
    for _ in range(10):
        x, y = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(y >> 32) ^ c[1] ^ k[0], y & 0xFFFFFFFF, (x >> 32) ^ c[3] ^ k[1], x & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def uniform(seed: int, position: int) -> float:
    low = 0xFFFFFFFF
    words = philox([position & low, position >> 32, 0, 0], [seed & low, seed >> 32])
    return ((words[1] << 32 | words[0]) >> 11) / 2**53


def distribution(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0
) -> np.ndarray:
    """The distribution that `sample_tokens` draws from, float64 [V]."""
    x = np.asarray(logits, np.float64)
    p = np.exp((x - x.max()) / temperature)
    order = np.argsort(-x, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        mass, num_kept = 0.0, 0
        while mass < np.float64(np.float32(top_p)):
            mass += p[order[num_kept]]
            num_kept += 1
        p[order[num_kept:]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def sample(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, u: float, min_p: float = 0
) -> int:
    if np.isnan(logits).any() or not math.isfinite(logits.max()):
        return -1
    if temperature == 0:
        return int(np.argmax(logits))
    cumulative = np.cumsum(distribution(logits, temperature, top_k, top_p, min_p))
    return int(np.argmax(cumulative > u * cumulative[-1]))


# --- slots --------------------------------------------------------------------------------------


def row_pages(roots: list[int], s: int, k: int, n: int, p: int) -> int:
    """Columns that hold the drafts of either layout and N nodes."""
    width = max(
        max(draft_position(r, p, s, layout, k - 1, s - 1), r + n) + 1
        for r in roots
        for layout in ("dense", "holey")
    )
    return -(-width // p) + 1


def cell_paths(parents_by_step: list[list[int]]) -> list[list[int]]:
    """For each branch after the last step: which branch's cell holds each draft of its path."""
    paths: list[list[int]] = [[] for _ in parents_by_step[0]]
    for parents in parents_by_step:
        paths = [[*paths[parent], branch] for branch, parent in enumerate(parents)]
    return paths


def attention_mask(
    starts: Any,
    q_lens: Any,
    columns: int,
    own_mask: Any = None,
    q_positions: Any = None,
    own_positions: Any = None,
    num_queries: int | None = None,
    window: int | None = None,
    sink: int = 0,
) -> np.ndarray:
    queries = num_queries if num_queries is not None else max(q_lens)
    if own_mask is not None:
        queries = own_mask.shape[1]
    mask = np.zeros((len(starts), queries, columns), bool)
    for b, start in enumerate(starts):
        for i in range(queries):
            if i >= q_lens[b]:
                mask[b, i, 0] = True
                continue
            at = start + i if q_positions is None else q_positions[b][i]
            for c in range(columns):
                j = c - start
                if j < 0:
                    seen, where = True, c
                else:
                    if own_mask is None:
                        seen = j <= i
                    else:
                        seen = j < own_mask.shape[2] and bool(own_mask[b, i, j])
                    where = c
                    if own_positions is not None and j < len(own_positions[b]):
                        where = own_positions[b][j]
                if window is not None:
                    seen = seen and (at - where < window or where < sink)
                mask[b, i, c] = seen
    return mask


def is_tree(tokens, depths, mask, child, sibling, root, vocab_size):
    """Whether one lane's arrays are a tree that verify can walk, link by link."""
    seen = [set(np.flatnonzero(line).tolist()) for line in mask]
    deep = depths.tolist()
    nodes = range(len(deep))
    if tokens[0] != root or seen[0] != {0}:
        return False
    if not all(0 <= token < vocab_size for token in tokens.tolist()):
        return False
    if not all(node in seen[node] and len(seen[node]) == deep[node] + 1 for node in nodes):
        return False
    for node in nodes:
        below, beside = int(child[node]), int(sibling[node])
        if not all(link == -1 or node < link < len(deep) for link in (below, beside)):
            return False
        if below != -1 and seen[below] != seen[node] | {below}:
            return False
        if beside != -1 and seen[beside] - {beside} != seen[node] - {node}:
            return False
    return True
