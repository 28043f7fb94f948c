"""Laws of drafting: a branch attends to its true ancestors, in every layout."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ancestry_kit import load_engine
from eagle_reference import DenseCache
from scripted import Scripted
from specpool import ConfigError, Engine, SamplingParams, Shape
from specpool.engine.assets import corpus, resolve
from specpool.engine.attention.lanes import Lanes
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.draft import DraftTree, EagleDrafter, ScriptedDrafter
from specpool.engine.models import EagleHead

HEADS = ("specpool/tiny-eagle", "specpool/tiny-eagle3")


def make(draft: str, **options: object) -> Engine:
    return load_engine(draft=draft, max_context_len=400, **options)


def recorded(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int):
    """Generate; returns the outputs and every tree that was proposed, with what it was for."""
    trees = record(engine)
    return engine.generate(prompts, SamplingParams(max_new_tokens=num_tokens)), trees


def record(engine: Engine):
    """Every tree that is proposed from here on, with what it is for."""
    trees = []
    propose = engine.drafter.propose

    def recording(lanes, shape, roots, tokens):
        tree = propose(lanes, shape, roots, tokens)
        trees.append((lanes.starts.clone(), tree))
        return tree

    engine.drafter.propose = recording
    return trees


def counting(ran: Counter[str], name: str, call):
    def counted(*arguments):
        ran[name] += 1
        return call(*arguments)

    return counted


class Recomputed:
    """Draft probabilities by running the head over the whole path from scratch, without pages."""

    def __init__(self, head: EagleHead, features: torch.Tensor, tokens: Sequence[int]) -> None:
        """Take over a prefix: the target's features at each position, and the tokens."""
        self.head, self.tokens = head, list(tokens)
        self.prefix = DenseCache(head.num_layers)
        shifted = torch.tensor(self.tokens[1:])
        hidden = head.combine(features[: len(shifted)])
        positions = torch.arange(len(shifted))
        self.root = head.forward(shifted, hidden, positions, self.prefix)[-1:]

    def topk(self, path: Sequence[int], k: int) -> list[tuple[float, int]]:
        """The k likeliest tokens after the root and `path`."""
        cache, hidden = copy.deepcopy(self.prefix), self.root
        position = len(self.tokens) - 1
        for step, token in enumerate(path):
            where = torch.tensor([position + step])
            hidden = self.head.forward(torch.tensor([token]), hidden, where, cache)
        p, ids = self.head.topk(hidden, k)
        return list(zip(p[0].tolist(), ids[0].tolist(), strict=True))


def expand(recomputed: Recomputed, shape: Shape) -> set[tuple[int, ...]]:
    """EAGLE-2's tree as a set of paths: expand, keep K a level, then the N - 1 best of all."""
    level = [(p, (token,)) for p, token in recomputed.topk((), shape.topk)]
    everything = list(level)
    for _ in range(shape.num_steps - 1):
        children = [
            (score * p, (*path, token))
            for score, path in level
            for p, token in recomputed.topk(path, shape.topk)
        ]
        everything += children
        level = sorted(children, key=lambda child: -child[0])[: shape.topk]
    everything.sort(key=lambda candidate: -candidate[0])
    return {path for _, path in everything[: shape.num_draft_tokens - 1]}


def paths(tree: DraftTree, lane: int) -> set[tuple[int, ...]]:
    """The tokens from below the root to each node."""
    found = set()
    for node in range(1, tree.tokens.shape[1]):
        line = [i for i in range(1, node + 1) if tree.mask[lane, node, i]]
        found.add(tuple(tree.tokens[lane, line].tolist()))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("draft", HEADS)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 1, 4), {}),
        ((4, 4, 16), {"page_size": 16}),
        ((4, 4, 16), {"page_size": 3, "layout": "holey"}),
        ((3, 8, 20), {"page_size": 64, "layout": "holey", "placement": "shared"}),
    ],
)
@torch.inference_mode()
def test_proposals_equal_a_recomputation_along_each_path(draft, shape, options):
    """Every branch sees the KV of its own ancestors: pages, masks and copies change nothing."""
    shape = Shape.eagle(*shape)
    prompts = [p[:n] for p, n in zip(corpus.prompts(3), (17, 30, 9), strict=True)]
    with make(draft, shape=shape, **options) as engine:
        outputs, trees = recorded(engine, prompts, 24)
        model, head = engine.target.model, engine.drafter.head
        texts = [o.prompt_ids + o.token_ids for o in outputs]
    checked, differing = recompute(model, head, texts, trees[:4], shape)
    assert checked == 12
    assert differing <= 1


