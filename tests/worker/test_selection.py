"""Laws of rounds that leave nodes out: the likeliest are read, the text is plain decoding's."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter_mix import Mix, Models, run_side_by_side
from specpool import ConfigError, Engine, EngineConfig, SamplingParams, Shape
from specpool.adaptive.node_budget import SHARES, NodeBudget, NodeChoice, NodeResults
from specpool.adaptive.row_acceptance import RowAcceptance
from specpool.assets import corpus, resolve
from specpool.attention.lanes import Lanes
from specpool.attention.seq_lens import SeqLens
from specpool.draft import DraftTree, EagleDrafter, NgramDrafter
from specpool.models import TargetModel
from specpool.worker import selection as selection_module
from specpool.worker.parts import Part
from specpool.worker.selection import Selection, select
from specpool.worker.verify import verify
from specpool.worker.worker import Worker

# 60 in all; those beyond the first are `make test-full`'s.
SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 60))]
TREE, CHAIN = Shape.eagle(4, 4, 16), Shape.eagle(5, 1, 6)


# --- the choice ----------------------------------------------------------------------------------


def random_part(rng: random.Random, first: int) -> Part:
    """Trees of any form, whose probabilities have ties, lie, and are no numbers."""
    batch, size = rng.randint(1, 4), rng.choice([1, 2, 5, 9])
    parents = np.full((batch, size), -1, np.int32)
    for lane in range(batch):
        parents[lane, 1:] = [rng.randrange(node) for node in range(1, size)]
    tokens = [[rng.randrange(3) for _ in range(size)] for _ in range(batch)]
    tree = DraftTree.from_parents(np.array(tokens, np.int64), parents)
    if rng.random() < 0.8:
        values = [0.0, 0.25, 0.5, 0.5, 1.0, 3.0, -1.0, math.nan, math.inf]
        p = [[rng.choice(values) for _ in range(size)] for _ in range(batch)]
        tree = replace(tree, p=torch.tensor(p))
    lens = np.zeros(batch, np.int32)
    starts = torch.zeros(batch, dtype=torch.int32)
    lanes = Lanes(torch.arange(1, batch + 1).int(), SeqLens(starts, lens, lens), size)
    return Part(lanes, tree, tree.depths, size, None, True, first, None, (), None)


def by_hand(parts: list[Part], factors: torch.Tensor) -> tuple[list[int], list[float]]:
    """The nodes, those of the greatest least probability on the path first; and these."""
    found, lane = [], 0
    for part in parts:
        for own in range(part.positions.shape[0]):
            for node in range(part.positions.shape[1]):
                path = part.tree.mask[own, node].nonzero().flatten().tolist()
                least = 2.0
                for each in path[1:]:
                    p = float(part.tree.known_p[own, each])
                    p = 0.0 if math.isnan(p) else min(max(p, 0.0), 1.0)
                    p *= float(factors[lane, part.tree.depths[own, each]])
                    least = min(least, p, 1.0)
                found.append(least)
            lane += 1
    return sorted(range(len(found)), key=lambda node: (-found[node], node)), found


def random_parts(rng: random.Random) -> tuple[list[Part], NodeChoice]:
    parts: list[Part] = []
    for _ in range(rng.randint(1, 3)):
        parts.append(random_part(rng, sum(part.positions.numel() for part in parts)))
    num_lanes = sum(len(part.positions) for part in parts)
    total = sum(part.positions.numel() for part in parts)
    factors = [[rng.choice([0.5, 1.0, 2.0]) for _ in range(9)] for _ in range(num_lanes)]
    grid = np.sort(np.array([rng.randint(1, total) for _ in range(SHARES)]))
    return parts, NodeChoice(rng.randint(num_lanes, total), np.array(factors, np.float32), grid)


@pytest.mark.parametrize("seed", range(60))
def test_the_likeliest_nodes_are_chosen_with_their_parents(seed):
    parts, choice = random_parts(random.Random(seed))
    order, least = by_hand(parts, torch.from_numpy(choice.factors))
    selection = select(parts, choice)
    chosen, num_left_out = set(selection.nodes.tolist()), 0
    assert sorted(order[: choice.num_nodes]) == selection.nodes.tolist()
    sums = np.cumsum([min(least[node], 1.0) for node in order])
    np.testing.assert_allclose(selection.curve.numpy(), sums[choice.grid - 1], rtol=1e-5)
    for part in parts:
        size = part.positions.shape[1]
        tokens = selection.cut(part).tokens
        for index in range(part.positions.numel()):
            node, root = part.first + index, part.first + index // size * size
            lane, own = divmod(index, size)
            stands_for = int(selection.nodes[selection.places[node]])
            assert stands_for == (node if node in chosen else root)
            assert (tokens[lane, own] < 0) == (node not in chosen)
            num_left_out += node not in chosen
            above = part.tree.mask[lane, own].nonzero().flatten() + root
            assert node not in chosen or set(above.tolist()) <= chosen
    assert num_left_out == len(order) - choice.num_nodes
    assert selection.of_lanes is not None
    queries, counts = selection.of_lanes
    sizes = [part.positions.shape[1] for part in parts for _ in range(len(part.positions))]
    found, first = [], 0
    for lane, size in enumerate(sizes):
        found += (first + queries[lane, : counts[lane]]).tolist()
        assert not queries[lane, counts[lane] :].any()
        first += size
    assert found == selection.nodes.tolist()


@pytest.mark.parametrize("seed", range(60))
def test_what_a_round_tells_is_what_a_whole_one_would_have_shown(seed):
    """The walk over all nodes goes on exactly where a lane says so; nothing else is a miss."""
    rng = random.Random(seed)
    parts, choice = random_parts(rng)
    selection = select(parts, choice)
    total = sum(part.positions.numel() for part in parts)
    said = torch.tensor([rng.randrange(3) for _ in range(total)])  # the target's tokens
    verdicts, whole = [], []
    for part in parts:
        tokens = selection.drawn(part, said[selection.nodes])
        verdicts.append(verify(selection.cut(part), tokens, part.num_steps))
        whole.append(verify(part.tree, Selection.of(part, said).contiguous(), part.num_steps))
    results = NodeResults.of(selection.told(parts, verdicts).numpy(), len(choice.factors))
    cut_lens = torch.cat([verdict.accept_len for verdict in verdicts])
    lens = torch.cat([verdict.accept_len for verdict in whole])
    assert results.goes_on.tolist() == (lens > cut_lens).tolist()
    lane = 0
    for part in parts:
        is_chosen = Selection.of(part, selection.is_chosen)
        for own in range(len(part.positions)):
            guess = [0.0] * 9
            for node in range(part.positions.shape[1]):
                p = float(part.tree.known_p[own, node])
                p = 0.0 if math.isnan(p) else min(max(p, 0.0), 1.0)
                guess[part.tree.depths[own, node]] += p * float(is_chosen[own, node])
            np.testing.assert_allclose(results.guess[lane], guess, rtol=1e-5)
            lane += 1


def test_a_draft_that_was_not_read_is_no_miss():
    """A lane that goes on counts as one of a lesser shape, all of whose drafts were right."""
    shapes = [Shape.none(), *(Shape.eagle(depth, 1, depth + 1) for depth in (1, 2, 3, 5))]
    ours, theirs = (RowAcceptance(shapes, 4) for _ in range(2))
    rows = np.array([1, 2, 3], np.int32)
    lens = np.array([3, 1, 2], np.int32)
    for _ in range(3):
        goes_on = np.array([True, True, False])
        ours.learn(rows, np.array([4, 3, 4], np.int32), lens, goes_on)
        theirs.learn(rows, np.array([3, 1, 4], np.int32), lens + goes_on.astype(np.int32))
    np.testing.assert_array_equal(ours._hits, theirs._hits)
    np.testing.assert_array_equal(ours._tries, theirs._tries)
    np.testing.assert_array_equal(ours.tokens(rows), theirs.tokens(rows))


# --- the text ------------------------------------------------------------------------------------


class Left:
    """Lets every round read a random number of its nodes, and counts the nodes left out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng, self.num_nodes = random.Random(0), 0
        choose = NodeBudget.choose

        def at_random(budget: NodeBudget, *args, **kwargs):
            nodes = args[0]
            total = int(nodes.sum())
            budget._fixed = self.rng.randint(len(nodes), total)
            choice = choose(budget, *args, **kwargs)
            if choice is not None:
                self.num_nodes += total - choice.num_nodes
            return choice

        monkeypatch.setattr(NodeBudget, "choose", at_random)


