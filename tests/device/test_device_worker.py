"""The worker on a device: the same texts as on the CPU, by kernels, and without waiting for them.

The device is the host runner here, which runs the unchanged kernels on CPU tensors; on a GPU
`make test-gpu` runs the losslessness tests as well.
"""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch

from ancestry_kit import load_engine
from card_kit import CARDS
from device_kit import READS, forbidden, kernels_run, watched
from kernel_kit import i32
from lossless import Comparison, Reference
from specpool import Engine, SamplingParams, Shape
from specpool import kernels as device
from specpool.engine.assets import corpus, resolve
from specpool.engine.draft import ScriptedDrafter
from specpool.engine.models import TargetModel
from specpool.engine.worker.row_state import RowState
from specpool.kernels import transfer, twins

PROMPTS = [p[:n] for p, n in zip(corpus.prompts(4), (17, 40, 9, 3), strict=True)]

CASES = {  # head, shape, options
    "chain": ("tiny-eagle", (3, 1, 4), {"page_size": 16}),
    "chain_split": ("tiny-eagle3", (3, 1, 4), {"page_size": 3, "placement": "split"}),
    "dense": ("tiny-eagle", (4, 4, 16), {"page_size": 16}),
    "dense_by_branch": ("tiny-eagle3", (3, 4, 8), {"page_size": 1, "ancestry": "branch"}),
    "holey": ("tiny-eagle", (4, 4, 16), {"page_size": 4, "layout": "holey"}),
    "holey_by_branch": (
        "tiny-eagle3",
        (3, 8, 20),
        {"page_size": 16, "layout": "holey", "ancestry": "branch"},
    ),
    "few_nodes": ("tiny-eagle", (5, 2, 4), {"page_size": 3, "layout": "holey"}),  # N < S + 1
    "block": ("tiny-block", (7, 1, 8), {"page_size": 3}),
    "block_tree": ("tiny-block", (4, 4, 16), {"page_size": 4, "layout": "holey"}),
    "plain": (None, None, {"page_size": 4}),
}
GREEDY = SamplingParams(max_new_tokens=20)
SAMPLED = SamplingParams(max_new_tokens=20, temperature=1.2, top_k=40, top_p=0.9, seed=7)
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED}


@pytest.fixture(scope="module")
def reference():
    with TargetModel.from_pretrained(resolve("specpool/tiny")) as target:
        model = target.model
    return Reference(model)