def recompute(model, head, texts, trees, shape) -> tuple[int, int]:
    """How many proposals were checked, and how many a recomputation makes otherwise."""
    checked = differing = 0
    for lane, text in enumerate(texts):
        hidden = model(
            torch.tensor([text]), output_hidden_states=True, use_cache=False
        ).hidden_states
        layers = head.feature_layers
        features = torch.cat([hidden[i][0] for i in layers], -1) if layers else hidden[-1][0]
        for starts, tree in trees:
            if lane >= len(starts):
                continue
            root = int(starts[lane])
            recomputed = Recomputed(head, features, text[: root + 1])
            checked += 1
            # A near-tie of two candidates may go either way; nothing else may differ.
            differing += len(expand(recomputed, shape) ^ paths(tree, lane)) > 0
    return checked, differing


def two_layers(folder: Path) -> Path:
    """The shipped EAGLE-1 head with its layer twice."""
    source = Path(resolve("specpool/tiny-eagle"))
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    state = load_file(source / "model.safetensors")
    for name, tensor in list(state.items()):
        if name.startswith("layers.0."):
            state[name.replace("layers.0.", "layers.1.")] = tensor.clone()
    state["layers.1.input_layernorm.weight"] = torch.ones(config["hidden_size"]).half()
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.sample(2)
@pytest.mark.parametrize("draft", [*HEADS, "two layers"])
@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1},
        {"page_size": 4, "overlap_depth": 0},
        {"page_size": 3, "layout": "holey", "placement": "shared"},
        {"page_size": 4, "worker": "v1", "overlap_depth": 0},
    ],
)
@torch.inference_mode()
def test_a_proposal_after_plain_rounds_is_that_of_a_head_that_ran_in_all_of_them(
    draft, options, tmp_path
):
    """Plain rounds write keys and values alone; the last token runs again before a draft.

    Some rows have drafted in the round before, others never stopped to decode plainly.
    """
    shape = Shape.eagle(3, 2, 6)
    draft = two_layers(tmp_path) if draft == "two layers" else draft
    script = Scripted([Shape.none()] * 3 + [shape, Shape.none(), shape, shape])
    prompts = [p[:n] for p, n in zip(corpus.prompts(3), (17, 30, 9), strict=True)]
    params = [SamplingParams(max_new_tokens=48, max_draft_steps=n) for n in (None, None, 0)]
    with make(draft, adaptive=script.config(), **options) as engine:
        script.take_over(engine)
        head, ran = engine.drafter.head, Counter()
        for name in ("extend", "write", "catch_up"):
            setattr(engine.drafter, name, counting(ran, name, getattr(engine.drafter, name)))
        engine.generate(prompts, SamplingParams(max_new_tokens=3))  # plain rounds in every row
        script.given.clear()
        script.script.insert(0, shape)  # so that a row that comes later begins with a draft
        trees = record(engine)
        outputs = engine.generate(prompts, params)
        texts = [o.prompt_ids + o.token_ids for o in outputs]
        model = engine.target.model
    checked, differing = recompute(model, head, texts, trees[:6], shape)
    assert checked == 12 and differing <= 1
    assert min(ran["write"], ran["catch_up"]) >= 4


