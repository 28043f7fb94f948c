"""Law: bias, penalties and min-p hold at every node, so the text is that of plain decoding."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from conftest import DEVICE
from specpool import ConfigError, Engine, EngineConfig, SamplingParams, Shape
from specpool.engine.assets import corpus, resolve
from specpool.engine.draft import EagleDrafter, NgramDrafter
from specpool.engine.models import EagleHead, TargetModel

HEADS = ("specpool/tiny-eagle", "specpool/tiny-eagle3")
# drafter, shape, options
ENGINES = {
    "eagle chain D=1": (HEADS[0], (3, 1, 4), {"overlap_depth": 1}),
    "eagle-3 tree D=1": (HEADS[1], (4, 4, 16), {"overlap_depth": 1, "page_size": 3}),
    "eagle-3 tree v1": (HEADS[1], (3, 2, 6), {"worker": "v1"}),
    "eagle holey, mixed": (HEADS[0], (3, 4, 12), {"layout": "holey", "mixed_chunks": True}),
    "ngram D=1": ("ngram", (4, 2, 8), {"overlap_depth": 1}),
    "few pages": (HEADS[1], (3, 2, 6), {"num_pages": 46, "page_size": 4, "overlap_depth": 1,
                                         "headroom": 0}),
    "host tier": (HEADS[1], (3, 1, 4), {"num_pages": 46, "page_size": 4, "host_bytes": 1 << 24,
                                        "offload": "always"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Iterator[TargetModel]:
    with TargetModel.from_pretrained(
        resolve("specpool/tiny"), dtype="float32", device=DEVICE
    ) as model:
        yield model


@pytest.fixture(scope="module")
def heads(target: TargetModel) -> dict[str, EagleHead]:
    return {name: EagleDrafter.from_pretrained(resolve(name), target).head for name in HEADS}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(resolve("specpool/tiny")).float().to(DEVICE).eval()


def make(target: TargetModel, heads: dict[str, EagleHead], case: str, **more: object) -> Engine:
    name, shape, options = ENGINES[case]
    drafter = NgramDrafter() if name == "ngram" else EagleDrafter(heads[name])
    config = EngineConfig(shape=Shape(*shape), max_context_len=160, **options, **more)
    return Engine(target, drafter, config=config)


def plain(target: TargetModel) -> Engine:
    return Engine(target, None, config=EngineConfig(max_context_len=160))


def prompts(count: int) -> list[list[int]]:
    texts, lens = corpus.prompts(count, 90), [40, 7, 65, 22]
    return [text[: lens[i % 4]] for i, text in enumerate(texts)]


class OpenAiPenalties(LogitsProcessor):
    """OpenAI's text: mu[j] - c[j] * frequency - (c[j] > 0) * presence; c counts the output."""

    def __init__(self, prompt_len: int, presence: float, frequency: float) -> None:
        self.prompt_len, self.presence, self.frequency = prompt_len, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.prompt_len :].tolist()).items():
            scores[0, token] -= count * self.frequency + self.presence
        return scores


def reference(
    model: torch.nn.Module, prompt: list[int], params: SamplingParams
) -> tuple[list[int], list[float]]:
    """transformers' greedy text with its own processors, and the gap of the top two at each."""
    mine = LogitsProcessorList()
    if params.presence_penalty or params.frequency_penalty:
        penalties = params.presence_penalty, params.frequency_penalty
        mine.append(OpenAiPenalties(len(prompt), *penalties))
    bias = {(token,): float(value) for token, value in params.logit_bias.items()}
    ids = torch.tensor([prompt], device=DEVICE)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            repetition_penalty=params.repetition_penalty,
            sequence_bias=bias or None,
            logits_processor=mine,
            output_scores=True,
            return_dict_in_generate=True,
        )
    tops = [step[0].float().topk(2).values for step in out.scores]
    return out.sequences[0, len(prompt) :].tolist(), [float(top[0] - top[1]) for top in tops]


def random_params(rng: random.Random, drawn: bool) -> SamplingParams:
    """Some of the processors; every fourth request has none."""
    fields: dict[str, object] = {"max_new_tokens": rng.randint(5, 60), "ignore_eos": True}
    if drawn:
        fields |= {"temperature": rng.choice([0.7, 1.0, 1.5]), "seed": rng.randrange(1 << 60)}
        fields["min_p"] = rng.choice([0, 0.02, 0.3])
        fields["top_p"] = rng.choice([1, 0.95])
    if rng.random() < 0.75:
        fields["repetition_penalty"] = rng.choice([1, 1.3, 0.8])
        fields["presence_penalty"] = rng.choice([0, 1.5, -0.7])
        fields["frequency_penalty"] = rng.choice([0, 0.9, -0.4])
        tokens = rng.sample(range(97, 123), rng.choice([0, 1, 5]))
        fields["logit_bias"] = {token: rng.uniform(-8, 4) for token in tokens}
    return SamplingParams(**fields)


