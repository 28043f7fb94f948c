"""Laws of drafting that ends early: the target reads the nodes that it would read anyway."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drafter_mix import Mix, Models, run_side_by_side
from specpool import Engine, EngineConfig, SamplingParams, Shape, kernels
from specpool.adaptive.node_budget import SHARES, NodeBudget, NodeChoice, NodeResults
from specpool.adaptive.row_acceptance import RowAcceptance
from specpool.assets import corpus, resolve
from specpool.attention.lanes import Lanes
from specpool.attention.seq_lens import SeqLens
from specpool.draft import DraftTree, EagleDrafter, LMDrafter, expansion, side_by_side
from specpool.draft.head_drafter import HeadDrafter
from specpool.draft.side_by_side import DraftPart, Level, Reading
from specpool.worker import worker as worker_module
from specpool.worker.parts import Part, bare_tree
from specpool.worker.selection import EarlyEnd, select
from specpool.worker.verify import verify
from specpool.worker.worker import Worker

# 60 in all; those beyond the first are `make test-full`'s.
SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 60))]
CHAIN, TREE = Shape.eagle(5, 1, 6), Shape.eagle(4, 4, 16)
LIES = [0.0, 0.25, 0.5, 0.5, 0.75, 1.0, 3.0, -1.0, math.nan, math.inf]
HONEST = [0.05, 0.1, 0.25, 0.5, 0.5, 0.9, 1.0]

Paths = Counter[tuple[int, tuple[int, ...]]]  # (lane, tokens of a path): chosen nodes


# --- the rule ------------------------------------------------------------------------------------


def paths_of(parts: list[Part], choice: NodeChoice) -> Paths:
    """The nodes that the target would read, by lane and path."""
    is_chosen, found, lane = select(parts, choice).is_chosen, Counter(), 0
    for part in parts:
        tree = part.tree
        mine = is_chosen[part.first : part.first + part.positions.numel()]
        for own, nodes in enumerate(mine.view_as(tree.tokens)):
            for node in nodes.nonzero().flatten().tolist():
                path = tree.tokens[own][tree.mask[own, node]].tolist()
                found[lane + own, tuple(path)] += 1
        lane += len(tree.tokens)
    return found


class Tables:
    """Parts of a round, whose drafters say what was drawn before, and the choice of their nodes."""

    def __init__(self, rng: random.Random) -> None:
        names = [(4, 1, 5), (2, 1, 3), (3, 2, 6), (4, 3, 10), (2, 4, 20), (5, 2, 4), (4, 3, 24)]
        names = rng.choice([names, names[:2], names[2:]])
        values = rng.choice([LIES, HONEST, [1.0, 1.0, 0.5]])
        self.shapes = [Shape.eagle(*rng.choice(names)) for _ in range(rng.randint(1, 3))]
        self.sizes = [rng.randint(1, 3) for _ in self.shapes]
        self.topk = max(shape.topk for shape in self.shapes)
        self.levels = []
        for shape, size in zip(self.shapes, self.sizes, strict=True):
            of_part = []
            for depth in range(shape.num_steps):
                num = size * (shape.topk if depth else 1)
                p = [[rng.choice(values) for _ in range(self.topk)] for _ in range(num)]
                ids = [rng.sample(range(1, 50), self.topk) for _ in range(num)]
                of_part.append(Level(torch.tensor(p), torch.tensor(ids)))
            self.levels.append(of_part)
        lanes, num_plain = sum(self.sizes), rng.randint(0, 2)
        total = num_plain + sum(
            size * shape.num_draft_tokens
            for size, shape in zip(self.sizes, self.shapes, strict=True)
        )
        num_nodes = rng.randint(lanes + num_plain, total)
        say = rng.choice([[1.0], [0.25, 1.0, 4.0]])
        factors = [[rng.choice(say) for _ in range(6)] for _ in range(lanes + num_plain)]
        grid = np.ones(SHARES, np.int64)
        self.choice = NodeChoice(num_nodes, np.array(factors, np.float32), grid)
        self.num_plain, self.num_forwards = num_plain, 0

    def _wanted(self, *, ends: bool) -> list[DraftPart]:
        """Rows 100, 101, ... are of part 1, and so on; the host knows the lengths."""
        parts, lane = [], 0
        for index, (shape, size) in enumerate(zip(self.shapes, self.sizes, strict=True)):
            lens = np.zeros(size, np.int32)
            rows = torch.arange(100 * index, 100 * index + size).int()
            lanes = Lanes(rows, SeqLens(torch.zeros(size).int(), lens, lens), 1)
            num_drafts = self.choice.num_nodes - len(self.choice.factors)
            reading = Reading(num_drafts, self.choice.factors[lane : lane + size])
            roots = torch.full((size,), 60)
            parts.append(DraftPart(lanes, shape, roots, True, reading if ends else None))
            lane += size
        return parts

    def trees(self, monkeypatch: pytest.MonkeyPatch, *, ends: bool) -> list[Part]:
        """What the target gets, if drafting may end early or not."""

        def run(asks: Any) -> Level:
            self.num_forwards += 1
            found = [self.levels[part][depth] for part, depth in (ask.view for ask in asks)]
            p = torch.cat([level.p for level in found])
            return Level(p, torch.cat([level.ids for level in found]))

        def views(cache: Any, group: int, ahead: Lanes) -> Iterator[Any]:
            part = int(ahead.rows[0]) // 100
            yield from ((part, step + 1) for step in range(self.shapes[part].num_steps - 1))

        class Asks(list):
            @property
            def tokens(self) -> torch.Tensor:
                return torch.cat([ask.tokens for ask in self])

        monkeypatch.setattr(side_by_side, "_joined", Asks)
        monkeypatch.setattr(expansion, "chain_views", views)
        wanted, self.num_forwards = self._wanted(ends=ends), 0
        chains, drafting = expansion.Chains(None, 0, 0), []  # type: ignore[arg-type]
        for index, part in enumerate(wanted):
            level = self.levels[index][0]
            branches: Any = SimpleNamespace(view=lambda step, _, index=index: (index, step + 1))
            drafting.append(
                chains.draft(part, level)
                if part.shape.topk == 1
                else expansion.draft_trees(part, level, branches, 0)
            )
        trees = side_by_side.run_side_by_side(drafting, run, wanted)
        if self.num_plain:
            lens = np.zeros(self.num_plain, np.int32)
            starts = torch.zeros(self.num_plain).int()
            lanes = Lanes(starts, SeqLens(starts, lens, lens), 1)
            roots = torch.full((self.num_plain,), 60)
            wanted.append(DraftPart(lanes, Shape.none(), roots))
            trees.append(bare_tree(roots))
        parts, first = [], 0
        for part, tree in zip(wanted, trees, strict=True):
            steps = part.shape.num_steps
            parts.append(
                Part(part.lanes, tree, tree.depths, steps, None, True, first, None, (), None)
            )
            first += tree.tokens.numel()
        return parts


def test_no_deeper_draft_could_change_the_choice(monkeypatch) -> None:
    """Chains and trees of any shapes, lies, ties, and factors that grow with the depth."""
    saved, of_trees = 0, 0
    for seed in range(600):
        tables = Tables(random.Random(seed))
        whole = tables.trees(monkeypatch, ends=False)
        all_forwards = tables.num_forwards
        found = tables.trees(monkeypatch, ends=True)
        expected = paths_of(whole, tables.choice)
        assert paths_of(found, tables.choice) == expected, seed
        saved += all_forwards - tables.num_forwards
        ended = [part for part in found if part.tree.levels is not None]
        assert bool(ended) == (tables.num_forwards < all_forwards)
        of_trees += any(part.tree.next_sibling.ge(0).any() for part in ended)
        for part in ended:
            part.tree.check_values(np.full(len(part.tree.tokens), 60), 61)
            deeper = part.tree.depths > part.tree.levels.unsqueeze(1)
            assert (part.tree.tokens[deeper] == 60).all()
            assert not part.tree.p[deeper].nan_to_num(nan=0.0).any()
    assert saved > 200
    assert of_trees > 40


@pytest.mark.parametrize(
    ("shape", "p", "num_drafts", "levels"),
    [
        ((5, 1, 6), [0.5], 0, 1),  # nothing is read: the first level is there anyway
        ((5, 1, 6), [0.5], 3, 3),  # the drafts of a chain count less and less
        ((5, 1, 6), [1.0], 3, 3),  # or the same: then the first of them are read
        ((5, 1, 6), [0.5], 5, 5),
        ((4, 2, 8), [0.9, 0.05], 2, 2),
        ((4, 2, 8), [0.1, 0.1], 2, 1),  # a path of two is less likely than each alone
        ((4, 2, 3), [0.1, 0.1], 2, 1),  # the tree has no room for more
    ],
)
def test_drafting_ends_as_soon_as_it_may(monkeypatch, shape, p, num_drafts, levels) -> None:
    tables = Tables(random.Random(0))
    tables.shapes, tables.sizes, tables.num_plain = [Shape.eagle(*shape)], [1], 0
    ids = [list(range(1, len(p) + 1))]
    tables.levels = [
        [
            Level(torch.tensor([p] * num), torch.tensor(ids * num))
            for num in [1] + [len(p)] * (shape[0] - 1)
        ]
    ]
    tables.choice = NodeChoice(1 + num_drafts, np.ones((1, 6), np.float32), np.ones(8, int))
    (part,) = tables.trees(monkeypatch, ends=True)
    assert part.num_drafted_steps == levels
    assert tables.num_forwards == levels - 1


def test_full_trees_need_no_deeper_level(monkeypatch) -> None:
    """Trees of two drafts each are full after two levels, though all of them are read."""
    tables = Tables(random.Random(0))
    tables.shapes, tables.sizes, tables.num_plain = [Shape.eagle(4, 2, 3)], [2], 0
    rest = [[0.5, 0.0], [0.5, 0.0], [0.75, 0.0], [0.75, 0.0]]
    of_levels = [[[1.0, 0.0], [0.4, 0.0]], rest, rest, rest]
    tables.levels = [[Level(torch.tensor(p), torch.tensor([[1, 2]] * len(p))) for p in of_levels]]
    tables.choice = NodeChoice(6, np.ones((2, 6), np.float32), np.ones(8, int))
    whole = paths_of(tables.trees(monkeypatch, ends=False), tables.choice)
    (part,) = tables.trees(monkeypatch, ends=True)
    assert part.num_drafted_steps == 2
    assert paths_of([part], tables.choice) == whole


def test_a_draft_of_a_chain_counts_no_more_than_those_before(monkeypatch) -> None:
    """The second draft of the first row counts 0.05, not 0.8: the fourth of the other has more."""
    tables = Tables(random.Random(0))
    tables.shapes, tables.sizes, tables.num_plain = [CHAIN], [2], 0
    rows = [[0.2, 1.0, 0.05, 1.0, 1.0], [0.9, 1.0, 0.09, 1.0, 1.0]]
    ids = torch.tensor([[1], [2]])
    tables.levels = [[Level(torch.tensor(p).unsqueeze(1), ids) for p in zip(*rows, strict=True)]]
    factors = np.ones((2, 6), np.float32)
    factors[0, 1:3] = 0.25, 4.0
    tables.choice = NodeChoice(6, factors, np.ones(8, int))
    whole = paths_of(tables.trees(monkeypatch, ends=False), tables.choice)
    (part,) = tables.trees(monkeypatch, ends=True)
    assert paths_of([part], tables.choice) == whole
    assert part.num_drafted_steps == 4


# --- what is learned -----------------------------------------------------------------------------


def ended_chain(tokens: list[int], levels: int) -> DraftTree:
    tree = DraftTree.chain(torch.tensor([tokens]))
    p = torch.ones(1, len(tokens))
    p[0, 1 + levels :] = 0.0
    return replace(tree, p=p, levels=torch.tensor([levels], dtype=torch.int32))


def told(tree: DraftTree, num_nodes: int, said: int) -> NodeResults:
    """What a round of one lane tells, whose target says one token everywhere."""
    lens, size = np.zeros(1, np.int32), tree.tokens.shape[1]
    lanes = Lanes(torch.ones(1).int(), SeqLens(torch.zeros(1).int(), lens, lens), size)
    part = Part(lanes, tree, tree.depths, size - 1, None, True, 0, None, (), None)
    grid = np.minimum(np.arange(1, SHARES + 1), size)
    choice = NodeChoice(num_nodes, np.ones((1, size), np.float32), grid)
    selection = select([part], choice)
    drawn = selection.drawn(part, torch.full((num_nodes,), said))
    verdict = verify(selection.cut(part), drawn, part.num_steps)
    return NodeResults.of(selection.told([part], [verdict]).numpy(), 1)


def test_a_level_that_was_not_drafted_is_neither_hit_nor_miss() -> None:
    """The token below it is the root's, which may be the right one by chance."""
    ended = told(ended_chain([7, 7, 7, 7, 7], 2), 3, 7)
    assert ended.goes_on.tolist() == [False]
    assert ended.undrafted.tolist() == [2]
    whole = told(replace(DraftTree.chain(torch.full((1, 5), 7))), 3, 7)
    assert whole.goes_on.tolist() == [True]
    assert whole.undrafted.tolist() == [0]
    shapes = [Shape.none(), *(Shape.eagle(depth, 1, depth + 1) for depth in (1, 2, 3, 5))]
    ours, theirs = (RowAcceptance(shapes, 4) for _ in range(2))
    rows, lens = np.array([1, 2, 3], np.int32), np.array([3, 1, 2], np.int32)
    for _ in range(3):
        goes_on, undrafted = np.array([False, False, True]), np.array([3, 2, 1], np.int32)
        ours.learn(rows, np.array([4, 4, 4], np.int32), lens, goes_on, undrafted)
        theirs.learn(rows, np.array([2, 3, 2], np.int32), lens + goes_on.astype(np.int32))
    np.testing.assert_array_equal(ours._hits, theirs._hits)
    np.testing.assert_array_equal(ours._tries, theirs._tries)


