"""Random schedules on targets with recurrent layers: every text is the model's own alone.

Requests and samples with common beginnings, sessions with rewinds and forks, aborts, in pools that
are as small as the options allow.
"""

from __future__ import annotations

import bisect
import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from lossless import Comparison, Draw, Reference
from recurrent_families import FAMILIES, VOCAB, make_config, make_model, make_wide_model
from specpool import ConfigError, Engine, EngineConfig, RequestOutput, SamplingParams, Shape
from specpool.capacity.group_sizes import size_groups
from specpool.capacity.layer_kv import bytes_by_window
from specpool.engine.draft import NgramDrafter, ScriptedDrafter
from specpool.engine.scheduler import prefix_cache, state_cuts
from specpool.testing import assert_no_page_leaked

CONTEXT = 110
# Families of the width of the shipped heads.
WIDE = ("mamba", "falcon_h1", "qwen3_next", "lfm2")


class Models:
    """Random models by family and width, with their references; made as they are asked for."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, bool], tuple[Any, Reference]] = {}

    def get(self, family: str, is_wide: bool) -> tuple[Any, Reference]:
        """A copy of the model for an engine, and its reference."""
        if (family, is_wide) not in self._made:
            model = make_wide_model(family) if is_wide else make_model(make_config(family))
            self._made[family, is_wide] = model, Reference(model)
        model, reference = self._made[family, is_wide]
        return copy.deepcopy(model), reference


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


def fewest_bytes(engine: Engine, options: dict[str, Any]) -> int:
    """The least `kv_bytes` without draft KV: one row's KV, and a slot for each row that runs."""
    target, config = engine.target, EngineConfig(**options)
    tokens = bytes_by_window(target.layer_kv, target.dtype.itemsize)

    def is_enough(kv_bytes: int) -> bool:
        try:
            size_groups(
                config,
                tokens,
                0,
                shapes=engine.ledger.shapes,
                max_context_len=engine.ledger.max_context_len,
                kv_bytes=kv_bytes,
                states=target.state_bytes,
            )
        except ConfigError:
            return False
        return True

    return bisect.bisect_left(range(1 << 26), True, key=is_enough)