@pytest.fixture(params=["the host knows the nodes", "the device knows them"])
def left(request, monkeypatch) -> Left:
    """Both ways to attend: for the nodes alone, as on a CPU, and for all nodes, as on a GPU."""
    on_device = request.param == "the device knows them"
    monkeypatch.setattr(selection_module, "runs_kernels", lambda device: on_device)
    return Left(monkeypatch)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp("tiny-mtp"))
    yield made
    made.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_any_number_of_nodes_gives_the_text_of_plain_decoding(models, left, seed):
    """Chains and trees, D = 0 and 1, layouts, windows, drafters mixed, retraction, sessions."""
    mix = Mix(seed)
    mix.options["verify_nodes"] = 1
    expected = mix.expected(models.target)
    outputs = run_side_by_side(mix.engine(models), mix.talks, mix.rng)
    for talk, found, texts in zip(mix.talks, outputs, expected, strict=True):
        assert [o.error for o in found] == [None] * len(talk.turns)
        assert [o.token_ids for o in found] == texts
    assert left.num_nodes > 0


@pytest.fixture
def plain(target: TargetModel) -> Engine:
    return Engine(target, config=EngineConfig(max_context_len=160))


def params(**options: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 40, "ignore_eos": True, **options})


@pytest.mark.parametrize("shape", [TREE, CHAIN])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unwritten_cells_are_not_read(target, heads, plain, left, monkeypatch, shape, temperature):
    """Before each verify, all of its cells hold great numbers: who reads one speaks otherwise."""
    make = Worker._tree_pass

    def spoiled(worker, requests, lanes, parts, *others):
        layers = worker._forward._layers
        for part in parts:
            for group in worker._fields:
                slots = part.lanes.slots(worker._cache, group)
                for _, keys, values, of in layers:
                    if of == group:
                        keys[slots], values[slots] = 300.0, -300.0
        return make(worker, requests, lanes, parts, *others)

    monkeypatch.setattr(Worker, "_tree_pass", spoiled)
    config = EngineConfig(shape=shape, verify_nodes=1, max_context_len=160)
    engine = Engine(target, EagleDrafter(heads["specpool/tiny-eagle3"]), config=config)
    asked = params(temperature=temperature, seed=7)
    prompts = corpus.prompts(4, 50)
    found = [output.token_ids for output in engine.generate(prompts, asked)]
    assert found == [output.token_ids for output in plain.generate(prompts, asked)]
    assert left.num_nodes > 0


