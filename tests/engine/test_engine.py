"""Laws of `Engine`: sampling, finishing, failing requests, bad input; pages always come back."""

from __future__ import annotations

import copy
import itertools
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import warm_kit
from conftest import assert_no_page_leaked
from lossless import Comparison, Reference
from specpool import ConfigError, Engine, SamplingParams, Shape
from specpool import kernels as device
from specpool.engine.assets import corpus, resolve
from specpool.engine.draft import ScriptedDrafter
from specpool.engine.output import Chunk

PAIR = {"target": "specpool/tiny", "draft": "specpool/tiny-eagle3", "max_context_len": 512}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(**PAIR, shape=Shape.eagle(4, 4, 16)) as engine:
        yield engine


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(resolve("specpool/tiny")).float()


def tokens_of(outputs):
    return [output.token_ids for output in outputs]


# --- sampling ------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 1, 4), {}),
        ((1, 1, 2), {"page_size": 1}),
        ((4, 4, 16), {"page_size": 3}),
        ((3, 8, 24), {"layout": "holey", "page_size": 64}),
        ((5, 2, 8), {"placement": "shared"}),
    ],
)
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.8},
    ],
)
def test_sampled_text_is_plain_sampling_with_that_seed(shape, options, sampling):
    """For any shape, layout and batch, a token depends only on its seed and position."""
    with Engine.from_pretrained(**PAIR, shape=Shape.eagle(*shape), **options) as engine:
        prompts = corpus.prompts(5, 60)
        params = [SamplingParams(max_new_tokens=60, seed=s, **sampling) for s in range(5)]
        drafted = engine.generate(prompts, params)
        plain = engine.generate(prompts, params, shape=Shape.none())
        alone = engine.generate(prompts[3], params[3])
        assert tokens_of(drafted) == tokens_of(plain)
        assert tokens_of(alone) == tokens_of(plain[3:4])
        assert len({tuple(output.token_ids) for output in drafted}) == 5
        assert max(output.accept_len for output in drafted) > 1