def banning_params(rng: random.Random, drawn: bool) -> SamplingParams:
    """Some bans, and seldom other processors; every fourth request has none."""
    fields: dict[str, object] = {"max_new_tokens": rng.randint(5, 60), "ignore_eos": True}
    if drawn:
        fields |= {"temperature": 0.7, "seed": rng.randrange(1 << 60)}
    if rng.random() < 0.2:
        fields["repetition_penalty"] = 1.1
    if rng.random() < 0.75:
        fields["no_repeat_ngram_size"] = rng.choice([0, 4, 6])
        fields["suppress_tokens"] = rng.sample(range(97, 123), rng.choice([0, 1, 2]))
        fields["bad_words_ids"] = [rng.choices(range(97, 123), k=rng.randint(1, 3))]
        fields["begin_suppress_tokens"] = [32]
        least = rng.randint(0, fields["max_new_tokens"])
        fields |= {"stop_token_ids": [101, 32], "min_new_tokens": least}
    return SamplingParams(**fields)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.4},
        pytest.param({"repetition_penalty": 0.7}, marks=pytest.mark.full),
        {"presence_penalty": 1.1},
        pytest.param({"frequency_penalty": 0.6}, marks=pytest.mark.full),
        {"frequency_penalty": -0.3, "presence_penalty": -1},
        {"logit_bias": {101: -100, 32: -3.5, 97: 2}},
        {"logit_bias": {116: 3}, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    ],
)
def test_greedy_text_is_that_of_transformers_processors(target, heads, model, fields):
    """Token by token, drafts included; texts may part only where the scores are tied."""
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, **fields)
    texts = prompts(3)
    engine = make(target, heads, "eagle-3 tree D=1")
    outputs = engine.generate(texts, params)
    unchanged = engine.generate(texts, SamplingParams(max_new_tokens=40, ignore_eos=True))
    assert [o.token_ids for o in outputs] != [o.token_ids for o in unchanged]
    for prompt, output in zip(texts, outputs, strict=True):
        theirs, gaps = reference(model, prompt, params)
        for ours, their, gap in zip(output.token_ids, theirs, gaps, strict=True):
            if ours != their:
                assert gap < 1e-4
                break


#: Every engine, by turns greedy and drawn, with changes and bans; `make test-full` has the others.
RUNS = [
    pytest.param(
        case,
        drawn,
        make_params,
        id=f"{case}-{'drawn' if drawn else 'greedy'}-{name}",
        marks=[pytest.mark.full] if (number + 2 * drawn + (name == "ban")) % 4 else [],
    )
    for number, case in enumerate(ENGINES)
    for drawn in (False, True)
    for name, make_params in (("change", random_params), ("ban", banning_params))
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("case", "drawn", "make_params"), RUNS)
def test_the_text_is_that_of_plain_decoding(target, heads, case, drawn, make_params):
    """Requests with and without processors, in one batch, of all drafters and workers."""
    rng = random.Random(f"{case} {drawn}")
    texts = prompts(10)
    params = [make_params(rng, drawn) for _ in texts]
    engine = plain(target)
    expected = [o.token_ids for o in engine.generate(texts, params)]
    engine = make(target, heads, case)
    outputs = engine.generate(texts, params)
    assert all(pool.used_pages == 0 for pool in engine.pool_stats())
    if "pages" in case:
        assert engine.stats().retracted_ct > 0
    assert [o.token_ids for o in outputs] == expected
    assert sum(o.accept_len for o in outputs) / len(outputs) > 1.1


def test_samples_and_turns_count_their_own_output(target, heads):
    """Forks of a prompt, and a session: earlier answers belong to the prompt of a turn."""
    params = SamplingParams(
        max_new_tokens=20, ignore_eos=True, frequency_penalty=1.5, repetition_penalty=1.1
    )
    (prompt,) = prompts(1)
    engine = plain(target)
    drafting = make(target, heads, "eagle chain D=1")
    several = SamplingParams(
        max_new_tokens=20, ignore_eos=True, temperature=1, n=3, seed=5, presence_penalty=2
    )
    expected = [o.token_ids for o in engine.generate([prompt], several)]
    assert [o.token_ids for o in drafting.generate([prompt], several)] == expected
    with drafting.open_session() as session:
        first = session.append(prompt, params).output()
        second = session.append([32, 84], params).output()
    (one,) = engine.generate([prompt], params)
    assert first.token_ids == one.token_ids
    (two,) = engine.generate([[*prompt, *one.token_ids, 32, 84]], params)
    assert second.token_ids == two.token_ids