def make(case: str, **more: object) -> Engine:
    draft, shape, options = CASES[case]
    return load_engine(
        draft=draft and f"specpool/{draft}",
        shape=shape and Shape.eagle(*shape),
        **{"max_context_len": 200, "max_batch": 8, "overlap_depth": 0, **options, **more},
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("case", CASES)
def test_the_text_is_the_twins(case, kind, reference):
    """fp32: greedy text equals transformers' own, sampled text that of plain decoding."""
    params = PARAMS[kind]
    with kernels_run() as seen, make(case) as engine:
        outputs = engine.generate(PROMPTS, params)
        assert [s.used_pages for s in engine.pool_stats()] == [0] * len(engine.pool_stats())
    if kind == "greedy":
        comparison = Comparison()
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            comparison.add(reference, prompt, output.token_ids)
        comparison.finish()
    else:
        with make("plain") as plain:
            expected = plain.generate(PROMPTS, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    expected = {"apply_table_deltas", "slot_ranges", "copy_slots", "sample_tokens"}
    expected |= {"rotate_heads", "gated_silu", "write_kv"}
    draft, shape, options = CASES[case]
    if shape:
        expected |= {"check_tree", "verify_tree"}
    if shape and shape[1] > 1:  # what a chain accepts is in its place
        expected |= {"likeliest", "select_topk", "build_tree", "compact_accepted"}
    if shape and shape[1] > 1 and draft != "tiny-block":  # its drafts have no cells of their own
        expected |= {"draft_write_slots"}
        if options.get("layout") == "holey":
            expected |= {"duplicate_prefix_tail", "branch_pages"}
            expected |= set() if options.get("ancestry") else {"copy_parent_drafts"}
        else:
            expected |= set() if options.get("ancestry") else {"advance_ancestors"}
    if not shape:
        expected |= {"slots_at"}
    if kind == "sampled":
        expected |= {"uniform"}
    assert expected == set(seen)


@pytest.mark.sample(1)
@pytest.mark.parametrize("order", ["reverse", 3])
def test_no_order_of_threads_changes_the_text(order):
    for case in ("dense", "holey"):
        with kernels_run(order), make(case) as engine:
            outputs = engine.generate(PROMPTS, GREEDY)
        with make(case) as engine:
            expected = engine.generate(PROMPTS, GREEDY)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert [o.accept_lens for o in outputs] == [o.accept_lens for o in expected]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_nothing_of_the_device_but_its_results(case, kind, monkeypatch):
    """The host gets a round's lengths in one copy, and only when it asks for them."""
    running, steps, copies = [False], [0], [0]
    with kernels_run(), make(case) as engine:
        worker = engine.core.worker
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, forbidden(name, running))
        init = transfer.Download.__init__

        def counted(self, tensor):
            copies[0] += 1
            init(self, tensor)

        monkeypatch.setattr(transfer.Download, "__init__", counted)
        monkeypatch.setattr(worker, "run", watched(worker.run, running, steps))
        engine.generate(PROMPTS, PARAMS[kind])
    assert steps[0] > 4 and copies[0] == steps[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("case", CASES)
def test_a_step_never_waits_for_the_device(case, kind, card, monkeypatch):
    """CUDA itself reports every call that would wait, the results' own event aside."""
    with card.running(), make(case, graph_sizes=(), **card.options) as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS, PARAMS[kind])]
        run, steps = engine.core.worker.run, [0]

        def checked(launched):
            steps[0] += 1
            with card.refusing_waits():
                return run(launched)

        monkeypatch.setattr(engine.core.worker, "run", checked)
        again = engine.generate(PROMPTS, PARAMS[kind])
        assert [o.token_ids for o in again] == expected
        assert steps[0] > 4


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", ["chain", "chain_split", "dense", "holey"])
def test_each_forward_finds_the_tables_of_its_plan(case, monkeypatch):
    """One launch of all groups' deltas in a step, before its forward; no launch for no news."""
    with kernels_run() as seen, make(case) as engine:
        worker, news = engine.core.worker, [0]
        last = [table.numpy().copy() for table in engine.cache.tables]
        run = worker.run

        def checked(launched):
            is_news = False
            for group, table in enumerate(engine.cache.tables):
                assert np.array_equal(table.numpy(), engine.ledger.full_table(group))
                is_news |= not np.array_equal(table.numpy(), last[group])
                last[group] = table.numpy().copy()
            news[0] += is_news
            return run(launched)

        monkeypatch.setattr(worker, "run", checked)
        engine.generate(PROMPTS, GREEDY)
    assert 0 < news[0] == seen["apply_table_deltas"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["chain", "dense", "holey", "plain"])
def test_logprobs_and_scripted_trees(case):
    params = SamplingParams(max_new_tokens=20, logprobs=3)
    with make(case) as engine:
        expected = engine.generate(PROMPTS, params)
    with kernels_run(), make(case) as engine:
        outputs = engine.generate(PROMPTS, params)
    for one, other in zip(outputs, expected, strict=True):
        assert len(one.logprobs) == len(one.token_ids)
        assert [p.token_id for p in one.logprobs] == one.token_ids
        got, want = ([p.logprob for p in o.logprobs] for o in (one, other))
        assert got == pytest.approx(want, abs=1e-4)
    shape = Shape.eagle(4, 4, 16)
    references = [o.prompt_ids + o.token_ids for o in expected]
    scripted = ScriptedDrafter(references, vocab_size=259, seed=1)
    with kernels_run(), Engine.from_pretrained(draft=scripted, shape=shape) as engine:
        outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=20))
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert np.mean([o.accept_len for o in outputs]) > 2