def _toy_engine() -> tuple[Engine, Reference]:
    """A random model with a vocabulary of 24, and a drafter that guesses at random."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config).eval()
    drafter = ScriptedDrafter([], vocab_size=24)
    shape = Shape.eagle(2, 3, 8)
    reference = Reference(model)
    engine = Engine.from_pretrained(model, draft=drafter, shape=shape, max_batch=64)
    return engine, reference


def _p_values(engine: Engine, reference: Reference, num_samples: int) -> list[float]:
    """Chi-square of the first token, and of the second after the two likeliest first ones."""
    prompt = [3, 1, 4, 1, 5]
    params = [
        SamplingParams(max_new_tokens=2, temperature=1.0, seed=s, ignore_eos=True)
        for s in range(num_samples)
    ]
    outputs = engine.generate([prompt] * num_samples, params)
    pairs = [tuple(output.token_ids) for output in outputs]

    def distribution(tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            logits = reference.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        return torch.softmax(logits[0, -1].double(), -1).numpy()

    def p_value(counts: Counter, probabilities: np.ndarray) -> float:
        total = sum(counts.values())
        common = probabilities * total >= 5
        observed = np.array([counts[t] for t in range(24)], float)
        seen = np.append(observed[common], observed[~common].sum())
        expected = np.append(probabilities[common], probabilities[~common].sum()) * total
        kept = expected > 0
        return float(
            chisquare(seen[kept], expected[kept] * seen[kept].sum() / expected[kept].sum()).pvalue
        )

    first = Counter(a for a, _ in pairs)
    values = [p_value(first, distribution(prompt))]
    for token, _ in first.most_common(2):
        second = Counter(b for a, b in pairs if a == token)
        values.append(p_value(second, distribution([*prompt, token])))
    return values


def test_samples_follow_the_targets_own_distribution():
    engine, reference = _toy_engine()
    with engine:
        assert min(_p_values(engine, reference, 2000)) > 1e-4


def test_chi_square_catches_a_planted_bias(monkeypatch):
    uniform = device.uniform
    monkeypatch.setattr(
        device, "uniform", lambda seeds, positions: uniform(seeds, positions) ** 1.25
    )
    engine, reference = _toy_engine()
    with engine:
        assert min(_p_values(engine, reference, 2000)) < 1e-6


def test_a_missing_seed_is_drawn_and_reported(engine):
    prompt = corpus.prompts(1, 60)[0]
    params = SamplingParams(max_new_tokens=40, temperature=1.5)
    first, second = engine.generate([prompt, prompt], params)
    assert first.seed != second.seed
    again = SamplingParams(max_new_tokens=40, temperature=1.5, seed=first.seed)
    assert engine.generate(prompt, again)[0].token_ids == first.token_ids


# --- generation ----------------------------------------------------------------------------------


def test_more_prompts_than_rows_come_back_in_order(model):
    reference = Reference(model)
    prompts = [prompt[: 20 + 7 * i] for i, prompt in enumerate(corpus.prompts(11))]
    params = [SamplingParams(max_new_tokens=10 + 9 * (i % 4)) for i in range(11)]
    with Engine.from_pretrained(**PAIR, max_batch=3) as engine:
        outputs = engine.generate(prompts, params)
        assert [output.index for output in outputs] == list(range(11))
        comparison = Comparison()
        for prompt, p, output in zip(prompts, params, outputs, strict=True):
            assert len(output.token_ids) == p.max_new_tokens
            assert output.finish_reason == "length"
            assert sum(output.accept_lens) >= len(output.token_ids) - 1
            comparison.add(reference, prompt, output.token_ids)
        comparison.finish()


def test_a_pool_for_one_row_serves_many_requests():
    """Admission waits for pages: nothing is lost when only one request fits at a time."""
    prompts = corpus.prompts(5, 100)
    params = SamplingParams(max_new_tokens=30)
    with Engine.from_pretrained(**PAIR, num_pages=40, shape=Shape.eagle(3, 1, 4)) as small:
        few = small.generate(prompts, params)
        assert max(small.peak_pages) <= 40
    with Engine.from_pretrained(**PAIR) as large:
        assert tokens_of(large.generate(prompts, params)) == tokens_of(few)


def test_a_long_prompt_is_prefilled_in_chunks(model):
    """Chunks change neither the text nor what the drafter knows."""
    prompts = [list(corpus.corpus(9, 300)), corpus.prompts(1, 33)[0]]
    params = SamplingParams(max_new_tokens=24)
    with Engine.from_pretrained(**PAIR) as engine:
        whole = engine.generate(prompts, params)
    reference, comparison = Reference(model), Comparison()
    with Engine.from_pretrained(**PAIR, prefill_tokens=64) as engine:
        chunked = engine.generate(prompts, params)
        for prompt, output in zip(prompts, chunked, strict=True):
            comparison.add(reference, prompt, output.token_ids)
    comparison.finish()
    assert [o.accept_lens for o in chunked] == [o.accept_lens for o in whole]


def test_stop_token_ends_the_text_inside_an_accepted_run(engine):
    prompt = corpus.prompts(1)[0]
    full = engine.generate(prompt, SamplingParams(max_new_tokens=60))[0]
    stop = full.token_ids[30]
    cut = full.token_ids.index(stop)
    output = engine.generate(prompt, SamplingParams(max_new_tokens=60, stop_token_ids=(stop,)))[0]
    assert output.finish_reason == "stop"
    assert output.token_ids == full.token_ids[: cut + 1]
    assert output.text == full.text[:cut]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5])
def test_max_new_tokens_is_exact(engine, num_tokens):
    prompt = corpus.prompts(1)[0]
    full = engine.generate(prompt, SamplingParams(max_new_tokens=20))[0]
    output = engine.generate(prompt, SamplingParams(max_new_tokens=num_tokens))[0]
    assert output.token_ids == full.token_ids[:num_tokens]
    assert len(output.from_draft) == num_tokens


def test_strings_and_token_ids_are_the_same_prompt(engine):
    text = "seq: 3, 6, 9, "
    params = SamplingParams(max_new_tokens=12)
    by_text, by_ids = engine.generate([text, list(text.encode())], params)
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == bytes(by_text.token_ids).decode()


def test_stream_gives_what_generate_gives(engine):
    prompts = corpus.prompts(3, 70)
    params = SamplingParams(max_new_tokens=50)
    expected = engine.generate(prompts, params)
    texts, tokens, outputs = [""] * 3, [[], [], []], {}
    drafts = 0
    for item in engine.stream(prompts, params):
        if isinstance(item, Chunk):
            texts[item.index] += item.text
            tokens[item.index] += item.token_ids
            drafts += sum(len(text) for text, from_draft in item.pieces if from_draft)
        else:
            outputs[item.index] = item
    assert tokens == tokens_of(expected)
    assert texts == [output.text for output in expected]
    assert tokens_of(outputs[i] for i in range(3)) == tokens
    assert drafts == sum(sum(output.from_draft) for output in expected)


def test_stream_never_splits_a_character():
    """A character whose bytes arrive one by one comes out whole."""
    from specpool.engine.text.stream import TextStream
    from specpool.engine.text.tokenizer import load_tokenizer

    stream = TextStream(load_tokenizer(resolve("specpool/tiny")))
    pieces = [stream.push([byte]) for byte in "aé☃🎈b".encode()]
    assert "".join(pieces) == "aé☃🎈b"
    assert [piece for piece in pieces if piece] == ["a", "é", "☃", "🎈", "b"]
    assert stream.push([0xE2], last=True) == "\N{REPLACEMENT CHARACTER}"


def test_closing_a_stream_aborts_what_is_left(engine):
    stream = engine.stream(corpus.prompts(4), SamplingParams(max_new_tokens=200))
    for _ in itertools.islice(stream, 5):
        pass
    assert engine.pool_stats()[0].free_pages < engine.pool_stats()[0].num_pages
    stream.close()
    assert_no_page_leaked(engine)


def test_two_streams_share_the_engine(engine):
    prompts = corpus.prompts(2, 50)
    params = SamplingParams(max_new_tokens=30)
    expected = engine.generate(prompts, params)
    streams = [engine.stream(prompt, params) for prompt in prompts]
    tokens = [[], []]
    for items in itertools.zip_longest(*streams):
        for collected, item in zip(tokens, items, strict=True):
            if isinstance(item, Chunk):
                collected += item.token_ids
    assert tokens == tokens_of(expected)


@pytest.mark.parametrize("shape", [(4, 4, 16), None])
def test_logprobs_are_the_targets_own(engine, model, shape):
    prompt = corpus.prompts(1, 40)[0]
    params = SamplingParams(max_new_tokens=25, logprobs=3, temperature=0.9, seed=1, top_k=4)
    kind = Shape.none() if shape is None else Shape.eagle(*shape)
    with_few, plain = engine.generate(
        [prompt, prompt], [params, SamplingParams(max_new_tokens=25)], shape=kind
    )
    assert plain.logprobs is None
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *with_few.token_ids]])
        table = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0], -1)
    assert len(with_few.logprobs) == 25
    for i, entry in enumerate(with_few.logprobs):
        expected = table[len(prompt) - 1 + i]
        assert entry.token_id == with_few.token_ids[i]
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-4)
        assert list(entry.top) == expected.topk(3).indices.tolist()
        assert list(entry.top.values()) == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)


def test_a_model_in_memory_is_used_and_given_back(model):
    mine = copy.deepcopy(model).train()
    before = mine.config._attn_implementation
    ids = torch.tensor([corpus.prompts(1, 30)[0]])
    with Engine.from_pretrained(mine, draft="specpool/tiny-eagle", max_context_len=256) as engine:
        assert engine.tokenizer is None
        output = engine.generate(ids[0].tolist(), SamplingParams(max_new_tokens=20))[0]
        assert output.text == ""
    assert mine.config._attn_implementation == before
    assert mine.training
    mine.eval()
    with torch.inference_mode():
        assert torch.equal(mine(ids).logits, model(ids).logits)
    assert Reference(model).text(ids[0].tolist(), 20) == output.token_ids


# --- failures ------------------------------------------------------------------------------------

POISON = 250  # a token whose embedding is not a number


@pytest.fixture
def poisoned(model) -> Iterator[Engine]:
    broken = copy.deepcopy(model)
    broken.model.embed_tokens.weight.data[POISON] = torch.nan
    with Engine.from_pretrained(
        broken,
        draft="specpool/tiny-eagle3",
        max_context_len=256,
        shape=Shape.eagle(3, 4, 12),
        max_batch=2,
    ) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_fail_one_request_and_no_other(poisoned, model, temperature):
    prompts = corpus.prompts(3, 40)
    bad = [*prompts[1][:20], POISON, *prompts[1][20:]]
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=3)
    alone = poisoned.generate(prompts, params)
    outputs = poisoned.generate([prompts[0], bad, prompts[2]], params)
    assert outputs[1].finish_reason == "error"
    assert "position 40" in outputs[1].error
    assert outputs[1].token_ids == []
    # Two rows: the third request runs on the pages of the failed one.
    assert outputs[0].token_ids == alone[0].token_ids
    assert outputs[2].token_ids == alone[2].token_ids


def test_nan_in_the_middle_of_a_text_names_the_position(model, monkeypatch):
    prompts = corpus.prompts(2, 40)
    with Engine.from_pretrained(**PAIR, shape=Shape.eagle(4, 4, 16)) as engine:
        expected = engine.generate(prompts, SamplingParams(max_new_tokens=30))
        forward = engine.target.forward

        def failing(token_ids, positions, batch, logits_index, **options):
            output = forward(token_ids, positions, batch, logits_index, **options)
            if logits_index is None:
                lane = torch.arange(len(positions)) < len(positions) // 2
                output.logits[(positions == 50) & lane] = torch.nan
            return output

        monkeypatch.setattr(engine.target, "forward", failing)
        first, second = engine.generate(prompts, SamplingParams(max_new_tokens=30))
        assert first.finish_reason == "error"
        assert "position 50" in first.error
        assert first.token_ids == expected[0].token_ids[: 50 + 1 - 40]
        assert second.token_ids[:10] == expected[1].token_ids[:10]


@pytest.mark.parametrize("draft", [None, "specpool/tiny-eagle3"])
def test_nan_under_overlap_ends_one_request_and_no_other(monkeypatch, draft):
    """The next round is on its way by then: a root that is no token must not fail all its lanes."""
    prompts, params = corpus.prompts(2, 40), SamplingParams(max_new_tokens=30)
    with Engine.from_pretrained(draft=draft, overlap_depth=1, max_context_len=256) as engine:
        expected = engine.generate(prompts, params)
        forward = engine.target.forward

        def failing(token_ids, positions, batch, logits_index, **options):
            output = forward(token_ids, positions, batch, logits_index, **options)
            if logits_index is None and len(positions) > 1:
                lane = torch.arange(len(positions)) < len(positions) // 2
                output.logits[(positions == 50) & lane] = torch.nan
            return output

        monkeypatch.setattr(engine.target, "forward", failing)
        first, second = engine.generate(prompts, params)
        assert first.error == "the logits at position 50 are not finite"
        assert second.token_ids == expected[1].token_ids, second.error


def test_an_abort_of_what_runs_leaves_no_nan(model):
    """Under overlap the pages are given back before the forward's writes are known."""
    broken = copy.deepcopy(model)
    broken.model.embed_tokens.weight.data[POISON] = torch.nan
    with Engine.from_pretrained(broken, overlap_depth=1, max_context_len=256) as engine:
        number = engine.submit([5, POISON, 7])
        engine.turn()
        engine.abort(number)
        while engine.turn():
            pass
        for buffer in engine.cache.keys + engine.cache.values:
            assert buffer.isfinite().all()