@pytest.mark.sample(1)
@pytest.mark.parametrize("draft", HEADS)
@pytest.mark.parametrize("ancestry", ["exact", "branch"])
@pytest.mark.parametrize(("page_size", "topk"), list(itertools.product((3, 4, 16, 64), (2, 4, 8))))
def test_layout_and_placement_change_no_proposal(draft, ancestry, page_size, topk):
    """Whole-page readers of the holey layout see exactly what single-token readers see."""
    shape = Shape.eagle(4, topk, 2 * topk + 3)
    prompts = [p[:n] for p, n in zip(corpus.prompts(3), (17, 32, 9), strict=True)]
    lens = []
    for layout, placement in (("dense", "split"), ("holey", "split"), ("holey", "shared")):
        with make(
            draft,
            shape=shape,
            page_size=page_size,
            layout=layout,
            placement=placement,
            ancestry=ancestry,
        ) as engine:
            outputs = engine.generate(prompts, SamplingParams(max_new_tokens=40))
            lens.append([output.accept_lens for output in outputs])
    assert lens[0] == lens[1] == lens[2]


def test_upstreams_reading_is_another_one():
    """With `branch`, a branch that changed its parent sees KV that is not its ancestors'."""
    shape = Shape.eagle(5, 8, 32)
    prompts = corpus.prompts(6, 100)
    trees = {}
    for ancestry in ("exact", "branch"):
        with make("specpool/tiny-eagle3", shape=shape, ancestry=ancestry) as engine:
            trees[ancestry] = recorded(engine, prompts, 3)[1][0][1]
    same = [paths(trees["exact"], i) == paths(trees["branch"], i) for i in range(len(prompts))]
    assert not all(same)


def lanes(*starts: int) -> Lanes:
    rows = torch.arange(1, len(starts) + 1, dtype=torch.int32)
    known = np.array(starts, np.int32)
    return Lanes(rows, SeqLens(torch.from_numpy(known), known, known), np.ones_like(known))


@pytest.mark.parametrize("shape", [(3, 1, 4), (4, 4, 16), (2, 2, 2), (5, 8, 64), (1, 8, 9)])
def test_scripted_trees_hold_the_truth_on_scattered_nodes(shape):
    """With no errors the whole continuation is accepted; with errors only, nothing is."""
    shape = Shape.eagle(*shape)
    reference = list(range(50))
    for error_rate in (0.0, 1.0):
        drafter = ScriptedDrafter([reference], vocab_size=60, error_rate=error_rate, seed=3)
        tree = drafter.propose(lanes(9), shape, torch.tensor([9]), [reference[:10]])
        found = paths(tree, 0)
        assert tree.depths.max() <= shape.num_steps
        assert tree.tokens.shape == (1, shape.num_draft_tokens)
        spine = min(shape.num_steps, shape.num_draft_tokens - 1)
        if error_rate == 0:
            assert tuple(range(10, 10 + spine)) in found
        else:
            assert all(path[0] != 10 for path in found)


def test_scripted_drafter_refuses_bad_arguments():
    with pytest.raises(ConfigError, match="error_rate"):
        ScriptedDrafter([], vocab_size=9, error_rate=1.5)
    with pytest.raises(ConfigError, match="vocab_size"):
        ScriptedDrafter([], vocab_size=1)
    with pytest.raises(ConfigError, match="tokens"):
        ScriptedDrafter([], vocab_size=9).propose(
            lanes(3), Shape.eagle(1, 1, 2), torch.tensor([1]), None
        )


def test_chain_tree_is_the_general_one():
    tokens = np.arange(8, dtype=np.int64).reshape(2, 4)
    parents = np.tile(np.arange(-1, 3, dtype=np.int32), (2, 1))
    chain = DraftTree.chain(torch.from_numpy(tokens))
    general = DraftTree.from_parents(tokens, parents)
    for name in ("tokens", "depths", "mask", "first_child", "next_sibling"):
        assert torch.equal(getattr(chain, name), getattr(general, name))


def test_an_eagle_drafter_asks_for_its_heads_features():
    with make("specpool/tiny-eagle3") as engine:
        assert isinstance(engine.drafter, EagleDrafter)
        assert tuple(engine.drafter.feature_layers) == (1, 2, 3)
        assert not engine.drafter.reads_tokens
