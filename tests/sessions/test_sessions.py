"""Laws of streaming sessions: a turn's text equals that of a fresh prefill of its history."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from lossless import Comparison, Reference
from scripted import Scripted
from specpool import Engine, RequestOutput, SamplingParams, Session, Shape
from specpool.engine.assets import corpus
from specpool.engine.memory.host.copies import HostMemory
from specpool.engine.output import Chunk
from specpool.engine.scheduler.conversations import Conversations
from specpool.engine.worker.results import PendingStep

HEADS = ("specpool/tiny-eagle", "specpool/tiny-eagle3")
CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(4, 4, 16)
PROMPTS = corpus.prompts(12, 60)
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


def check_logprobs(reference: Reference, output: RequestOutput) -> None:
    """Check that they equal those of a fresh prefill of all the turn's tokens."""
    ids = torch.tensor([output.prompt_ids + output.token_ids])
    with torch.inference_mode():
        logits = reference.model(input_ids=ids, use_cache=False).logits[0].float()
    table = torch.log_softmax(logits, -1)
    first = len(output.prompt_ids)
    for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(table[first + i - 1, token]), abs=2e-4)


@dataclass
class Talk:
    """A session, what its client has of it, and its turn."""

    session: Session
    tokens: list[int] = field(default_factory=list)
    number: int | None = None  # of the turn's request
    prompt: list[int] = field(default_factory=list)
    patience: int = 0  # turns of the engine until it is aborted


class Talks:
    """Several sessions at once, at random: appends, aborts, rewinds, forks, closings."""

    def __init__(self, engine: Engine, seed: int, shapes: tuple[Shape | None, ...] = (None,)):
        self.engine, self.rng, self.shapes = engine, random.Random(seed), shapes
        self.talks = [Talk(engine.open_session()) for _ in range(4)]
        self.outputs: list[RequestOutput] = []
        self.num_aborted = self.num_rewound = self.num_forked = 0

    def run(self, num_turns: int) -> None:
        while len(self.outputs) < num_turns:
            for talk in list(self.talks):
                self._move(talk)
            self.engine.turn()
        for talk in self.talks:
            talk.session.close()
        while self.engine.turn():
            pass

    def _move(self, talk: Talk) -> None:
        rng, session = self.rng, talk.session
        if talk.number is not None:
            talk.patience -= 1
            if talk.patience == 0 and session.is_busy:
                self.num_aborted += 1
                session.abort()
                talk.number = None
            return
        assert session.tokens == talk.tokens
        action = rng.random()
        room = self.engine.max_context_len - len(talk.tokens)
        if action < 0.1 and talk.tokens:
            offset = rng.randint(0, len(talk.tokens))
            assert 0 <= session.rewind(offset) <= offset
            talk.tokens = talk.tokens[:offset]
            self.num_rewound += 1
        elif action < 0.2 and talk.tokens and len(self.talks) < 6:
            self.talks.append(Talk(session.fork(), list(talk.tokens)))
            self.num_forked += 1
        elif action < 0.25 or room < 60:
            session.close()
            self.talks.remove(talk)
            self.talks.append(Talk(self.engine.open_session()))
        elif action < 0.7:
            text = rng.choice(PROMPTS)
            start = rng.randint(0, 40)
            talk.prompt = text[start : start + rng.choice([1, 3, 20])]
            params = SamplingParams(
                max_new_tokens=rng.choice([1, 4, 30]), ignore_eos=rng.random() < 0.5, logprobs=0
            )
            talk.patience = rng.choice([0, 0, 1, 2, 3, 8])
            talk.number = self.engine.submit(
                talk.prompt,
                params,
                shape=rng.choice(self.shapes),
                session=session,
                on_item=lambda _, item, talk=talk: self._hear(talk, item),
            )

    def _hear(self, talk: Talk, item: Chunk | RequestOutput) -> None:
        if not isinstance(item, RequestOutput) or item.finish_reason == "abort":
            return
        assert item.error is None
        assert item.prompt_ids == talk.tokens + talk.prompt
        assert item.num_reused < len(item.prompt_ids)
        talk.tokens = item.prompt_ids + item.token_ids
        talk.number = None
        self.outputs.append(item)