def test_a_forward_that_raises_returns_every_page(engine, monkeypatch):
    prompts = corpus.prompts(3, 50)
    expected = engine.generate(prompts, SamplingParams(max_new_tokens=30))
    forward, calls = engine.target.forward, itertools.count()
    for fail_at in (0, 1, 4):
        calls = itertools.count()

        def failing(*args, calls=calls, fail_at=fail_at, **options):
            if next(calls) == fail_at:
                raise RuntimeError("the device is gone")
            return forward(*args, **options)

        monkeypatch.setattr(engine.target, "forward", failing)
        for output in engine.generate(prompts, SamplingParams(max_new_tokens=30)):
            assert output.finish_reason == "error"
            assert output.error == "a step failed: RuntimeError: the device is gone"
        assert_no_page_leaked(engine)
        monkeypatch.setattr(engine.target, "forward", forward)
    assert tokens_of(engine.generate(prompts, SamplingParams(max_new_tokens=30))) == tokens_of(
        expected
    )


def test_the_leak_fixture_sees_a_leak():
    """The autouse fixture's own check fails on one page that is not given back."""
    with Engine.from_pretrained(**PAIR) as engine:
        row = engine.ledger.admit()
        plan = engine.ledger.prepare_extend(np.array([row], np.int32), np.array([1], np.int32))
        engine.ledger.launch(plan.step)
        engine.ledger.complete(plan.step)
        with pytest.raises(AssertionError, match="leaked"):
            assert_no_page_leaked(engine)
        engine.ledger.finish(row)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt 0 is empty"),
        ([[1, 2], []], "prompt 1 is empty"),
        ([[5, 259]], r"prompt 0 has token id 259 at position 1; the vocabulary is \[0, 259\)"),
        ([[-1]], "token id -1 at position 0"),
        ([[1] * 512], "prompt 0 has 512 tokens.*room for 511"),
        ([["a"]], "prompt 0"),
        ([[1.5]], "prompt 0"),
        ([None], "prompt 0"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(engine, prompts, message):
    with pytest.raises(ConfigError, match=message):
        engine.generate(prompts, SamplingParams(max_new_tokens=4))
    with pytest.raises(ConfigError, match=message):
        engine.stream(prompts, SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 1 << 64),
        ("logprobs", -1),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", 5),
    ],
)
def test_bad_sampling_params_name_the_value(name, value):
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, r"page_size must be an integer in \[1, .*got 0"),
        ({"page_size": -4}, "got -4"),
        ({"placement": "both"}, "placement must be one of split, shared, got 'both'"),
        ({"policy": "triple"}, "policy must be one of"),
        ({"layout": "loose"}, "layout must be one of"),
        ({"max_batch": 0}, "max_batch"),
        ({"max_context_len": 4096}, "4096 is above the model's 2048 positions"),
        ({"max_context_len": 1}, "max_context_len"),
        ({"num_pages": 3}, "3 .*pages|pages.* 3"),
        ({"kv_bytes": 1000}, "needs .*iB of KV, 1,000 B are to be had"),
        ({"shape": (3, 1, 4)}, "shape must be a specpool.Shape"),
        ({"pages": 3}, "pages"),
        ({"dtype": "float31"}, "float31"),
        ({"device": "abacus"}, "abacus"),
        ({"target": "/no/such/folder"}, "/no/such/folder"),
        ({"target": "no/such-hub-name"}, "no/such-hub-name"),
        ({"draft": "/no/such/folder"}, "/no/such/folder"),
        ({"draft": None, "shape": Shape.eagle(3, 1, 4)}, "there is no draft model"),
    ],
)
def test_bad_configurations_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Engine.from_pretrained(**{**PAIR, "shape": Shape.eagle(3, 1, 4), **options})