def test_a_round_that_ended_early_tells_no_curve() -> None:
    rows, drafters, lens = (np.array([of], np.int32) for of in (1, 0, 3))
    budget = NodeBudget(4, 4)
    whole = told(replace(DraftTree.chain(torch.full((1, 5), 7))), 3, 7)
    budget.learn(rows, drafters, lens, whole)
    assert budget._curve is not None
    before = budget._curve.copy()
    ended = told(ended_chain([7, 7, 7, 7, 7], 2), 3, 7)
    assert np.isnan(ended.curve).all()
    budget.learn(rows, drafters, lens, ended)
    np.testing.assert_array_equal(budget._curve, before)


# --- engines -------------------------------------------------------------------------------------


class Rounds:
    """Lets every round read a random number of its nodes, and notes which; may spoil cells."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, spoils: bool) -> None:
        self.rng, self.read = random.Random(0), []
        choose = NodeBudget.choose

        def at_random(budget: NodeBudget, *args: Any) -> NodeChoice | None:
            nodes = args[0]
            budget._fixed = self.rng.randint(len(nodes), int(nodes.sum()))
            return choose(budget, *args)

        def noted(parts: list[Part], choice: NodeChoice) -> Any:
            self.read.append(paths_of(parts, choice))
            return select(parts, choice)

        monkeypatch.setattr(NodeBudget, "choose", at_random)
        monkeypatch.setattr(worker_module, "select", noted)
        if spoils:
            for kind in (HeadDrafter, LMDrafter):
                monkeypatch.setattr(kind, "propose_parts", self._spoiled(kind.propose_parts))
            monkeypatch.setattr(expansion, "new_candidates", self._garbage)

    @staticmethod
    def _spoiled(propose: Any) -> Any:
        """Before a drafter drafts, all cells of its drafts hold great numbers."""

        def spoiled(drafter: Any, parts: list[DraftPart]) -> list[DraftTree]:
            cache, group = drafter._cache, drafter._group
            layers = (
                [(keys, values) for _, keys, values in drafter._kv]
                if hasattr(drafter, "_kv")
                else [(cache.keys[i], cache.values[i]) for i in drafter._layer_ids]
            )
            for part in parts:
                slots = kernels.draft_write_slots(
                    cache.tables[group],
                    cache.page_sizes[group],
                    part.lanes.rows,
                    part.lanes.starts,
                    num_steps=part.shape.num_steps,
                    topk=part.shape.topk,
                    layout=drafter._layout if part.shape.topk > 1 else "dense",
                )
                for keys, values in layers:
                    keys[slots.long().flatten()] = 300.0
                    values[slots.long().flatten()] = -300.0
            return propose(drafter, parts)

        return spoiled

    @staticmethod
    def _garbage(*args: Any) -> Any:
        scores, tokens, parents = new_candidates(*args)
        return scores.fill_(9e9), tokens.fill_(-7), parents.fill_(1 << 40)


new_candidates = expansion.new_candidates


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp("tiny-mtp"))
    yield made
    made.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_nodes_and_the_text_are_those_of_whole_drafts(models, seed) -> None:
    """Chains and trees, D = 0 and 1, layouts, windows, sinks, drafters mixed, retraction, sessions.

    Cells and buffers of the levels that are not drafted hold garbage, which nobody may read.
    """
    found = []
    for ends in (True, False):
        mix = Mix(seed)
        mix.options["verify_nodes"] = 1
        engine = mix.engine(models)
        engine.core.worker.early_end.is_on = ends
        with pytest.MonkeyPatch.context() as patch:
            rounds = Rounds(patch, spoils=ends)
            outputs = run_side_by_side(engine, mix.talks, mix.rng)
        texts = [[output.token_ids for output in turns] for turns in outputs]
        assert [o.error for turns in outputs for o in turns if o.error] == []
        found.append((rounds.read, texts))
        if not ends:
            assert engine.stats().undrafted_level_ct == 0
    (ours, our_texts), (theirs, their_texts) = found
    assert our_texts == their_texts == Mix(seed).expected(models.target)
    assert ours == theirs


def params(**options: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 40, "ignore_eos": True, **options})


def test_each_row_has_its_own_factors(target, heads, monkeypatch) -> None:
    """In parts of one shape, and of the rows of one drafter among them."""
    seen: Counter[str] = Counter()

    def by_row(budget: NodeBudget, rows: np.ndarray, drafters: np.ndarray) -> np.ndarray:
        return np.repeat(np.float32(1 / (1 + rows))[:, None], 6, axis=1).astype(np.float32)

    def checked(propose: Any) -> Any:
        def check(drafter: Any, parts: list[DraftPart]) -> list[DraftTree]:
            for part in parts:
                if part.reading is None:  # the target reads all
                    continue
                expected = by_row(None, part.lanes.rows.numpy(), None)  # type: ignore[arg-type]
                np.testing.assert_array_equal(part.reading.factors, expected)
                seen[type(drafter).__name__] += len(expected)
            return propose(drafter, parts)

        return check

    monkeypatch.setattr(NodeBudget, "factors", by_row)
    for kind in (HeadDrafter, LMDrafter):
        monkeypatch.setattr(kind, "propose_parts", checked(kind.propose_parts))
    drafters = {
        "eagle": EagleDrafter(heads["specpool/tiny-eagle3"]),
        "lm": LMDrafter.from_pretrained(resolve("specpool/tiny-draft"), target),
    }
    short = Shape.eagle(2, 1, 3)
    config = EngineConfig(shape=CHAIN, shapes=(short,), verify_nodes=12, max_context_len=160)
    engine = Engine(target, drafters, config=config)
    asked = [params(drafter=name) for name in ("eagle", "lm", "eagle", "lm", "eagle", "eagle")]
    shapes = [CHAIN] * 4 + [short] * 2
    outputs = engine.generate(corpus.prompts(6, 30), asked, shape=shapes)
    assert [output.error for output in outputs] == [None] * 6
    assert min(seen["EagleDrafter"], seen["LMDrafter"]) > 10


@pytest.mark.parametrize("draft", ["tiny-eagle3", "tiny-draft"])
def test_levels_that_were_not_drafted_are_counted(draft: str) -> None:
    """A row alone that reads two drafts of a chain needs two levels of five, in each round."""
    config = {"shape": CHAIN, "verify_nodes": 3, "max_context_len": 160}
    with Engine.from_pretrained(draft=f"specpool/{draft}", **config) as engine:
        (output,) = engine.generate(corpus.prompts(1, 30), params())
        stats = engine.stats()
    assert output.error is None
    assert stats.drafted_round_ct > 10
    assert stats.undrafted_level_ct == 3 * stats.drafted_round_ct


def test_few_rounds_try_where_drafting_does_not_end_early() -> None:
    """And all of them again, once one has ended early."""
    whole, ended = (
        SimpleNamespace(tree=tree)
        for tree in (DraftTree.chain(torch.zeros(1, 5).long()), ended_chain([7] * 5, 2))
    )
    early_end = EarlyEnd(is_on=True)
    choice = NodeChoice(5, np.ones((2, 6), np.float32), np.ones(8, int))
    tried = []
    for number in range(60):
        reading = early_end.reading(choice, 0, 1)
        tried.append(reading is not None)
        assert reading is None or (reading.num_drafts, len(reading.factors)) == (3, 1)
        early_end.note([whole, ended] if number == 32 else [whole])  # type: ignore[list-item]
    assert [number for number, each in enumerate(tried) if each] == [
        *range(9), 16, 24, 32, *range(33, 42), 49, 57
    ]  # fmt: skip


def test_an_engine_notes_rounds_that_do_not_end_early(target, heads) -> None:
    """Two chains of which all drafts but one are read need all their levels."""
    config = EngineConfig(shape=CHAIN, verify_nodes=11, max_context_len=160)
    engine = Engine(target, EagleDrafter(heads["specpool/tiny-eagle3"]), config=config)
    outputs = engine.generate(corpus.prompts(2, 30), params())
    assert [output.error for output in outputs] == [None] * 2
    assert engine.core.worker.early_end._idle > 3
    assert engine.stats().undrafted_level_ct == 0


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_a_gpu_drafts_all_levels(target, heads, monkeypatch, shape: Shape) -> None:
    """It would have to wait for the answer."""
    monkeypatch.setattr(worker_module, "runs_kernels", lambda device: True)
    config = EngineConfig(shape=shape, verify_nodes=3, max_context_len=160)
    engine = Engine(target, EagleDrafter(heads["specpool/tiny-eagle3"]), config=config)
    outputs = engine.generate(corpus.prompts(1, 30), params())
    assert [output.error for output in outputs] == [None]
    assert engine.stats().undrafted_level_ct == 0


def test_a_round_that_reads_all_drafts_all(target, heads, monkeypatch) -> None:
    seen = []
    parts = Worker._parts

    def noted(*args: Any) -> list[Part]:
        found = parts(*args)
        seen.extend(part.tree.levels for part in found)
        return found

    monkeypatch.setattr(Worker, "_parts", noted)
    engine = Engine(
        target,
        EagleDrafter(heads["specpool/tiny-eagle3"]),
        config=EngineConfig(shape=TREE, max_context_len=160),
    )
    engine.generate(corpus.prompts(2, 30), params())
    assert seen
    assert seen == [None] * len(seen)
