"""Laws of a request's fields: each has its effect, is named as ignored, or is refused."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from pydantic import ValidationError
from test_bridge import READY, done
from test_scripted_engine import Scripted
from tokenizers import processors

from reciter import CHATML, byte_tokenizer
from specpool.engine.sampling_params import TRUNCATIONS, SamplingParams
from specpool.engine.scheduler.request import TokenLogprob
from specpool.fields import declared
from specpool.serve.api.choice import Delta
from specpool.serve.api.errors import ApiError
from specpool.serve.api.requests import ChatRequest, CompletionRequest, GenerationBody
from specpool.serve.api.sampling import check_supported, params_of
from specpool.serve.bridge.messages import Accepted, Submit, Tokens
from specpool.serve.routes.chat import ChatForm, _unread, _variables

CHAT = {"messages": [{"role": "user", "content": "x"}], "temperature": 0.5}
TEXT = {"prompt": "ab", "temperature": 0.5}

#: The fields of vLLM's and SGLang's requests beside OpenAI's, as their `protocol.py` have them.
VLLM = """add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt
chat_template chat_template_kwargs continue_final_message documents echo ec_transfer_params
guided_choice guided_decoding_backend guided_grammar guided_json guided_json_object guided_regex
guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output
kv_transfer_params length_penalty logprob_token_ids media_io_kwargs min_p min_tokens
mm_processor_kwargs priority prompt_embeds prompt_logprobs repetition_detection
repetition_penalty request_id return_mm_kwargs return_prompt_text return_token_ids
return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id
skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval
structural_tag structured_outputs thinking_token_budget top_k truncate_prompt_tokens
truncation_side use_beam_search vllm_xargs watermarking""".split()
SGLANG = """bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs
continue_final_message custom_labels custom_logit_processor custom_params data_parallel_rank
disagg_prefill_dp_rank ebnf extra_key ignore_eos images_config input_ids json_schema lora_path
max_dynamic_patch min_dynamic_patch min_p min_tokens ngram_corpus_id no_stop_trim priority
reasoning regex repetition_penalty return_cached_tokens_details return_hidden_states
return_meta_info return_prompt_token_ids return_routed_experts return_token_ids rid
routed_dp_rank routed_experts_start_len separate_reasoning session_id session_params
skip_special_tokens stop_regex stop_token_ids stream_reasoning task top_k
use_audio_in_video""".split()

#: A value that asks for something, where "x" would have the wrong type or be what is done anyway.
VALUES: dict[str, Any] = {
    "add_generation_prompt": False, "add_special_tokens": True, "allowed_token_ids": [5],
    "bad_words": ["a"], "best_of": 3, "chat_template_kwargs": {"a": 1},
    "continue_final_message": True, "documents": [{"title": "a", "text": "b"}], "echo": True,
    "frequency_penalty": 1, "function_call": "auto", "functions": [{"name": "f"}],
    "guided_choice": ["a"], "guided_json_object": True, "ignore_eos": True,
    "include_drafts": True, "include_stop_str_in_output": True, "input_ids": [1],
    "length_penalty": 2.0, "logit_bias": {"5": 1}, "logprobs": True, "json_schema": "{}",
    "guided_json": {}, "max_completion_tokens": 5, "max_tokens": 5, "max_draft_steps": 1,
    "min_p": 0.5, "min_tokens": 3, "modalities": ["audio"], "n": 2, "no_stop_trim": True,
    "parallel_tool_calls": False, "presence_penalty": 1, "priority": 3, "prompt_logprobs": 1,
    "reasoning_effort": "low", "repetition_penalty": 2.0,
    "response_format": {"type": "json_object"}, "seed": 7, "session_offset": 3,
    "skip_special_tokens": False, "stop_token_ids": [5],
    "stream": True, "stream_options": {"include_usage": True},
    "structured_outputs": {"regex": "a"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "none", "top_k": 5, "top_logprobs": 3, "top_p": 0.5, "tpot_ms": 5,
    "truncate_prompt_tokens": 5, "use_beam_search": True, "watermarking": True, "store": True,
    "ebnf": 'root ::= "a"', "guided_grammar": 'root ::= "a"',
}  # fmt: skip

#: Fields whose effect is outside of the sampling parameters and the template's variables; other
#: tests of this folder show it.
ELSEWHERE = {
    *("model", "messages", "prompt", "stream", "stream_options", "priority", "session_id"),
    *("session_offset", "include_drafts", "logprobs", "top_logprobs", "tools", "tool_choice"),
    *("max_tokens", "max_completion_tokens", "echo", "best_of"),
    *("add_special_tokens", "parallel_tool_calls"),  # below
}


def openai_fields(module: Any) -> set[str]:
    base = module.CompletionCreateParamsBase
    return {*get_type_hints(base)} | {*module.CompletionCreateParamsStreaming.__annotations__}


def outcome(
    model: type[GenerationBody], body: dict[str, Any], template: str
) -> tuple[Any, list[str]]:
    """What a body means, and which fields are named; an `ApiError` if it is refused."""
    request = model.model_validate(body)
    names = check_supported(request, *(["suffix"] if model is CompletionRequest else []))
    variables: dict[str, Any] = {}
    if isinstance(request, ChatRequest):
        variables, names = _variables(request), names + _unread(request, template)
    params = params_of(request, 16, None, 1.0)
    return (params, variables), names


KINDS = [
    (ChatRequest, CHAT, openai_fields(chats)),
    (CompletionRequest, TEXT, openai_fields(completions)),
]


@pytest.mark.parametrize(("model", "body", "names"), KINDS, ids=["chat", "completion"])
def test_no_field_of_openai_vllm_or_sglang_is_dropped_in_silence(model, body, names):
    template = "{{ reasoning_effort }} {{ documents }}"
    plain, nothing = outcome(model, body, template)
    assert not nothing
    dropped, seen = [], set()
    for name in sorted({*names, *VLLM, *SGLANG, *model.model_fields} - body.keys()):
        value = VALUES.get(name, "x")
        if name == "logprobs" and model is CompletionRequest:
            value = 2
        try:
            result, named = outcome(model, body | {name: value}, template)
        except ApiError as error:
            assert error.status == 400 and error.body["error"]["param"] == name
            assert name in error.body["error"]["message"]
            seen.add("refused")
            continue
        has_effect = result != plain or (name in ELSEWHERE and name in model.model_fields)
        seen.add("taken" if has_effect else "named")
        if not has_effect and name not in named:
            dropped.append(name)
    assert not dropped and seen == {"refused", "taken", "named"}


@pytest.mark.parametrize(("model", "body", "names"), KINDS, ids=["chat", "completion"])
def test_a_field_that_asks_for_nothing_is_not_named(model, body, names):
    """As clients send them that fill in every default."""
    harmless = dict.fromkeys({*names, *VLLM, *SGLANG} - body.keys() - {"messages", "prompt"})
    harmless |= {"store": False, "service_tier": "auto", "length_penalty": 1.0, "bad_words": []}
    harmless |= {"use_beam_search": False, "no_stop_trim": False, "regex": None}
    harmless |= {"structured_outputs": {"json": None}, "guided_json_object": False}
    harmless |= {"stream_options": {"include_usage": None, "continuous_usage_stats": None}}
    assert outcome(model, body | harmless, "") == outcome(model, body, "")


def json_object(schema):
    """A field as llama.cpp's and Together's clients send it."""
    return {"response_format": {"type": "json_object", "schema": schema}}


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"json_schema": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"json_schema": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"guided_json": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"guided_regex": "a"}, "regex", "a"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"guided_grammar": "start: A"}, "ebnf", "start: A"),
        ({"guided_json_object": True}, "json_object", ""),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "json_schema", "{}"),
        (json_object({}), "json_schema", '{"type": "object"}'),
        (json_object(True), "json_schema", '{"type": "object"}'),
        (json_object({"title": "a"}), "json_schema", '{"type": "object", "title": "a"}'),
        (json_object({"$ref": "#/a"}), "json_schema", '{"$ref": "#/a"}'),
        (json_object({"type": "array"}), "json_schema", '{"type": "array"}'),
        ({"response_format": {"type": "json_object", "schema": None}}, "json_object", ""),
    ],
)
def test_a_form_of_another_engine_is_a_form(given, kind, text):
    for model, body in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        form = params_of(model.model_validate(body | given), 16, None, 1.0).structured
        assert (form.kind, form.text) == (kind, text)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"json_schema": False}, "json_schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"json": False}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": "{}"}}, "response_format"),
        ({"response_format": {"json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": None, "schema": {}}}, "response_format"),
    ],
)
def test_a_form_that_is_not_there_is_never_free_text(given, param):
    for model, body in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        with pytest.raises(ApiError) as error:
            params_of(model.model_validate(body | given), 16, None, 1.0)
        assert error.value.status == 400 and error.value.body["error"]["param"] == param


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": [5]},
        {"bad_words": ["a"]},
        {"stop_regex": "a"},
        {"lora_path": "adapter"},
        {"use_beam_search": True},
        {"truncate_prompt_tokens": 4},
        {"structural_tag": "{}"},
        {"custom_logit_processor": "x"},
        {"functions": [{"name": "f"}]},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_field_that_would_change_the_text_is_not_ignored(given):
    for model, body in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        with pytest.raises(ApiError) as error:
            check_supported(model.model_validate(body | given))
        assert error.value.status == 400 and error.value.body["error"]["param"] in given


class Front(Scripted):
    """A front whose tokenizer has a chat template, and an engine that says given tokens."""

    async def answered(self, body, answer, path="/v1/chat/completions"):
        """Ask, and let the engine answer; returns what it was asked, and the choice."""
        count = sum(isinstance(message, Submit) for message in self.wire.said)
        task = self.begin(body, path=path)
        submit = (await self.said(Submit, count + 1))[-1]
        entries = [TokenLogprob(token, -1.0, {}) for token in answer]
        await self.wire.come(
            Accepted(submit.key),
            Tokens(submit.key, 0, answer, [False] * len(answer), entries),
            dataclasses.replace(done(submit.key), token_ids=answer),
        )
        status, found = await task
        assert status == 200
        return submit, found["choices"][0]


def fronted(test, template=CHATML):
    async def run():
        front = Front()
        await front.start()
        tokenizer = byte_tokenizer(chat_template=template)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 256)]
        )
        front.service.tokenizer = tokenizer
        front.client.ready = dataclasses.replace(
            READY, vocab_size=300, max_context_len=256, eos_token_ids=frozenset({257})
        )
        await asyncio.wait_for(test(front, tokenizer), 60)

    asyncio.run(run())


START, END = 259, 260


def test_an_answer_of_a_chat_ends_at_the_templates_end():
    async def test(front, tokenizer):
        for body, path, ends in (
            (CHAT, "/v1/chat/completions", (END,)),
            (CHAT | {"ignore_eos": True}, "/v1/chat/completions", ()),
            (CHAT | {"stop_token_ids": [END, 5]}, "/v1/chat/completions", (END, 5)),
            (TEXT, "/v1/completions", ()),
        ):
            submit, choice = await front.answered(body, [*b"ab", END], path)
            assert submit.params.stop_token_ids == ends
            assert (choice["message"]["content"] if "message" in choice else choice["text"]) == "ab"

    fronted(test)


def test_special_tokens_are_shown_if_asked_for_but_not_the_end():
    async def test(front, tokenizer):
        body = CHAT | {"skip_special_tokens": False, "logprobs": True}
        _, choice = await front.answered(body, [*b"ab", START, ord("c"), END])
        assert choice["message"]["content"] == "ab<|im_start|>c"
        assert len(choice["logprobs"]["content"]) == 5

    fronted(test)


def test_one_call_is_told_if_they_must_not_be_parallel():
    call = '{"name": "f", "arguments": {"a": 1}}'
    text = f"[{call}, {call}]"
    answer = [*text.encode()]
    body = CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}]}

    async def test(front, tokenizer):
        for value, num_calls in ((None, 2), (True, 2), (False, 1)):
            asked = body | {"parallel_tool_calls": value}
            _, choice = await front.answered(asked, answer)
            assert len(choice["message"]["tool_calls"]) == num_calls
            assert choice["finish_reason"] == "tool_calls"
            form = ChatForm(tokenizer, ChatRequest.model_validate(asked), 1)
            delta = Delta(text, pieces=[(text, False)], num_tokens=9)
            part = form.part(SimpleNamespace(index=0), delta)
            assert {delta_call["index"] for delta_call in part["delta"]["tool_calls"]} == {
                *range(num_calls)
            }

    fronted(test)


def test_fields_of_the_prompt_make_the_prompt():
    last = {"role": "assistant", "content": "so "}
    user = "<|im_start|>user\nx<|im_end|>\n"
    ask = "<|im_start|>assistant\n"

    async def test(front, tokenizer):
        for more, text in (
            ({}, user + ask),
            ({"add_generation_prompt": False}, user),
            ({"add_special_tokens": True}, f"<bos>{user}{ask}"),
            (
                {"messages": [*CHAT["messages"], last], "continue_final_message": True},
                user + ask + "so ",
            ),
        ):
            submit, _ = await front.answered(CHAT | more, [*b"ab", END])
            assert tokenizer.decode(submit.prompt) == text
        for more, text in (({}, "<bos>ab"), ({"add_special_tokens": False}, "ab")):
            submit, _ = await front.answered(TEXT | more, [*b"ab"], "/v1/completions")
            assert tokenizer.decode(submit.prompt) == text
        both = {"add_generation_prompt": True, "continue_final_message": True}
        assert (await front.ask(CHAT | both, "/v1/chat/completions"))[0] == 400

    fronted(test)


def test_the_effort_of_reasoning_reaches_the_template():
    template = "{{ reasoning_effort }} {{ enable_thinking }} {{ documents[0].title }} {{ z }}"

    async def test(front, tokenizer):
        more = {"documents": [{"title": "t"}], "chat_template_kwargs": {"z": 1}}
        for effort, text in (("low", "low True t 1"), ("none", "none False t 1")):
            body = CHAT | more | {"reasoning_effort": effort}
            submit, _ = await front.answered(body, [*b"ab"])
            assert tokenizer.decode(submit.prompt) == text
        body["chat_template_kwargs"] = {"enable_thinking": 5}
        submit, _ = await front.answered(body, [*b"ab"])
        assert tokenizer.decode(submit.prompt) == "none 5 t "

    fronted(test, template)


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ messages }} {{ enable_thinking }}"])
def test_a_field_that_the_template_does_not_read_is_named(template):
    body = CHAT | {"reasoning_effort": "low", "documents": [], "parallel_tool_calls": False}
    named = outcome(ChatRequest, body, template)[1]
    assert ("reasoning_effort" in named) == ("enable_thinking" not in template)
    assert {"documents", "parallel_tool_calls"} <= {*named}


def test_a_field_that_would_stand_between_the_turns_of_a_session_is_refused():
    async def test(front, tokenizer):
        for name in ("add_special_tokens", "add_generation_prompt", "continue_final_message"):
            status, answer = await front.ask(
                CHAT | {name: False, "session_offset": 0},
                "/v1/chat/completions",
                **{"x-session-id": "a"},
            )
            assert (status, answer["error"]["param"]) == (400, name)

    fronted(test)


LIMITS = {field.name: field.within for field in declared(SamplingParams)}
#: OpenAI's limit of temperature is lower; a seed may be negative, and top_k -1 means all.
OWN_LIMITS = {"temperature", "seed", "top_k"}
SAME_LIMITS = [
    *(
        (name, name)
        for name in GenerationBody.model_fields
        if LIMITS.get(name) is not None and name not in OWN_LIMITS
    ),
    ("max_tokens", "max_new_tokens"),
    ("min_tokens", "min_new_tokens"),
]


@pytest.mark.parametrize(("name", "engine_name"), SAME_LIMITS)
def test_a_number_has_the_limits_that_python_and_the_command_line_have(name, engine_name):
    limits = LIMITS[engine_name]
    for value in (limits.minimum, limits.maximum):
        assert getattr(CompletionRequest.model_validate(TEXT | {name: value}), name) == value
    for value in (limits.minimum - 1, limits.maximum + 1):
        with pytest.raises(ValidationError, match=r"greater than or equal|less than or equal"):
            CompletionRequest.model_validate(TEXT | {name: value})


def test_a_field_of_the_same_name_is_passed_on():
    """Law: nobody has to name a shared field twice."""
    values = {name: VALUES[name] for name in ("min_p", "top_p", "tpot_ms", "max_draft_steps")}
    params = params_of(CompletionRequest.model_validate(TEXT | values), 16, None, 1.0)
    assert {name: getattr(params, name) for name in values} == values
    greedy = params_of(
        CompletionRequest.model_validate(TEXT | values | {"top_k": 5, "temperature": 0}),
        16,
        None,
        1.0,
    )
    assert {getattr(greedy, name) for name in TRUNCATIONS} == {None}
