"""The `openai` client, as people use it: what it gets is what the engine says."""

from __future__ import annotations

import threading
import time

import openai
import pytest

from specpool import Engine, SamplingParams, Shape

PROMPT = "seq: 2, 4, 6, "


@pytest.fixture(scope="module")
def engine():
    """The same models and pages, without a server."""
    with Engine.from_pretrained(
        draft="specpool/tiny-eagle", page_size=4, max_context_len=256
    ) as engine:
        yield engine


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        yield client


def alone(name: str) -> dict[str, str]:
    """Options of a request that shares no KV with other tests: a shared prefix may draft worse."""
    return {"cache_salt": name}


def said(engine, prompt, **options):
    (output,) = engine.generate(prompt, SamplingParams(**options))
    return output


def test_a_completion_is_what_the_engine_says(client, engine):
    answer = client.completions.create(
        model="specpool/tiny",
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        extra_body=alone("completion"),
    )
    expected = said(engine, PROMPT, max_new_tokens=24)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 24)
    details = answer.usage.completion_tokens_details
    accepted = sum(expected.from_draft)
    assert details.accepted_prediction_tokens == accepted > 0
    assert details.rejected_prediction_tokens == expected.num_drafts - accepted


def test_a_stream_is_the_same_text_in_parts(client, engine):
    params = {"max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "seed": 7}
    stream = client.completions.create(
        model="specpool/tiny",
        prompt=PROMPT,
        stream=True,
        stream_options={"include_usage": True},
        **params,
    )
    parts = list(stream)
    expected = said(engine, PROMPT, max_new_tokens=40, temperature=0.8, top_p=0.9, seed=7)
    texts = [part.choices[0].text for part in parts if part.choices]
    assert "".join(texts) == expected.text and len(texts) > 4
    assert [part.usage for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].usage.completion_tokens == 40 and parts[-1].choices == []


def test_a_chat_streams_and_does_not(client, engine):
    messages = [
        {"role": "system", "content": "seq:"},
        {"role": "user", "content": [{"type": "text", "text": "3, 6, "}]},
    ]
    params = {"model": "specpool/tiny", "messages": messages, "temperature": 0}
    whole = client.chat.completions.create(max_completion_tokens=20, **params)
    expected = said(engine, "seq:\n3, 6, \n", max_new_tokens=20)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    parts = list(client.chat.completions.create(max_tokens=20, stream=True, **params))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.text
    assert parts[-1].choices[0].finish_reason == "length"


def test_samples_and_prompts_have_places_of_their_own(client, engine):
    params = {"model": "specpool/tiny", "max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 2}
    answer = client.completions.create(prompt=[PROMPT, "def get_"], **params)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for prompt, choices in ((PROMPT, answer.choices[:2]), ("def get_", answer.choices[2:])):
        expected = engine.generate(
            prompt, SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, n=2)
        )
        assert [choice.text for choice in choices] == [output.text for output in expected]
    texts = {0: "", 1: ""}
    for part in client.completions.create(prompt=PROMPT, stream=True, **params):
        texts[part.choices[0].index] += part.choices[0].text
    assert [*texts.values()] == [choice.text for choice in answer.choices[:2]]


def test_a_stop_string_ends_a_text_in_a_stream_too(client, engine):
    expected = said(engine, PROMPT, max_new_tokens=60, stop=(", 1", "\n"))
    for stop in ([", 1", "\n"], None):
        params = {"model": "specpool/tiny", "prompt": PROMPT, "max_tokens": 60, "temperature": 0}
        params["stop"] = stop or ", 1"
        answer = client.completions.create(**params)
        text = "".join(p.choices[0].text for p in client.completions.create(stream=True, **params))
        assert answer.choices[0].text == text
        assert answer.choices[0].finish_reason == "stop"
        if stop:
            assert text == expected.text


def test_log_probabilities_are_those_of_the_engine(client, engine):
    expected = said(engine, PROMPT, max_new_tokens=8, logprobs=3)
    chat = client.chat.completions.create(
        model="specpool/tiny",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    entries = chat.choices[0].logprobs.content
    assert len(entries) == 8 and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert "".join(entry.token for entry in entries) == chat.choices[0].message.content
    assert bytes(b for entry in entries for b in entry.bytes).decode() == "".join(
        entry.token for entry in entries
    )
    params = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 3}
    text = client.completions.create(model="specpool/tiny", **params)
    logprobs = text.choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx(
        [e.logprob for e in expected.logprobs], abs=1e-4
    )
    assert [len(top) for top in logprobs.top_logprobs] == [3] * 8
    assert logprobs.text_offset == list(range(8))
    parts = client.completions.create(model="specpool/tiny", stream=True, **params)
    streamed = [p.choices[0].logprobs for p in parts if p.choices[0].logprobs]
    assert [x for part in streamed for x in part.token_logprobs] == logprobs.token_logprobs
    assert [x for part in streamed for x in part.text_offset] == logprobs.text_offset


def test_tokens_may_be_the_prompt_and_an_echo_repeats_it(client, engine):
    params = {"model": "specpool/tiny", "max_tokens": 8, "temperature": 0, "echo": True}
    text = client.completions.create(prompt=PROMPT, **params).choices[0].text
    assert text == PROMPT + said(engine, PROMPT, max_new_tokens=8).text
    ids = [ord(character) for character in PROMPT]
    assert client.completions.create(prompt=ids, **params).choices[0].text == text
    parts = client.completions.create(prompt=[ids], stream=True, **params)
    assert "".join(part.choices[0].text for part in parts) == text


def test_a_repeated_prompt_is_cached(client):
    prompt = "a text that was never sent before, and is sent twice now"
    params = {"model": "specpool/tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    cached = [
        client.completions.create(**params).usage.prompt_tokens_details.cached_tokens
        for _ in range(2)
    ]
    assert cached[0] < 8 and cached[1] >= len(prompt) - 4


def test_plain_decoding_can_be_asked_for(client, engine):
    params = {"model": "specpool/tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    plain = client.completions.create(extra_body={"max_draft_steps": 0}, **params)
    (expected,) = engine.generate(PROMPT, SamplingParams(max_new_tokens=16), shape=Shape.none())
    assert plain.choices[0].text == expected.text
    details = plain.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == details.rejected_prediction_tokens == 0


def test_a_text_tells_how_its_drafts_went(client, engine):
    """Law: the histogram is that of the accept lengths, in vLLM's form; of several texts, none."""
    params = {
        "model": "specpool/tiny",
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": alone("metrics"),
    }
    metrics = client.completions.create(**params).metrics["speculative_decoding"]
    expected = said(engine, PROMPT, max_new_tokens=24)
    correct = [length - 1 for length in expected.accept_lens]
    assert metrics["acceptance_histogram"] == [correct.count(i) for i in range(4)]
    assert metrics["num_spec_steps"] == len(correct) and metrics["num_spec_tokens"] == 3
    assert metrics["num_accepted_draft_tokens"] == sum(correct)
    assert metrics["num_draft_tokens"] == expected.num_drafts
    assert metrics["mean_acceptance_length"] == pytest.approx(expected.accept_len)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.completions.create(**params, **options)
    assert last.metrics["speculative_decoding"] == metrics and last.choices == []
    assert not hasattr(client.completions.create(n=2, **params), "metrics")


def test_drafts_are_marked_when_asked_for(client, engine):
    stream = client.completions.create(
        model="specpool/tiny",
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        stream=True,
        extra_body={"include_drafts": True} | alone("drafts"),
    )
    pieces = [piece for part in stream for piece in getattr(part, "drafts", None) or []]
    expected = said(engine, PROMPT, max_new_tokens=24)
    assert "".join(text for text, _ in pieces) == expected.text
    flags = [flag for text, flag in pieces for _ in text]
    assert flags == expected.from_draft  # a token of the toy is a character


def test_models_are_listed(client):
    (model,) = client.models.list().data
    assert model.id == "specpool/tiny" and client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-5", prompt="a")
    assert error.value.code == "model_not_found"


def test_a_client_that_leaves_ends_its_request(client, server):
    before = server.metrics()["specpool_aborted_requests_total"]
    stream = client.completions.create(
        model="specpool/tiny", prompt=PROMPT, max_tokens=240, stream=True
    )
    next(iter(stream))
    stream.close()
    end = time.monotonic() + 120
    while server.metrics()["specpool_aborted_requests_total"] == before:
        assert time.monotonic() < end
        time.sleep(0.02)
    impatient = client.with_options(timeout=0.001, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(model="specpool/tiny", prompt=PROMPT, max_tokens=240)


def test_texts_of_many_clients_share_batches(client, server, engine):
    """Sixteen threads at once: each gets the text it would get alone."""
    before = server.metrics()
    prompts = [f"seq: {i}, {2 * i}, " for i in range(1, 17)]
    texts = {}

    def ask(prompt):
        answer = client.completions.create(
            model="specpool/tiny", prompt=prompt, max_tokens=32, temperature=0
        )
        texts[prompt] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = engine.generate(prompts, SamplingParams(max_new_tokens=32))
    assert texts == {p: o.text for p, o in zip(prompts, expected, strict=True)}
    after = server.metrics()
    rounds = after["specpool_rounds_total"] - before["specpool_rounds_total"]
    assert rounds < (after["specpool_row_rounds_total"] - before["specpool_row_rounds_total"]) / 2
