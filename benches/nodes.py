"""`python -m benches nodes`: the choice of the nodes that the target reads, where a node costs.

Random models of real sizes, whose drafter knows the texts and errs at set rates (`known_text`).
All ways of reading nodes, each single shape, and the policy that chooses one for the batch serve
the same requests in one process, a few turns each by turns. Each client sends several requests, one
after the other. Time is the CPU time of this process, for the figures and for the engines' own
clocks, so that other programs count little. All rows share a long prompt, which is read once.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benches.clients import Clients, lengths
from benches.known_text import Guesses, KnownDrafter, Says, guesses
from benches.plain_rows import SIZES
from specpool._core import Shape
from specpool.adaptive import AdaptiveConfig
from specpool.adaptive.node_budget import NodeBudget, NodeChoice
from specpool.arrays import Int32
from specpool.assets import resolve
from specpool.checks import check_choice, check_int
from specpool.cli.options import checks
from specpool.cli.results import Result, check_plot, machine, report
from specpool.config import EngineConfig
from specpool.engine.engine import Engine
from specpool.errors import CorruptState
from specpool.models import TargetModel
from specpool.sampling_params import SamplingParams
from specpool.shape_names import name_of, parse_shape


def _draft(vocab_size: int, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """Sizes of a draft model."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 64,
        "tie_word_embeddings": True,
    }


WINDOW = 4  # turns of an engine before the next one's
PER_CLIENT = 4  # requests
SHORTER = 8  # the short ones of mixed requests have the context over so much
#: The candidates of the budget; the last one is also the shape of the engines without one.
KINDS = {
    "chains": ("none", "chain:2", "chain:5"),
    "trees": ("none", "chain:3", "tree:5x4x16"),
}
RATES = (0.9, 0.3)  # of the first drafts of rows by turns
#: What the drafter says of drafts that are right with these probabilities.
SAYS: dict[str, Says] = {
    "honest": lambda p: p,
    "too-sure": lambda p: p**0.3,
}
#: Sizes of the draft models, by the target's.
DRAFTS: dict[str, dict[str, Any]] = {
    "tiny": _draft(259, 64, 1),
    "25m": _draft(8192, 256, 1),
    "125m": _draft(32000, 256, 2),
}
FIXED_SHARE = 0.4  # of the drafts that the engine with a fixed number of nodes reads
ALL, FIXED, BUDGET, AUTO, COST = "all nodes", "fixed", "budget", "budget, auto", "cost"
FIXED_WHOLE = "fixed, all levels drafted"  # without the early end of drafting


@dataclass(frozen=True, slots=True)
class Row(Result):
    """A result with the ratio by wall time.

    Attributes:
        wall_ratio: the median of all passes.
    """

    wall_ratio: float


class Looks:
    """Counts the nodes that an engine's budget drafts and reads."""

    def __init__(self, budget: NodeBudget) -> None:
        self._choose, self.budget = budget.choose, budget
        budget.choose = self.choose  # type: ignore[method-assign]
        self.clear()

    def clear(self) -> None:
        """Begin to count."""
        self.num_rounds, self.num_chosen, self.num_nodes, self.num_read = 0, 0, 0, 0

    def choose(self, nodes: Int32, sources: Any) -> NodeChoice | None:
        """Choose, and count."""
        choice, total = self._choose(nodes, sources), int(nodes.sum())
        if total > len(nodes):
            self.num_rounds += 1
            self.num_nodes += total
            self.num_read += total if choice is None else choice.num_nodes
            self.num_chosen += choice is not None and choice.num_nodes < total
        return choice