@pytest.mark.parametrize(
    "shape", [(0, 1, 1), (3, 1, 5), (2, 2, 20), (3, 0, 4), (-1, 1, 2), (1 << 40, 1, 2)]
)
def test_impossible_shapes_are_refused(shape):
    with pytest.raises(ConfigError, match=r"num_steps|topk|num_draft_tokens"):
        Shape.eagle(*shape)


def test_a_pool_too_small_for_one_row_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"20 pages.*(32|33)|(32|33).*20 pages|num_pages.*20"):
        Engine.from_pretrained(**PAIR, num_pages=20)
    short = {**PAIR, "max_context_len": 128, "num_pages": 9}
    with Engine.from_pretrained(**short, shape=Shape.eagle(3, 1, 4)) as engine:
        output = engine.generate(corpus.prompts(1, 10)[0], SamplingParams(max_new_tokens=600))[0]
        assert len(output.token_ids) == 128 - 10  # the whole context fits one row


def test_parameters_must_match_the_prompts(engine):
    with pytest.raises(ConfigError, match="2 prompts, but 1 sampling"):
        engine.generate(corpus.prompts(2), [SamplingParams()])


def test_a_shape_that_the_engine_was_not_built_for_is_refused(engine):
    with pytest.raises(ConfigError, match="not among the engine's shapes"):
        engine.generate(corpus.prompts(1), shape=Shape.eagle(2, 1, 3))


FORKED = """
import os, signal, sys, threading, warnings

from specpool import Engine

warnings.simplefilter("ignore", DeprecationWarning)  # forking beside a thread is the point here
engine = Engine.from_pretrained(max_context_len=64)
held, done = threading.Event(), threading.Event()


def hold():
    with engine.core.lock:
        held.set()
        done.wait(400)


thread = threading.Thread(target=hold)
thread.start()
held.wait(400)
child = os.fork()
if child == 0:
    signal.alarm(300)
    engine.close()
    os._exit(7)
_, status = os.waitpid(child, 0)
done.set()
thread.join()
engine.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_can_close_while_a_thread_ran_a_turn():
    """The thread that holds the lock does not exist in the child."""
    assert warm_kit.run([sys.executable, "-c", FORKED]).returncode == 7