class Schedule:
    """An engine and what is asked of it, a function of the seed.

    Attributes:
        happened: how often what happened.
    """

    def __init__(self, seed: int, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = self.rng = random.Random(seed)
        self.is_wide = rng.random() < 0.1
        family = rng.choice(WIDE if self.is_wide else sorted(FAMILIES))
        self.model, self.reference = models.get(family, self.is_wide)
        heads = ["eagle", "eagle3", "block", "draft"]
        self.draft = rng.choice(
            heads if self.is_wide else [None, "ngram", "suffix", *["script"] * 2]
        )
        depth = rng.choice([1, 3, 5])
        shapes = [Shape.eagle(depth, 1, depth + 1), Shape.eagle(depth, 3, 3 * depth)]
        worker = rng.choice(["v1", "v2", "v2"])
        self.options: dict[str, Any] = {
            "shape": None if self.draft is None else rng.choice(shapes),
            "shapes": () if self.draft is None else (Shape.eagle(2, 1, 3),),
            "worker": worker,
            "overlap_depth": int(worker == "v2" and rng.random() < 0.5),
            "page_size": rng.choice([1, 3, 16, 64]),
            "policy": rng.choice(["exact", "double_buffer"]),
            "placement": rng.choice(["split", "shared"]),
            "layout": rng.choice(["dense", "holey"]),
            "max_batch": rng.randint(1, 5),
            "max_sessions": rng.randint(0, 3),
            "cached_states": rng.choice([None, 0, 1]),
            "prefix_cache": rng.random() < 0.9,
            "prefill_tokens": rng.choice([3, 11, 64, 1024]),
            "headroom": rng.choice([0, 16]),
            "mixed_chunks": rng.random() < 0.4,
            "max_context_len": CONTEXT,
            "busy_check": 2,
        }
        if self.draft == "block":  # it drafts chains of its own length
            self.options |= {"shape": Shape.eagle(3, 1, 4), "shapes": ()}
        monkeypatch.setattr(state_cuts, "USUAL_ROW_TOKENS", rng.choice([3, 17, 50, 2048]))
        for module in (state_cuts, prefix_cache):
            monkeypatch.setattr(module, "WORTH_WAITING", rng.choice([0, 4, 32]))
        self.prompts = [self.random_text(40)]
        while len(self.prompts) < 5:
            start = rng.choice(self.prompts)
            whole = start[: rng.randint(0, len(start))] + self.random_text(30)
            self.prompts.append(whole[:60])
        self.error_rate = rng.choice([0, 0.2, 0.6])
        self.happened: Counter[str] = Counter()
        self.comparison = Comparison()
        self.open: list[Callable[[], bool]] = []  # each returns whether its output is there
        self.said: list[list[int]] = []

    def random_text(self, most: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB) for _ in range(self.rng.randint(1, most))]

    def engine(self, **options: Any) -> Engine:
        """An engine of a copy of the model."""
        drafter: Any = None
        if self.draft == "ngram":
            drafter = NgramDrafter(min_match=0)
        elif self.draft == "script":
            texts = [[*prompt, *self.reference.text(prompt, 9)] for prompt in self.prompts]
            drafter = ScriptedDrafter(texts, vocab_size=VOCAB, error_rate=self.error_rate)
        elif self.draft is not None:
            drafter = self.draft if self.draft == "suffix" else f"specpool/tiny-{self.draft}"
        options = {**self.options, **options, "dtype": "float32"}
        return Engine.from_pretrained(copy.deepcopy(self.model), draft=drafter, **options)

    def limits(self) -> dict[str, int]:
        """Memory for all rows, for little more than one row's KV, or for the fewest slots."""
        kind = "roomy" if self.is_wide else self.rng.choice(["roomy", "pages", "pages", "slots"])
        self.happened[kind] += 1
        if kind == "roomy":
            return {}
        with self.engine() as engine:
            ledger = engine.ledger
            widest = max(ledger.pages_per_row(group) for group in range(len(ledger.groups)))
            if kind == "pages":
                return {"num_pages": widest + self.rng.choice([0, 1, 2, widest])}
            return {"kv_bytes": fewest_bytes(engine, self.options)}

    # --- what is asked --------------------------------------------------------------------------

    def compare(self, prompt: list[int], output: RequestOutput, draw: Draw | None = None) -> None:
        if output.finish_reason == "abort":
            return
        assert output.error is None, output.error
        self.comparison.add(self.reference, prompt, output.token_ids, draw)
        self.said.append([*prompt, *output.token_ids])
        self.happened["drawn" if draw else "greedy"] += 1

    def submit(self, engine: Engine) -> None:
        rng = self.rng
        prompt = rng.choice(self.prompts)
        if self.said and rng.random() < 0.3:
            prompt = rng.choice(self.said)[: rng.randint(1, 75)] + self.random_text(5)
        n, seed = rng.choice([1, 1, 1, 3]), rng.randint(0, 99)
        drawn: dict[str, Any] = {}
        if n > 1 or rng.random() < 0.2:
            drawn = {"temperature": 0.9, "seed": seed, "n": n}
        params = SamplingParams(
            max_new_tokens=rng.choice([1, 2, 5, 9, 24]),
            ignore_eos=True,
            cache_salt=rng.choice(["", "", "", "a"]),
            **drawn,
        )
        stream = engine.stream([prompt], params)

        def take() -> bool:
            for _ in range(rng.randint(1, 6)):
                item = next(stream, None)
                if item is None:
                    return True
                if isinstance(item, RequestOutput):
                    self.compare(prompt, item, Draw(0.9, seed + item.sample) if drawn else None)
            if rng.random() < 0.03:
                stream.close()
                self.happened["closed"] += 1
                return True
            return False

        self.open.append(take)

    def turn(self, session: Any) -> None:
        """A turn of an idle session; it ends later."""
        before, more = session.tokens, self.random_text(9)
        params = SamplingParams(max_new_tokens=self.rng.randint(1, 12), ignore_eos=True)
        turn = session.append(more, params)
        is_aborted, waits = self.rng.random() < 0.25, self.rng.randint(0, 6)
        busy = self.busy
        busy.add(session)

        def take() -> bool:
            nonlocal waits
            waits -= 1
            if waits > 0:
                return False
            busy.discard(session)
            if is_aborted:
                turn.close()
                assert session.tokens == before or session.tokens[: len(before)] == before
                return True
            self.compare([*before, *more], turn.output())
            self.happened["turns"] += 1
            return True

        self.open.append(take)

    def run(self) -> None:
        """Run it all, and compare every text."""
        rng, limits = self.rng, self.limits()
        self.busy: set[Any] = set()
        sessions: list[Any] = []
        with self.engine(**limits) as engine:
            for _ in range(rng.randint(15, 40)):
                idle = [session for session in sessions if session not in self.busy]
                short = [session for session in idle if session.num_tokens < 85]
                chance = rng.random()
                if chance < 0.3 and len(self.open) < 8:
                    self.submit(engine)
                elif chance < 0.45 and short:
                    self.turn(rng.choice(short))
                elif chance < 0.52 and len(sessions) < 4:
                    sessions.append(engine.open_session())
                elif chance < 0.55 and idle:
                    sessions.remove(idle[0])
                    idle[0].close()
                elif chance < 0.6 and idle:
                    session = rng.choice(idle)
                    ends = [0, session.num_tokens, *session.turn_ends]
                    session.rewind(rng.choice([*ends, rng.randint(0, session.num_tokens)]))
                elif chance < 0.65 and idle and len(sessions) < 4:
                    sessions.append(rng.choice(idle).fork())
                elif chance < 0.67:
                    engine.forget_prefixes(rng.choice([None, "", "a"]))
                elif self.open:
                    take = rng.choice(self.open)
                    if take():
                        self.open.remove(take)
                for _ in range(rng.randint(0, 2)):
                    engine.turn()
            for take in self.open:
                while not take():
                    pass
            assert not engine.turn()
            for session in sessions:
                session.close()
            stats = engine.stats()
            self.happened += Counter(retracted=stats.retracted_ct)
            if stats.prefix is not None:
                self.happened += Counter(hit=stats.prefix.hit_ct, evicted=stats.prefix.eviction_ct)
            assert stats.finding_ct == 0, engine.findings
            engine.forget_prefixes()
            assert_no_page_leaked(engine.ledger)
        self.comparison.finish()


