"""The prefix cache of targets with recurrent layers: what is computed, and that texts are equal."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from lossless import Comparison, Reference
from recurrent_families import VOCAB, make_config, make_model
from specpool import Engine, RequestOutput, SamplingParams, Shape
from specpool.engine.draft import NgramDrafter
from specpool.engine.scheduler import state_cuts
from specpool.engine.scheduler.prefill import Prefill

GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)
CHAIN = Shape.eagle(3, 1, 4)
_RNG = random.Random(0)
PROMPT = [_RNG.randrange(3, VOCAB) for _ in range(90)]


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """Made as they are asked for."""
    return {}


class Runner:
    """An engine, and what it is to say.

    Attributes:
        engine: runs the prompts.
        reference: greedy texts are compared with its own.
    """

    def __init__(self, engine: Engine, reference: Reference) -> None:
        self.engine, self.reference = engine, reference

    def computed(self) -> int:
        """Tokens that prefills have computed."""
        return self.engine.stats().prefilled_token_ct

    def run(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY
    ) -> tuple[int, list[RequestOutput]]:
        """Return how many tokens the prefills of these prompts computed, and the outputs."""
        before, comparison = self.computed(), Comparison()
        outputs = self.engine.generate([list(prompt) for prompt in prompts], params)
        for output in outputs:
            assert output.error is None
            if not params.temperature:
                comparison.add(self.reference, output.prompt_ids, output.token_ids)
        comparison.finish()
        return self.computed() - before, outputs


@contextmanager
def running(references: dict[str, Reference], family: str, **options: Any) -> Iterator[Runner]:
    """An engine of a random model of the family."""
    if family not in references:
        references[family] = Reference(make_model(make_config(family)))
    options = {"page_size": 4, "max_batch": 4, "max_context_len": 256, "busy_check": 2, **options}
    with Engine.from_pretrained(make_model(make_config(family)), **options) as engine:
        yield Runner(engine, references[family])


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("family", ["bamba", "qwen3_next", "lfm2"])
def test_a_hit_computes_what_it_must(
    references: dict[str, Reference], family: str, draft: str | None, depth: int
) -> None:
    """Law: an identical prompt computes 1 token, a text that goes on what no state contains yet, a
    first branch all behind the last state, and later ones nothing that is known."""
    drafter = NgramDrafter(min_match=0) if draft else None
    shape = CHAIN if draft else None
    with running(references, family, draft=drafter, shape=shape, overlap_depth=depth) as runner:
        num_computed, (whole,) = runner.run([PROMPT])
        assert num_computed == 90
        assert runner.run([PROMPT])[0] == 1
        num_computed, _ = runner.run([[*whole.prompt_ids, *whole.token_ids, 5, 6, 7]])
        flush = runner.engine.ledger.states[0].flush
        most = (depth + 1) * (CHAIN.max_accept_len if draft else 1) + flush
        assert num_computed <= 3 + most
        for more, expected in (([9] * 20, 70), ([8] * 20, 20), ([7] * 9, 9)):
            assert runner.run([[*PROMPT[:50], *more]])[0] == expected
        stats = runner.engine.stats().prefix
        assert stats.hit_ct + stats.miss_ct == 90 + 90 + 113 + 70 + 70 + 59
        assert stats.miss_ct == 90 + 1 + num_computed + 70 + 20 + 9


@pytest.mark.sample(1)
@pytest.mark.parametrize(("depth", "prefill_tokens"), [(0, 1024), (1, 32)])
def test_prompts_that_come_together_compute_their_beginning_once(
    references: dict[str, Reference], depth: int, prefill_tokens: int
) -> None:
    """Law: the first one leaves a state where the others leave its text, in whatever chunks."""
    options = {"prefill_tokens": prefill_tokens, "overlap_depth": depth}
    with running(references, "bamba", **options) as runner:
        prompts = [[*PROMPT[:70], *[token] * 10] for token in range(20, 26)]
        assert runner.run(prompts)[0] == 80 + 5 * 10


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_samples_compute_their_prompt_once(
    references: dict[str, Reference], prefix_cache: bool
) -> None:
    """Law: a sample computes at most two tokens of its prompt. As many rows part with one state as
    there are slots; none is retracted for that."""
    params = SamplingParams(max_new_tokens=5, temperature=0.8, seed=1, n=4, ignore_eos=True)
    options = {"prefix_cache": prefix_cache, "max_sessions": 0, "cached_states": 0}
    with running(references, "bamba", **options) as runner:
        num_computed, outputs = runner.run([PROMPT], params)
        assert num_computed == 90 + 3 * 2
        assert runner.engine.stats().retracted_ct == 0
        assert len({tuple(output.token_ids) for output in outputs}) == 4
        assert runner.engine.ledger.states[0].num_slots == 4
        assert runner.run([[*PROMPT[:40], 5]] * 4)[0] <= 4 * 41
        assert runner.engine.stats().retracted_ct == 0


def test_a_retracted_request_goes_on_from_its_state(references: dict[str, Reference]) -> None:
    with running(references, "bamba") as runner:
        engine, outputs = runner.engine, list[Any]()
        for prompt in (PROMPT, PROMPT[::-1]):
            engine.submit(prompt, GREEDY, on_item=lambda number, item: outputs.append(item))
        for _ in range(8):
            engine.turn()
        engine.core.scheduler._reclaim.make_room()
        while engine.turn():
            pass
        assert engine.stats().retracted_ct == 1
        assert runner.computed() <= 2 * 90 + 2
        for output in (item for item in outputs if isinstance(item, RequestOutput)):
            assert output.token_ids == runner.reference.text(output.prompt_ids, 20)


def test_who_gave_way_leaves_its_state_slot_to_the_others(references: dict[str, Reference]) -> None:
    """Law: a turn ends, whoever lacks slots. What is retracted waits for a step of the others.

    Two sessions come back from the host, and keep what they came with. A prompt begins from the
    last slot, in the prefix cache. Nobody has a slot to go on, and the prompt gives way.
    """
    options: dict[str, Any] = {"max_batch": 3, "cached_states": 0, "max_sessions": 0}
    options |= {"prefill_tokens": 8, "host_bytes": 1 << 24, "offload": "always"}
    with running(references, "bamba", **options) as runner:
        engine, outputs = runner.engine, list[Any]()
        sessions = engine.open_session(), engine.open_session()
        for session, at in zip(sessions, (0, 20), strict=True):
            session.append(PROMPT[at : at + 20], GREEDY).output()
        runner.run([PROMPT[60:]])
        assert engine.ledger.states[0].num_slots == 3
        turns = [session.append(PROMPT[:30], GREEDY) for session in sessions]
        engine.submit(PROMPT[60:], GREEDY, on_item=lambda number, item: outputs.append(item))
        said = [turn.output() for turn in turns]
        while engine.turn():
            pass
        assert engine.stats().retracted_ct
        for output in [*said, outputs[-1]]:
            assert output.token_ids == runner.reference.text(output.prompt_ids, 20)


def test_a_rewound_session_goes_on_from_the_end_of_its_turn(
    references: dict[str, Reference],
) -> None:
    """Law: at the ends of turns only what the state lacks is computed again; a fork is alike."""
    with running(references, "bamba") as runner:
        engine = runner.engine
        with engine.open_session() as session:
            for start in range(0, 90, 30):
                session.append(PROMPT[start : start + 30], GREEDY).output()
            for end in session.turn_ends[::-1]:
                session.rewind(end)
                with session.fork() as other:
                    for either in (session, other):
                        before, said = runner.computed(), either.tokens
                        output = either.append([5, 6, 7], GREEDY).output()
                        assert runner.computed() - before <= 3 + 2
                        assert output.token_ids == runner.reference.text([*said, 5, 6, 7], 20)
                session.rewind(end)


def test_a_hit_is_taken_where_it_is_quicker(references: dict[str, Reference]) -> None:
    """Law: a target that goes on one token at a time computes a prompt anew if much is left of it,
    and no prompt is cut for others."""
    with running(references, "jamba") as runner:
        assert runner.run([PROMPT])[0] == 90
        assert runner.run([PROMPT])[0] == 1
        assert runner.run([[*PROMPT, 5, 6, 7, 8]])[0] == 5
        assert runner.run([[*PROMPT, *[9] * 10]])[0] == 100
        before = runner.engine.stats().prefill_ct
        assert runner.run([[*PROMPT[:60], 5, 6]])[0] == 62
        assert runner.engine.stats().prefill_ct == before + 1


def test_salts_share_no_state(references: dict[str, Reference]) -> None:
    with running(references, "bamba") as runner:
        engine = runner.engine

        def computed(salt: str) -> int:
            return runner.run([PROMPT], SamplingParams(max_new_tokens=4, cache_salt=salt))[0]

        assert [computed(""), computed("a"), computed("b"), computed("a")] == [90, 90, 90, 1]
        engine.forget_prefixes("a")
        assert [computed("a"), computed("b"), computed("")] == [90, 1, 1]
        engine.forget_prefixes()
        assert not engine.ledger.index_states(0)
        group = engine.ledger.states[0]
        assert engine.ledger.free_state_slots(0) == group.num_slots
        params = [SamplingParams(max_new_tokens=4, cache_salt=salt) for salt in "cd"]
        before = runner.computed()
        engine.generate([PROMPT, PROMPT], params)  # at once: neither waits for the other's states
        assert runner.computed() - before == 2 * 90


def test_a_long_prompt_leaves_states_on_its_way(
    references: dict[str, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: chunks that end far enough from the last state keep theirs, others do not."""
    monkeypatch.setattr(state_cuts, "USUAL_ROW_TOKENS", 32)
    with running(references, "bamba", prefill_tokens=16) as runner:
        runner.run([PROMPT])
        lens = [num_tokens for _, _, num_tokens in runner.engine.ledger.index_states(0)]
        assert lens[:3] == [31, 63, 89]
        assert runner.run([[*PROMPT[:64], 5, 6]])[0] == 3


def test_a_prompt_of_which_no_state_is_kept_is_computed(
    references: dict[str, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard of `keep`: under overlap the first round has folded on before the index is told."""
    extend = Prefill._extend

    def careless(prefill: Prefill, chosen: Any, ends: Any, writes_draft: bool) -> Any:
        cuts = [request.cuts for request in chosen]
        for request in chosen:
            request.cuts = set()
        try:
            return extend(prefill, chosen, ends, writes_draft)
        finally:
            for request, its_cuts in zip(chosen, cuts, strict=False):
                request.cuts = its_cuts

    monkeypatch.setattr(Prefill, "_extend", careless)
    with running(references, "bamba", overlap_depth=1) as runner:
        runner.run([PROMPT])
        assert runner.run([PROMPT])[0] > 1