class Runner:
    """An engine's clients, and the time that it takes to serve them."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.wall = self.cpu = 0.0

    def begin(self) -> None:
        """Submit the first requests of a pass."""
        self.wall = self.cpu = 0.0
        self.clients.begin()

    @property
    def texts(self) -> list[list[int]]:
        """The texts of the pass that has ended."""
        return self.clients.texts

    def turns(self) -> bool:
        """Run a few turns; return whether there are more."""
        wall, cpu = time.monotonic(), time.process_time()
        more = self.clients.turns(WINDOW)
        self.wall += time.monotonic() - wall
        self.cpu += time.process_time() - cpu
        return more


def passes(runners: Sequence[Runner], num_passes: int) -> tuple[Any, Any]:
    """Run all passes, by turns; return CPU and wall seconds, float [passes, runners].

    The first pass does not count: caches are empty and policies know nothing.
    """
    order, found = random.Random(0), []
    for _ in range(num_passes + 1):
        for runner in runners:
            runner.begin()
        active = [*runners]
        while active:
            order.shuffle(active)
            active = [runner for runner in active if runner.turns()]
        found.append([(runner.cpu, runner.wall) for runner in runners])
    return tuple(np.array(found[1:]).transpose(2, 0, 1))


class Trial:
    """The engines of one model, kind of shapes and number of rows."""

    def __init__(
        self, size: str, kind: str, batch: int, context: int, tokens: int, mixed: bool
    ) -> None:
        model, draft = _model(SIZES[size]), _model(DRAFTS[size])
        self._target, self._draft = map(TargetModel.from_pretrained, (model, draft))
        self.batch, self._context, self._tokens = batch, context, tokens
        numbers = range(PER_CLIENT * batch)
        rng = np.random.default_rng(0)
        shared = rng.integers(len(numbers), self._target.vocab_size, context).tolist()
        self._at = (context, context // SHORTER) if mixed else (context,)
        # All clients have as many requests of each length, at each rate.
        lens = [self._at[(n % batch // 2 + n // batch // 2) % len(self._at)] for n in numbers]
        self._prompts = [[*shared[: lens[number]], number] for number in numbers]
        shapes = [parse_shape("shape", name) for name in KINDS[kind]]
        widest = shapes[-1]
        num_drafts = batch * (widest.num_draft_tokens - 1)
        policies = {
            name: AdaptiveConfig.from_dict({"policy": name, "1": {"candidates": [*KINDS[kind]]}})
            for name in (BUDGET, COST)
        }
        self.plain = self._runner(None, shape=Shape.none())
        self.drafters: list[KnownDrafter] = []
        fixed = batch + round(FIXED_SHARE * num_drafts)
        self.num_steps = widest.num_steps
        self.singles = ["plain", ALL, *KINDS[kind][1:-1]]  # one shape for all rows
        self.runners = {
            ALL: self._drafting(shape=widest),
            **{name_of(each): self._drafting(shape=each) for each in shapes[1:-1]},
            FIXED: self._drafting(shape=widest, verify_nodes=fixed),
            FIXED_WHOLE: self._drafting(shape=widest, verify_nodes=fixed),
            COST: self._drafting(adaptive=policies[COST]),
            BUDGET: self._drafting(adaptive=policies[BUDGET]),
            AUTO: self._drafting(adaptive=policies[BUDGET], verify_nodes="auto"),
        }
        self.runners[FIXED_WHOLE].clients.engine.core.worker.early_end.is_on = False
        budget = self.runners[AUTO].clients.engine.core.loop.scheduler.round_shapes.budget
        assert budget is not None and budget.nodes is not None
        self.looks = Looks(budget.nodes)

    def _runner(self, drafter: KnownDrafter | None, **options: Any) -> Runner:
        config = EngineConfig(
            max_batch=self.batch,
            max_context_len=self._context + 2 * self._tokens + 64,
            num_pages=(self._context + self.batch * (2 * self._tokens + 96)) // 16 + 64,
            **options,
        )
        engine = Engine(self._target, drafter, config=config)
        every = [
            SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
            for num_tokens in lengths(len(self._prompts), self._tokens)
        ]
        return Runner(Clients(engine, self._prompts, every, self.batch))

    def _drafting(self, **options: Any) -> Runner:
        drafter = KnownDrafter(self._draft, vocab_size=self._target.vocab_size, at=self._at)
        self.drafters.append(drafter)
        return self._runner(drafter, **options)

    def learn(self) -> None:
        """Write the texts by plain decoding, which the drafters are to know."""
        self.plain.begin()
        while self.plain.turns():
            pass
        texts = [[*p, *t] for p, t in zip(self._prompts, self.plain.texts, strict=True)]
        self._texts = np.zeros((len(texts), max(map(len, texts)) + 64), np.int64)
        for number, text in enumerate(texts):
            self._texts[number, : len(text)] = text

    def guesses(self, says: Says) -> Guesses:
        """Make up guesses of the texts."""
        # All clients have as many requests of each rate.
        numbers = range(len(self._prompts))
        rates = [RATES[(n + n // self.batch) % len(RATES)] for n in numbers]
        return guesses(self._texts, rates, 4, self._target.vocab_size, says)

    def close(self) -> None:
        """Close the engines."""
        for runner in (self.plain, *self.runners.values()):
            runner.clients.engine.close()
        self._target.close()
        self._draft.close()


def _model(sizes: dict[str, Any]) -> Any:
    """Return a random Llama of these sizes; none = the shipped target."""
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    if not sizes:
        return auto.from_pretrained(resolve("specpool/tiny")).float().eval()
    config = transformers.LlamaConfig(
        max_position_embeddings=1 << 14, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes
    )
    torch.manual_seed(0)
    return auto.from_config(config).float().eval()


def rows_of(trial: Trial, name: str, says: Says, repeats: int) -> Iterator[Result]:
    """Measure the ways of one trial, beside all nodes and beside the budget without a choice."""
    known = trial.guesses(says)
    for drafter in trial.drafters:
        drafter.know(known)
    runners = {"plain": trial.plain, **trial.runners}
    trial.looks.clear()
    cpu, wall = passes([*runners.values()], repeats)
    for way, runner in runners.items():
        if runner.texts != trial.plain.texts:
            raise CorruptState(f"{name}: a text of {way} is not plain decoding's")
    ways = [*runners]
    num_tokens = sum(map(len, trial.plain.texts))

    def row(way: str, reference: str) -> Row:
        mine, other = ways.index(way), ways.index(reference)
        rate, other_rate = (num_tokens / statistics.median(cpu[:, i]) for i in (mine, other))
        ratio = statistics.median(wall[:, other] / wall[:, mine])
        return Row(f"{name}, {way}", rate, "tokens / CPU s", reference, other_rate, ratio)

    best = min(trial.singles, key=lambda way: statistics.median(cpu[:, ways.index(way)]))
    pairs = (
        (ALL, "plain"),
        (BUDGET, "plain"),
        (BUDGET, COST),
        (FIXED, ALL),
        (FIXED, FIXED_WHOLE),
        (BUDGET, ALL),
        (AUTO, ALL),
        (AUTO, BUDGET),
    )
    for way, reference in pairs:
        yield row(way, reference)
    yield replace(row(BUDGET, best), reference=f"best shape, {best}")
    stats = trial.runners[FIXED].clients.engine.stats()
    num_levels = stats.drafted_round_ct * trial.num_steps
    left_out = stats.undrafted_level_ct, "levels", "of the shapes", num_levels
    yield Result(f"{name}, {FIXED}: levels that were not drafted", *left_out)
    looks = trial.looks
    read = looks.num_read, "nodes", "drafted", looks.num_nodes
    yield Result(f"{name}, {AUTO}: nodes that the target read", *read)
    chosen = looks.num_chosen, "rounds", "rounds with drafts", looks.num_rounds
    yield Result(f"{name}, {AUTO}: rounds that left nodes out", *chosen)
    choice, node = looks.budget.seconds(trial.batch)
    if node:  # else a node seemed to take no time
        yield Result(
            f"{name}, {AUTO}: what a choice takes", 1e3 * choice, "ms", "a node", 1e3 * node
        )


def nodes(
    *,
    size: str,
    batch_sizes: Sequence[int],
    kinds: Sequence[str],
    says: Sequence[str],
    context: int,
    mixed: bool,
    tokens: int,
    repeats: int,
    threads: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
        CorruptState: a text is not that of plain decoding.
    """
    check_choice("size", size, (*DRAFTS,))
    for kind in kinds:
        check_choice("kind", kind, (*KINDS,))
    for each in says:
        check_choice("says", each, (*SAYS,))
    for batch in batch_sizes:
        check_int("batch", batch, 1, 1 << 8)
    check_int("context", context, 16, 1600 if size == "tiny" else 1 << 13)
    check_int("tokens", tokens, 8, 256)
    check_int("repeats", repeats, 1, 1 << 10)
    checks.check_place(device="cpu", threads=threads)
    if plot is not None:
        check_plot(plot)
    checks.start_torch(threads)
    results: list[Result] = []
    with patch.object(time, "perf_counter", time.process_time):  # the engines' clock too
        for batch in batch_sizes:
            for kind in kinds:
                trial = Trial(size, kind, batch, context, tokens, mixed)
                trial.learn()
                for each in says:
                    name = f"{size}, {batch} rows, {kind}, {each} drafter"
                    name += ", short and long rows" if mixed else ""
                    results += rows_of(trial, name, SAYS[each], repeats)
                trial.close()
    where = machine(threads=threads, packages=("torch", "transformers"))
    report("bench nodes", where, results, json_only=json, plot=plot)