def test_min_p_drops_what_is_unlikely(target, heads):
    """All of it: drawn text is greedy text. None of it: it is not."""
    texts, tokens = prompts(3), {"max_new_tokens": 30, "ignore_eos": True}
    engine = make(target, heads, "eagle-3 tree D=1")
    greedy = [o.token_ids for o in engine.generate(texts, SamplingParams(**tokens))]
    for min_p, is_greedy in ((1.0, True), (0.0, False)):
        params = SamplingParams(temperature=1, seed=2, min_p=min_p, **tokens)
        drawn = [o.token_ids for o in engine.generate(texts, params)]
        assert (drawn == greedy) == is_greedy


def test_log_probabilities_are_the_targets_own(target, heads):
    """A bias changes the tokens, not what the target thinks of them."""
    (prompt,) = prompts(1)
    biased = SamplingParams(max_new_tokens=1, logprobs=3, logit_bias={120: 100})
    engine = make(target, heads, "eagle chain D=1")
    (ours,) = engine.generate([prompt], biased)
    (free,) = engine.generate([prompt], SamplingParams(max_new_tokens=1, logprobs=3))
    assert ours.token_ids == [120]
    # The second prompt's KV is in the prefix cache, so its forward may round in another way.
    assert ours.logprobs[0].top == pytest.approx(free.logprobs[0].top, abs=1e-4)
    assert ours.logprobs[0].logprob < free.logprobs[0].logprob


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_p": -0.1}, r"min_p must be a number in \[0, 1\], got -0.1"),
        ({"min_p": float("nan")}, r"min_p must be a number in \[0, 1\], got nan"),
        ({"min_p": 0.1}, "min_p 0.1 does nothing at temperature 0"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be a number in \[0.01, 10\], got 0"),
        ({"repetition_penalty": -1}, r"repetition_penalty must be a number in \[0.01, 10\], got"),
        ({"repetition_penalty": 5e-324}, r"repetition_penalty must .* in \[0.01, 10\], got 5e-324"),
        ({"repetition_penalty": 1e300}, r"repetition_penalty must .* in \[0.01, 10\], got 1e\+300"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be a number in \[-2, 2\], got 2.1"),
        ({"frequency_penalty": "1"}, r"frequency_penalty must be a number .*, got '1'"),
        ({"logit_bias": [(1, 2)]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {"1": 2}}, r"a token id in logit_bias must be an integer .* got '1'"),
        ({"logit_bias": {1: 101}}, r"logit_bias of token 1 must be a number in \[-100, 100\]"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias of token 1 must be a number .* got inf"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "at most 1024 tokens, got 1025"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be an integer .* got -1"),
        ({"min_new_tokens": 1.0}, "min_new_tokens must be an integer"),
        (
            {"min_new_tokens": 9, "max_new_tokens": 8},
            "min_new_tokens 9 is above max_new_tokens 8",
        ),
        ({"bad_words_ids": "no"}, "bad_words_ids must be a tuple of sequences of ids, got 'no'"),
        ({"bad_words_ids": [3]}, "bad_words_ids must be a tuple of ids, got 3"),
        ({"bad_words_ids": [()]}, "bad_words_ids has a sequence without tokens"),
        ({"suppress_tokens": {3}}, "suppress_tokens must be a tuple of ids"),
        ({"begin_suppress_tokens": [-1]}, "begin_suppress_tokens must be an integer .* got -1"),
        ({"structured": "json"}, "structured must be a specpool.Grammar or None, got 'json'"),
    ],
)
def test_bad_parameters(fields, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {259: 1}},
        {"stop_token_ids": [259]},
        {"suppress_tokens": [3, 259]},
        {"begin_suppress_tokens": [259]},
        {"bad_words_ids": [[3], [4, 259]]},
    ],
)
def test_a_token_beyond_the_vocabulary_is_refused_and_nothing_is_queued(target, fields):
    engine = plain(target)
    (name,) = fields
    with pytest.raises(
        ConfigError, match=rf"prompt 0 has 259 (in|among) its {name}, .* \[0, 259\)"
    ):
        engine.generate([[1, 2]], SamplingParams(**fields))
    assert engine.stats().num_waiting == 0


def test_bans_that_leave_no_token_end_their_request_alone(target):
    engine = plain(target)
    everything = SamplingParams(max_new_tokens=4, suppress_tokens=[*range(259)])
    one, other = engine.generate([[1, 2], [1, 2]], [everything, SamplingParams(max_new_tokens=4)])
    assert "are not finite, or the request's bans leave no token" in one.error
    assert other.error is None and other.token_ids


def test_texts_that_part_under_processors_cannot_be_judged(target):
    (prompt,) = prompts(1)
    engine = plain(target)
    one, other = (
        engine.generate([prompt], SamplingParams(max_new_tokens=9, logit_bias={120: value}))[0]
        for value in (50, -50)
    )
    assert engine.compare(one, one).verdict == "identical"
    with pytest.raises(ConfigError, match="cannot judge texts with a bias"):
        engine.compare(one, other)