@pytest.mark.parametrize("where", ["cpu", "kernels"])
def test_a_top_p_that_float32_takes_for_0_is_the_likeliest_token(where):
    """`SamplingParams` allows it, so it fails neither its request nor the batch."""
    tiny = SamplingParams(max_new_tokens=6, temperature=1.0, top_p=1e-50, seed=1)
    with kernels_run() if where == "kernels" else contextlib.nullcontext():
        with make("chain") as engine:
            outputs = engine.generate(PROMPTS, [tiny, SAMPLED, GREEDY, tiny])
            expected = engine.generate(PROMPTS, SamplingParams(max_new_tokens=6))
    assert [o.error for o in outputs] == [None] * 4
    assert [outputs[i].token_ids for i in (0, 3)] == [expected[i].token_ids for i in (0, 3)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["chain", "dense", "holey"])
def test_chunks_of_a_prompt_leave_the_draft_kv_of_a_whole_one(case, monkeypatch):
    """Draft KV cell p goes with token p + 1, at the end of a chunk too."""
    longer = [p + p for p in PROMPTS[:2]]

    def draft_kv(budget):
        kept = {}
        with make(case, prefill_tokens=budget) as engine:
            run = engine.core.worker.run

            def first(steps):
                (step,) = steps
                for row, request in zip(step.plan.rows, step.requests, strict=True):
                    if step.is_decode and request.index not in kept:
                        positions = np.arange(request.prompt_len - 1)
                        group = len(engine.cache.tables) - 1
                        size = engine.cache.page_sizes[group]
                        pages = engine.ledger.full_table(group)[row][positions // size]
                        slots = torch.from_numpy(pages * size + positions % size).long()
                        buffers = engine.cache.buffers([-1])
                        kept[request.index] = [buffer[slots].clone() for buffer in buffers]
                return run(steps)

            monkeypatch.setattr(engine.core.worker, "run", first)
            engine.generate(longer, GREEDY)
        return kept[0] + kept[1]

    whole, chunked = draft_kv(1024), draft_kv(7)
    assert len(whole) == len(chunked) == 4
    for one, other in zip(whole, chunked, strict=True):
        assert torch.allclose(one, other, atol=1e-4), (one - other).abs().amax((1, 2))


@pytest.mark.parametrize("link", ["first_child", "next_sibling"])
def test_a_host_tree_with_wild_links_is_named(link):
    """A kernel does not read what it need not, so the host checks what the host has made."""

    class Wild(ScriptedDrafter):
        def propose(self, *args):
            tree = super().propose(*args)
            links = getattr(tree, link).clone()
            links[0, 1] = 1
            return dataclasses.replace(tree, **{link: links})

    drafter = Wild([], vocab_size=259)
    with kernels_run(), Engine.from_pretrained(draft=drafter, shape=Shape.eagle(3, 2, 6)) as engine:
        for output in engine.generate(PROMPTS, GREEDY):
            assert f"is no tree: {link}[0, 1] must be -1 or in (1, 6), got 1" in output.error


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["chain", "chain_split", "dense", "holey", "few_nodes", "plain"])
def test_a_lane_with_nan_fails_alone(case, monkeypatch):
    """-1 for a token is a result like others on the device; the other lanes go on."""
    with make(case) as engine:
        expected = engine.generate(PROMPTS, GREEDY)
    with kernels_run(), make(case) as engine:
        forward, calls = engine.target.forward, []

        def spoiled(tokens, positions, batch, logits_at=None, **options):
            output = forward(tokens, positions, batch, logits_at, **options)
            calls.append(output)
            if len(calls) == 3:  # the second round of decoding
                for values in (output.logits, output.hidden, output.features):
                    if values is not None:
                        values.view(len(PROMPTS), -1)[0] = torch.nan
            return output

        monkeypatch.setattr(engine.target, "forward", spoiled)
        first, *others = engine.generate(PROMPTS, GREEDY)
        assert first.finish_reason == "error" and "not finite" in first.error
        again = engine.generate(PROMPTS, GREEDY)
    for outputs, wanted in ((others, expected[1:]), (again, expected)):
        assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
        # Nor does it leave what spoils drafts: a sink with NaN would, for ever.
        assert [o.accept_lens for o in outputs] == [o.accept_lens for o in wanted]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("case", CASES)
