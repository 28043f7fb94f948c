"""Laws of chunks: a round's chunk costs what is new, and all chunks add up to the output."""

from __future__ import annotations

import itertools
import random

import pytest

from specpool import Chunk, Engine, RequestOutput, SamplingParams, Shape
from specpool.engine.assets import corpus
from specpool.engine.output import Report
from specpool.engine.scheduler.request import Request


class CountedList(list):
    """A list that counts the items that are read from it."""

    num_read = 0

    def __iter__(self):
        for item in super().__iter__():
            self.num_read += 1
            yield item

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found


def request_of(num_prompt: int, num_tokens: int) -> Request:
    return Request(
        request_id=1,
        index=0,
        prompt_len=num_prompt,
        tokens=CountedList([1] * num_prompt),
        params=SamplingParams(),
        shape=Shape.eagle(3, 1, 4),
        shape_index=0,
        max_len=num_prompt + num_tokens,
        stop_ids=frozenset(),
        seed=0,
        accept_lens=CountedList(),
    )


def test_a_rounds_news_costs_what_is_new():
    """Read are the new tokens and the new forwards, however long the text is already."""
    request = request_of(50, 6000)
    report, rng, told = Report(request, None), random.Random(0), []
    for turn in itertools.count():
        accept_len = rng.randint(1, 4) if turn else None
        request.append([2] * (accept_len or 1), accept_len=accept_len)
        before = request.tokens.num_read + request.accept_lens.num_read
        if request.finish_reason is not None:  # the output itself has everything
            break
        (chunk,) = report.news()
        told += chunk.token_ids
        cost = request.tokens.num_read + request.accept_lens.num_read - before
        assert cost == len(chunk.token_ids) + (accept_len is not None)
    assert turn > 1000
    *chunks, output = report.news()
    told += [token for chunk in chunks for token in chunk.token_ids]
    assert told == output.token_ids == [2] * 6000


@pytest.mark.sample(3)
@pytest.mark.parametrize("stop", [(), ("\n",), ("2", "0, ")])
@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_flags_of_the_chunks_are_those_of_the_output(stop, overlap_depth):
    """Also if rounds are reported together, or a stop string takes tokens back."""
    draft, rng = "specpool/tiny-eagle", random.Random(1)
    with Engine.from_pretrained(
        draft=draft, max_context_len=256, overlap_depth=overlap_depth
    ) as engine:
        params = SamplingParams(max_new_tokens=60, stop=stop, ignore_eos=True)
        reports = [
            Report(request, engine.tokenizer)
            for request in engine.core.prompts.requests(corpus.prompts(3), params, None, 0)
        ]
        items: list[list[Chunk | RequestOutput]] = [[], [], []]
        for report in reports:
            engine.core.scheduler.submit(report._request)
        while any(report._request.finish_reason is None for report in reports):
            engine.core.loop.turn()
            for report, mine in zip(reports, items, strict=True):
                if rng.random() < 0.4:
                    mine += report.news()
        for report, mine in zip(reports, items, strict=True):
            mine += report.news()
            *chunks, output = mine
            assert isinstance(output, RequestOutput)
            told = [(piece, flag) for chunk in chunks for piece, flag in chunk.pieces]
            assert "".join(piece for piece, _ in told) == output.text
            if not stop:  # one byte is one token, but for characters of several
                flags = [flag for piece, flag in told for _ in piece.encode()]
                assert flags == output.from_draft
            assert (output.stop_hit in stop) == (output.finish_reason == "stop")
        engine.core.loop.drain()


def test_the_stop_string_that_ended_a_text_is_told():
    with Engine.from_pretrained(max_context_len=256) as engine:
        prompt = "seq: 3, 6, 9,"
        params = SamplingParams(max_new_tokens=40, stop=("never", "8,", "18"))
        (output,) = engine.generate(prompt, params)
        assert output.stop_hit == "18" and output.finish_reason == "stop"
        (output,) = engine.generate(prompt, SamplingParams(max_new_tokens=3, stop="never"))
        assert output.stop_hit is None and output.finish_reason == "length"
