"""Laws of the statistics: they agree with the requests and with the ledger."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from specpool import Engine, SamplingParams, Shape
from specpool.engine.assets import corpus

PROMPTS = corpus.prompts(5, 40)
PARAMS = SamplingParams(max_new_tokens=30, ignore_eos=True)


def engine(**options) -> Engine:
    options = {"shape": Shape.eagle(3, 1, 4), "max_context_len": 128, **options}
    return Engine.from_pretrained(draft="specpool/tiny-eagle", **options)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_counters_are_sums_over_the_requests(depth):
    with engine(overlap_depth=depth, max_batch=3) as one:
        fresh = one.stats()
        outputs = one.generate(PROMPTS, PARAMS)
        stats = one.stats()
    assert fresh.verify_ct == fresh.accept_len == fresh.generated_token_ct == 0
    accepted = Counter(n for output in outputs for n in output.accept_lens)
    assert {n: ct for n, ct in enumerate(stats.accept_cts) if ct} == accepted
    assert stats.verify_ct == sum(output.verify_ct for output in outputs)
    total = sum(n * ct for n, ct in accepted.items())
    assert stats.accept_len == pytest.approx(total / stats.verify_ct)
    assert stats.correct_draft_ct == total - stats.verify_ct
    assert stats.generated_token_ct == total + 5  # the first token comes with the prompt
    assert stats.prefilled_token_ct == 5 * 40
    assert (stats.finished_ct, stats.failed_ct, stats.aborted_ct) == (5, 0, 0)
    assert stats.prefill_ct >= 2 and max(o.verify_ct for o in outputs) <= stats.round_ct
    assert all(seconds > 0 for seconds in dataclasses.astuple(stats.seconds))
    assert stats.retracted_ct == stats.finding_ct == stats.num_running == stats.num_waiting == 0


@pytest.mark.parametrize("placement", ["split", "shared"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_slots_in_use_are_counted_once(placement, page_size):
    """Beside a count of distinct slots, with pins and forks that share pages, turn by turn."""
    options = {"placement": placement, "page_size": page_size, "overlap_depth": 1}
    with engine(max_batch=4, **options) as one:
        pin = one.pin(PROMPTS[0][:35])
        stream = one.stream(
            [PROMPTS[0][:35] + PROMPTS[1], PROMPTS[2]], dataclasses.replace(PARAMS, n=2)
        )
        shared = 0
        for _ in stream:
            ledger, stats = one.ledger, one.stats()
            for g, group in enumerate(stats.groups):
                slots, cells = set(), set()
                pinned = ledger.ownership_map(g)[0] == 2
                for row in np.flatnonzero(ledger.kv_committed_len):
                    length = int(ledger.kv_committed_len[row])
                    pages = ledger.page_table(g)[row]
                    at = np.arange(length)
                    slots |= set((pages[at // page_size] * page_size + at % page_size).tolist())
                    cells |= set(pages[pages > 0].tolist())
                shared += int(pinned.sum())
                kept = {p for p in np.flatnonzero(pinned).tolist() if p not in cells}
                assert group.used_tokens == len(slots) + len(kept) * page_size
                assert group.used_pages == len(cells | kept)
                assert group.used_tokens + group.unused_slots == group.used_pages * page_size
                assert group.pinned_pages == 35 // page_size
                unused = group.free_pages + group.cached_pages + group.fenced_pages
                assert unused + group.used_pages == group.num_pages
            assert stats.num_running + stats.num_free_rows <= stats.num_rows
        assert shared
        one.unpin(pin)
        assert all(g.used_pages == g.used_tokens == g.unused_slots == 0 for g in one.stats().groups)


def test_every_end_is_counted_once(monkeypatch):
    with engine(max_batch=2, num_pages=40, page_size=4, overlap_depth=1) as one:
        numbers = [one.submit(prompt, PARAMS) for prompt in PROMPTS]
        one.turn(), one.turn()
        one.abort(numbers[0])
        one.abort(numbers[4])
        one.abort(numbers[4])
        while one.turn():
            pass
        stats = one.stats()
        assert (stats.finished_ct, stats.failed_ct, stats.aborted_ct) == (3, 0, 2)
        outputs = one.generate(PROMPTS[:3], dataclasses.replace(PARAMS, max_new_tokens=60))
        assert {o.finish_reason for o in outputs} == {"length"}
        assert one.stats().retracted_ct > 0

        def failing(*args, **options):
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(one.target, "forward", failing)
        one.generate(PROMPTS[0], PARAMS)
        assert one.stats().failed_ct == 1


def test_no_counter_goes_down(monkeypatch):
    """This holds after requests have ended and after Ctrl-C."""
    with engine(max_batch=2, overlap_depth=1) as one:

        def counters() -> list[float]:
            stats = one.stats()
            numbers = [getattr(stats, f.name) for f in dataclasses.fields(stats) if "_ct" in f.name]
            flat = [n for each in numbers for n in (each if isinstance(each, tuple) else [each])]
            return [*flat, stats.verify_ct, stats.correct_draft_ct]

        before, calls, forward = counters(), [], one.target.forward

        def interrupted(*args, **options):
            calls.append(args)
            if len(calls) % 7 == 0:
                raise KeyboardInterrupt
            return forward(*args, **options)

        monkeypatch.setattr(one.target, "forward", interrupted)
        for _ in range(3):
            stream = one.stream(PROMPTS, PARAMS)
            with pytest.raises(KeyboardInterrupt):
                for _ in stream:
                    now = counters()
                    assert all(a <= b for a, b in zip(before, now, strict=True))
                    before = now
            now = counters()
            assert all(a <= b for a, b in zip(before, now, strict=True))
            before = now
        assert one.stats().aborted_ct == 15


def test_drafts_are_counted_right_or_wrong():
    """Law: accepted and rejected drafts of all requests add up to those of the engine."""
    with Engine.from_pretrained(draft="specpool/tiny-eagle", max_context_len=256) as engine:
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        outputs = engine.generate(["seq: 2, 4, ", "def get_"], params)
        (plain,) = engine.generate("seq: 2, 4, ", params, shape=Shape.none())
        stats = engine.stats()
        assert plain.num_drafts == 0
        assert sum(output.num_drafts for output in outputs) == stats.draft_ct
        assert stats.drafted_round_ct == sum(output.verify_ct for output in outputs)
        assert stats.draft_ct == 3 * stats.drafted_round_ct
        assert all(sum(output.from_draft) <= output.num_drafts for output in outputs)