def test_the_host_need_not_know_the_lengths(case, kind, monkeypatch):
    """As under overlap, only the device knows the lengths. Text and drafts are the same."""
    params = dataclasses.replace(PARAMS[kind], max_new_tokens=20)
    with kernels_run():
        with make(case) as engine:
            expected = engine.generate(PROMPTS, params) + engine.generate(PROMPTS[:1], params)
        lanes = RowState.lanes

        def vague(self, rows, lo, hi):
            less = (1 + np.arange(len(lo), dtype=np.int32)) % 3
            return lanes(self, rows, lo - less, hi + 2 - less)

        monkeypatch.setattr(RowState, "lanes", vague)
        with make(case) as engine:
            outputs = engine.generate(PROMPTS, params) + engine.generate(PROMPTS[:1], params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.accept_lens for o in outputs] == [o.accept_lens for o in expected]


def test_lengths_are_clamped_into_what_the_ledger_reserved():
    """Under overlap the device knows the length, and the host knows its bounds."""
    state = RowState(4, 3, torch.device("cpu"))
    state.seq_lens.copy_(torch.tensor([0, 7, 30, 2, 9]))
    rows = np.array([4, 2, 1, 3], np.int32)
    lanes = state.lanes(rows, i32([5, 10, 7, 4]), i32([12, 20, 7, 9])).part(0, 4, 3)
    assert lanes.starts.tolist() == [9, 20, 7, 4]
    assert lanes.positions.tolist() == [9, 10, 11, 20, 21, 22, 7, 8, 9, 4, 5, 6]
    assert lanes.max_len == 23 and lanes.last_indices.tolist() == [2, 5, 8, 11]


@pytest.mark.parametrize("seed", range(30))
def test_masks_are_the_twins(seed):
    rng = np.random.default_rng(seed)
    batch, topk, steps = (int(rng.integers(1, n)) for n in (6, 6, 5))
    starts, window = i32(rng.integers(0, 20, batch)), rng.choice([None, 1, 3, 9])
    step = int(rng.integers(0, steps))
    ancestors = i32(rng.integers(0, topk, (batch, topk, steps))) if rng.random() < 0.7 else None
    how = {"num_steps": steps, "topk": topk, "step": step, "page_size": 4, "layout": "dense"}
    tensors = None if ancestors is None else torch.from_numpy(ancestors)
    expected = twins.draft_visibility(starts, ancestors=ancestors, **how)
    with kernels_run():
        got = device.draft_visibility(torch.from_numpy(starts), ancestors=tensors, **how)
    for one, other in zip(got, expected, strict=True):
        assert np.array_equal(one.numpy(), other)
    own_mask, own_positions = expected
    lens, columns = np.full(batch, topk, np.int32), int(starts.max()) + own_mask.shape[2]
    q_positions = np.repeat((starts + step)[:, None], topk, 1)
    own = {"own_mask": own_mask, "own_positions": own_positions, "q_positions": q_positions}
    causal = i32(rng.integers(1, 6, batch))
    for q_lens, arrays in ((lens, own), (causal, {})):
        most = int(q_lens.max())
        columns = max(columns, int((starts + q_lens).max()))
        options = {"num_queries": most, "window": None if window is None else int(window)}
        options["sink"] = int(rng.choice([0, 1, 3, 9]))
        want = twins.attention_bias(starts, q_lens, columns, **arrays, **options)
        with kernels_run():
            bias = device.attention_bias(
                torch.from_numpy(starts),
                torch.from_numpy(q_lens),
                columns,
                **{name: torch.from_numpy(array) for name, array in arrays.items()},
                **options,
            )
        assert bias.dtype == torch.float32
        for lane, n in enumerate(q_lens.tolist()):
            assert np.array_equal(bias[lane, :n].numpy(), want[lane, :n])
            assert (bias[lane] == 0).any(1).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("case", ["chain_split", "dense", "holey"])
def test_forks_and_pins_on_the_device(case, depth):
    """Page copies run before their step's forward; a fork's rows go on from device state."""
    params = dataclasses.replace(SAMPLED, n=3, max_new_tokens=15)
    prompts = [PROMPTS[1], PROMPTS[1][:30] + PROMPTS[0]]
    with make(case) as engine:
        expected = engine.generate(prompts, params)
    with kernels_run() as seen, make(case, overlap_depth=depth) as engine:
        pin = engine.pin(PROMPTS[1][:30])
        outputs = engine.generate(prompts, params)
        engine.unpin(pin)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert seen["copy_slots"]