class Liar(EagleDrafter):
    """A head whose probabilities are made up."""

    def propose_parts(self, parts):
        rng = random.Random(len(parts))
        values = [0.0, 1.0, 5.0, -1.0, math.nan, -math.inf, math.inf]
        return [
            replace(tree, p=tree.tokens.float().apply_(lambda _: rng.choice(values)))
            for tree in super().propose_parts(parts)
        ]


@pytest.mark.parametrize("shape", [TREE, CHAIN])
def test_a_drafter_that_lies_changes_no_text(target, heads, plain, left, shape):
    drafter = Liar(heads["specpool/tiny-eagle"])
    config = EngineConfig(shape=shape, verify_nodes=1, max_context_len=160)
    engine = Engine(target, drafter, config=config)
    prompts = corpus.prompts(4, 50)
    asked = [params(), params(temperature=1.0, seed=5), params(), params(temperature=0.7, seed=6)]
    found = [output.token_ids for output in engine.generate(prompts, asked)]
    assert found == [output.token_ids for output in plain.generate(prompts, asked)]
    assert left.num_nodes > 0


def test_p_of_another_type_is_refused(target, heads):
    class Wrong(EagleDrafter):
        def propose_parts(self, parts):
            return [replace(tree, p=tree.tokens) for tree in super().propose_parts(parts)]

    config = EngineConfig(shape=CHAIN, verify_nodes=3, max_context_len=160)
    engine = Engine(target, Wrong(heads["specpool/tiny-eagle"]), config=config)
    (output,) = engine.generate(corpus.prompts(1, 20), params())
    assert output.finish_reason == "error"
    assert "p of the draft trees is float32 [1, 6], got torch.int64 [1, 6]" in output.error