HOST = {"host_bytes": 1 << 24, "offload": "always"}
SWITCHES = [Shape.eagle(7, 1, 8), Shape.eagle(1, 1, 2), CHAIN, Shape.none()]
# page size, shape, options: what other engines have stumbled over
CASES = [
    pytest.param(None, None, {}, id="plain"),
    pytest.param(None, None, {"page_size": 1, "prefill_tokens": 5}, id="plain, chunks"),
    pytest.param(HEADS[0], CHAIN, {}, id="chain"),
    pytest.param(HEADS[0], TREE, {"page_size": 3, "layout": "holey"}, id="holey tree"),
    pytest.param(HEADS[1], TREE, {"placement": "shared", "page_size": 16}, id="shared tree"),
    pytest.param(HEADS[1], CHAIN, {"prefill_tokens": 7, "mixed_chunks": True}, id="mixed chunks"),
    pytest.param("ngram", CHAIN, {"shapes": (TREE,)}, id="n-gram"),
    pytest.param(HEADS[0], CHAIN, HOST, id="host, chain"),
    pytest.param(HEADS[1], TREE, {**HOST, "prefill_tokens": 11}, id="host, tree in chunks"),
    pytest.param(None, None, {**HOST, "page_size": 1, "mixed_chunks": True}, id="host, plain"),
    pytest.param(HEADS[0], CHAIN, {"script": SWITCHES, "page_size": 1}, id="adaptive"),
    pytest.param(HEADS[1], TREE, {"script": [*SWITCHES, TREE], "layout": "holey"}, id="adapts"),
    pytest.param(HEADS[0], CHAIN, {**HOST, "script": SWITCHES}, id="host, adaptive"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("draft", "shape", "options"), CASES)
def test_random_sessions_say_what_a_fresh_prefill_says(
    build, reference, draft, shape, options, depth, is_tight
):
    """Concurrent sessions with aborts, rewinds, forks; in a tight pool also with retractions."""
    options, script = dict(options), None
    if shapes := options.pop("script", None):
        script = Scripted(shapes)
        options["adaptive"] = script.config()
    if is_tight:
        options = {**options, "max_sessions": 1 if "host_bytes" in options else 3}
        ledger = build(draft, shape, overlap_depth=depth, **options).ledger
        least = max(ledger.pages_per_row(g) for g in range(len(ledger.groups)))
        options |= {"num_pages": least + least // 8, "headroom": 0}
    engine = build(draft, shape, overlap_depth=depth, **options)
    if script is not None:
        script.take_over(engine)
    talks = Talks(engine, seed=depth + 2 * is_tight, shapes=(None, None, Shape.none()))
    talks.run(24)
    comparison = Comparison()
    for output in talks.outputs:
        wanted = reference.text(output.prompt_ids, len(output.token_ids))
        if output.token_ids != wanted:
            comparison.add(reference, output.prompt_ids, output.token_ids)
        check_logprobs(reference, output)
    stats = engine.stats()
    assert talks.num_aborted and talks.num_rewound and talks.num_forked
    assert sum(output.num_reused for output in talks.outputs) > 0
    assert stats.finding_ct == 0
    if is_tight:
        assert stats.retracted_ct or any(o.num_reused == 0 for o in talks.outputs)
    if script is not None:
        assert stats.adaptive.switch_ct > 10
    if stats.host is not None:
        assert stats.host.num_handles == 0
        assert (stats.host.reload_ct > 0) == is_tight
        engine.core.host.texts.forget()
        for pool in engine.stats().host.groups:
            assert pool.free_pages == pool.num_pages


@pytest.mark.sample(1)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("draft", "shape"), [(None, None), (HEADS[0], CHAIN), ("ngram", TREE)])
def test_a_retracted_request_comes_back_from_the_host(build, draft, shape, depth, temperature):
    """Its text, also if drawn, is that of a large pool; few tokens are computed again."""
    options = {"overlap_depth": depth, "headroom": 0, "max_context_len": 80, "max_batch": 5}
    params = [
        SamplingParams(max_new_tokens=45, ignore_eos=True, temperature=temperature, seed=i)
        for i in range(5)
    ]
    prompts = [prompt[: 8 + i] for i, prompt in enumerate(PROMPTS[:5])]
    wanted = build(draft, shape, **options).generate(prompts, params)
    prefilled = {}
    for host_bytes in (0, 1 << 24):
        more = {"host_bytes": host_bytes, "offload": "always"}
        engine = build(draft, shape, num_pages=26, **options, **more)
        outputs = engine.generate(prompts, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
        stats = engine.stats()
        assert stats.retracted_ct > 0
        prefilled[host_bytes] = stats.prefilled_token_ct
    assert stats.host.reload_ct == stats.host.offload_ct == stats.retracted_ct
    assert stats.host.num_handles == 0
    assert prefilled[1 << 24] < prefilled[0]


def test_a_copy_that_fails_ends_in_a_prefill(build, monkeypatch):
    options = {"headroom": 0, "max_context_len": 64, "max_batch": 3, "num_pages": 24}
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts = [prompt[:20] for prompt in PROMPTS[:3]]
    wanted = build(**options).generate(prompts, params)

    def failing(self, moves):
        raise RuntimeError("the bus is gone")

    for way, depth in (("save", 0), ("load", 0), ("load", 1)):
        with monkeypatch.context() as patch:
            more = {"host_bytes": 1 << 24, "offload": "always", "overlap_depth": depth}
            engine = build(**options, **more)
            patch.setattr(HostMemory, way, failing)
            outputs = engine.generate(prompts, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
        stats = engine.stats()
        assert stats.host.failed_ct > 0 and stats.host.reload_ct == 0
        assert stats.host.num_handles == stats.failed_ct == 0


def test_only_what_is_of_use_is_kept_on_the_host_and_comes_back(build, reference):
    """Law: behind a rewind, or draft KV that a turn would read, nothing on the host is of use."""
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    engine = build(HEADS[0], CHAIN, max_sessions=1, prefix_cache=False, **HOST)
    ends: list[int] = []
    next_extend = engine.core.host.next_extend

    def listening(handle, start):
        end, writes_draft = next_extend(handle, start)
        ends.append(end)
        return end, writes_draft

    engine.core.host.next_extend = listening

    def held() -> int:
        (pool,) = {g.num_pages - g.free_pages for g in engine.stats().host.groups}
        return pool

    def move_out() -> None:
        """The one idle row is another session's from here on."""
        with engine.open_session() as other:
            other.append(PROMPTS[1], PARAMS).output()

    with engine.open_session() as session:
        prompt = PROMPTS[0][:40]
        said = prompt + session.append(prompt, params).output().token_ids
        move_out()
        assert held() == 12  # pages of 4: the last token of 49 has no KV
        session.rewind(30)
        assert held() == 8
        output = session.append(PROMPTS[2][:5], params).output()
        assert output.num_reused == max(ends) == 30
        assert output.token_ids == reference.text(said[:30] + PROMPTS[2][:5], 9)

        session.rewind(10)
        output = session.append(PROMPTS[3][:20], params, shape=Shape.none()).output()
        move_out()
        assert held() > 2
        ends.clear()
        output = session.append(PROMPTS[4][:5], params).output()  # it drafts
        assert output.num_reused == max(ends) == 10
        assert output.token_ids == reference.text(output.prompt_ids, 9)
    assert held() == 0


def test_a_fork_of_a_fork_stops_nothing(build, reference):
    """The tail is copied with the next step; until then the fork has no KV to share."""
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    first, second = corpus.prompts(2, 30)
    engine = build()
    session = engine.open_session()
    said = first + session.append(first, params).output().token_ids
    items: list[Chunk | RequestOutput] = []
    engine.submit(second, params, on_item=lambda _, item: items.append(item))
    engine.turn()
    sessions = [session, session.fork()]
    sessions += [each.fork() for each in sessions]
    for copy in sessions:
        assert copy.tokens == said
        output = copy.append(second[:5], params).output()
        assert output.token_ids == reference.text(said + second[:5], 9)
    while engine.turn():
        pass
    (output,) = [item for item in items if isinstance(item, RequestOutput)]
    assert output.token_ids == reference.text(second, 9), output.error
    for each in sessions:
        each.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_turn_that_saw_nan_keeps_no_kv(build, reference, monkeypatch, depth):
    """A draft that was not accepted: the turn goes on, and its pages are zeroed at its end."""
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=0)
    first, second = corpus.prompts(2, 40)
    engine = build("specpool/tiny-eagle3", Shape.eagle(3, 4, 12), overlap_depth=depth)
    forward, rounds = engine.target.forward, []

    def spoiled(token_ids, positions, batch, logits_index, **options):
        output = forward(token_ids, positions, batch, logits_index, **options)
        if logits_index is None:
            rounds.append(len(positions))
            if len(rounds) == 1:
                output.logits[-1] = torch.nan  # the tree's last node
        return output

    session = engine.open_session()
    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "forward", spoiled)
        output = session.append(first, params).output()
    assert rounds[0] == 12 and output.finish_reason == "length"
    check_logprobs(reference, output)
    check_logprobs(reference, session.append(second, params).output())
    session.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_turn_whose_end_ctrl_c_hits_leaves_no_scrubbed_kv(build, monkeypatch, when):
    """Law: no NaN outlives its request, and no zeros that were written over it do either."""
    engine = build(HEADS[0], CHAIN, overlap_depth=1)
    with engine.open_session() as session:
        conversations = engine.core.scheduler.conversations
        keep = conversations.keep

        def stopped(*args):
            monkeypatch.undo()
            if when == "after":
                keep(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(conversations, "keep", stopped)
        with pytest.raises(KeyboardInterrupt):
            session.append(PROMPTS[0], PARAMS).output()
        assert session.num_tokens == len(PROMPTS[0]) + PARAMS.max_new_tokens
        output = session.append(PROMPTS[1][:3], PARAMS).output()
        (wanted,) = engine.generate([output.prompt_ids], PARAMS)
        assert output.token_ids == wanted.token_ids


def test_ctrl_c_while_a_turn_takes_its_row_leaves_the_session_none(build, reference, monkeypatch):
    engine = build()
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    with engine.open_session() as session:
        session.append(PROMPTS[0][:20], params).output()

        def stopped(self, conversation):
            del self._idle[conversation.row]
            raise KeyboardInterrupt

        turn = session.append(PROMPTS[1][:5], params)
        with monkeypatch.context() as patch:
            patch.setattr(Conversations, "_forget", stopped)
            with pytest.raises(KeyboardInterrupt):
                turn.output()
        engine.submit(PROMPTS[2], params, priority=1)  # takes the row
        engine.turn()
        session.abort()
        output = session.append(PROMPTS[1][:5], params).output()
        assert output.token_ids == reference.text(output.prompt_ids, 6)
    while engine.turn():
        pass


def test_a_draft_with_logits_that_are_not_finite_leaves_no_scrubbed_kv(build, monkeypatch):
    """The draft is not accepted and the turn ends well, but its row has been scrubbed."""
    result = PendingStep.result
    engine = build(HEADS[0], CHAIN)
    with engine.open_session() as session:
        with monkeypatch.context() as patch:
            patch.setattr(
                PendingStep,
                "result",
                lambda self: replace(result(self), not_finite=np.ones(1, np.bool_)),
            )
            session.append(PROMPTS[0], PARAMS).output()
        output = session.append(PROMPTS[1][:3], PARAMS).output()
        (wanted,) = engine.generate([output.prompt_ids], PARAMS)
        assert output.token_ids == wanted.token_ids


def test_ctrl_c_while_a_turn_is_told_leaves_its_output_to_be_told(build, monkeypatch):
    """A reader that comes back hears the end, and does not wait for it for ever."""
    engine, told = build(), []

    def stopped(*args):
        monkeypatch.undo()
        raise KeyboardInterrupt

    with engine.open_session() as session:
        turn = session.append(PROMPTS[0], PARAMS)
        monkeypatch.setattr("specpool.engine.output.output_of", stopped)
        with pytest.raises(KeyboardInterrupt):
            turn.output()
        assert turn.output().finish_reason == "length"
        number = engine.submit(PROMPTS[1], PARAMS, on_item=lambda n, item: told.append((n, item)))
        monkeypatch.setattr("specpool.engine.output.output_of", stopped)
        with pytest.raises(KeyboardInterrupt):
            while engine.turn():
                pass
        assert not engine.turn()
        assert told[-1][0] == number and isinstance(told[-1][1], RequestOutput)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["append", "submit"])
def test_a_session_whose_append_ctrl_c_hits_is_not_busy(build, monkeypatch, way, when):
    engine = build()
    submit = engine.core.scheduler.submit

    def stopped(request):
        monkeypatch.undo()
        if when == "after":
            submit(request)
        raise KeyboardInterrupt

    with engine.open_session() as session:
        monkeypatch.setattr(engine.core.scheduler, "submit", stopped)
        with pytest.raises(KeyboardInterrupt):
            session.append([5]) if way == "append" else engine.submit([5], session=session)
        assert not session.is_busy
        assert session.append(PROMPTS[0], PARAMS).output().finish_reason == "length"