CHEAP = (5, 6)


@pytest.mark.sample(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed in CHEAP else pytest.mark.full) for seed in range(400)],
)
def test_a_random_schedule_gives_every_text(
    seed: int, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: chunks, hits, samples, retractions, rewinds and forks change no token of any text."""
    schedule = Schedule(seed, models, monkeypatch)
    schedule.run()
    print(dict(schedule.happened))


@pytest.mark.parametrize("prefix_cache", [True, pytest.param(False, marks=pytest.mark.full)])
def test_turns_share_the_slots_of_rows_that_run(models: Models, prefix_cache: bool) -> None:
    """Law: turns that need a slot each beside their checkpoint's come to their ends, whoever has
    the slots, although admission counts pages alone."""
    model, reference = models.get("lfm2", False)
    options = {"max_batch": 2, "max_sessions": 2, "max_context_len": 64, "page_size": 4}
    options |= {"prefix_cache": prefix_cache, "busy_check": 2}
    with Engine.from_pretrained(copy.deepcopy(model), **options) as engine:
        options["kv_bytes"] = fewest_bytes(engine, options) + engine.target.state_bytes.slot - 1
    with Engine.from_pretrained(model, **options) as engine:
        assert engine.ledger.states[0].num_slots == 2 < engine.ledger.num_rows
        sessions, said = [engine.open_session() for _ in range(3)], [list[int]() for _ in range(3)]
        for at in range(2):
            for number, text in enumerate(said):
                text += range(10 + 7 * number + at, 18 + 7 * number + at)
            turns = [
                session.append(text[-8:], SamplingParams(max_new_tokens=8, ignore_eos=True))
                for session, text in zip(sessions, said, strict=True)
            ]
            for turn, text in zip(turns, said, strict=True):
                output = turn.output()
                assert output.token_ids == reference.text(text, 8), output.error
                text += output.token_ids
        for session in sessions:
            session.close()
        engine.forget_prefixes()
        assert_no_page_leaked(engine.ledger)