@pytest.mark.parametrize("shape", [TREE, CHAIN])
def test_fewer_nodes_than_rows_leave_the_roots(target, heads, plain, shape):
    drafter = EagleDrafter(heads["specpool/tiny-eagle"])
    config = EngineConfig(shape=shape, verify_nodes=1, max_context_len=160)
    engine = Engine(target, drafter, config=config)
    prompts = corpus.prompts(3, 40)
    outputs = engine.generate(prompts, params())
    assert [o.token_ids for o in outputs] == [
        o.token_ids for o in plain.generate(prompts, params())
    ]
    assert [o.accept_len for o in outputs] == [1.0, 1.0, 1.0]


def test_the_likeliest_of_few_nodes_give_most_of_the_tokens(target, heads):
    """A quarter of a tree's drafts gives more than a quarter of what all of them give."""

    def accepted(verify_nodes: int | None) -> float:
        drafter = EagleDrafter(heads["specpool/tiny-eagle3"])
        config = EngineConfig(shape=TREE, verify_nodes=verify_nodes, max_context_len=160)
        outputs = Engine(target, drafter, config=config).generate(corpus.prompts(4, 50), params())
        return sum(output.accept_len - 1 for output in outputs)

    assert accepted(4 * 4 + 3) > 0.5 * accepted(None)


def test_processors_and_log_probabilities(target, plain, heads, left):
    """Rounds with a processor read all nodes; log probabilities are those of the nodes read."""
    drafter = EagleDrafter(heads["specpool/tiny-eagle3"])
    config = EngineConfig(shape=TREE, verify_nodes=1, max_context_len=160)
    engine = Engine(target, drafter, config=config)
    prompts = corpus.prompts(3, 40)
    penal = [params(frequency_penalty=0.5), params(logit_bias={65: 4.0}), params(seed=3)]
    found = [output.token_ids for output in engine.generate(prompts, penal)]
    assert found == [output.token_ids for output in plain.generate(prompts, penal)]
    asked = params(logprobs=3)
    for ours, theirs in zip(
        engine.generate(prompts, asked), plain.generate(prompts, asked), strict=True
    ):
        assert ours.token_ids == theirs.token_ids
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert mine.token_id == other.token_id
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert left.num_nodes > 0


def test_nan_ends_one_request_and_no_other(left):
    broken = AutoModelForCausalLM.from_pretrained(resolve("specpool/tiny")).float()
    broken.model.embed_tokens.weight.data[250] = torch.nan
    with Engine.from_pretrained(
        broken, draft="specpool/tiny-eagle3", max_context_len=256, shape=TREE, verify_nodes=1,
        max_batch=2,
    ) as engine:  # fmt: skip
        prompts = corpus.prompts(3, 40)
        alone = engine.generate(prompts, params())
        bad = [*prompts[1][:20], 250, *prompts[1][20:]]
        outputs = engine.generate([prompts[0], bad, prompts[2]], params())
    assert [output.finish_reason == "error" for output in outputs] == [False, True, False]
    assert outputs[0].token_ids == alone[0].token_ids
    assert outputs[2].token_ids == alone[2].token_ids


def test_a_budget_of_no_nodes_is_refused():
    with pytest.raises(ConfigError, match=r"verify_nodes must be .* got 0"):
        EngineConfig(verify_nodes=0)


def test_drafters_without_probabilities_are_read_in_order(target, plain):
    engine = Engine(
        target,
        NgramDrafter(),
        config=EngineConfig(shape=Shape(4, 2, 8), verify_nodes=6, max_context_len=160),
    )
    prompts = [[65, 66, 67, 68] * 8, [70, 71, 72] * 9]
    found = engine.generate(prompts, params())
    assert [o.token_ids for o in found] == [o.token_ids for o in plain.generate(prompts, params())]
