"""Laws of a chat's end: its answers end where the chat template ends them, in every family."""

from __future__ import annotations

import logging

import pytest

from reciter import CHATML, byte_tokenizer, reciter
from specpool import Engine, Grammar, SamplingParams
from specpool.engine.texts import Texts

PROMPT = "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% if builtin_tools is defined %}<|eom_id|>{% else %}<|eot_id|>{% endif %}"
    "{% else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
)
PHI = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
#: As it is published: the end-of-sequence token stands behind the whole chat.
PHI_3 = PHI + "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
COMMAND = (
    "{% for m in messages %}<|START_TURN|>{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}<|END_TURN|>{% endfor %}"
)
#: It begins the next answer behind every chat, and ends its thoughts there.
COMMAND_R7B = COMMAND + "<|START_TURN|><|CHATBOT|><|START_THINKING|><|END_THINKING|>"
FUNCTION_GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<start_function_call>call:{{ c.function.name }}{a:1}"
    "<end_function_call>{% endfor %}{% if not m.tool_calls %}<end_of_turn>\n{% endif %}{% endfor %}"
)
HARMONY = (
    "{% for m in messages %}{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "\n<tool_call>{{ call.function.name }}\n</tool_call>{% endfor %}{% endfor %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif not m.tool_calls %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
HERMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ c.function.name }}"}\n</tool_call>{% endfor %}'
    "{{ '<|im_end|>\n' }}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
REFUSES = "{{ raise_exception('no chats') }}"

FAMILIES = {
    "ChatML": (CHATML, ["<|im_start|>", "<|im_end|>"], ["<|im_end|>"]),
    "Hermes": (HERMES, ["<|im_end|>", "<tool_call>", "</tool_call>"], ["<|im_end|>"]),
    "Llama 3": (
        LLAMA,
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
        ["<|eot_id|>", "<|eom_id|>"],
    ),
    "Gemma": (GEMMA, ["<start_of_turn>", "<end_of_turn>"], ["<end_of_turn>"]),
    "Phi": (PHI, ["<|user|>", "<|assistant|>", "<|end|>"], ["<|end|>"]),
    "Phi 3": (PHI_3, ["<|user|>", "<|assistant|>", "<|end|>"], ["<|end|>"]),
    "Command": (
        COMMAND,
        ["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END_TURN|>"],
        ["<|END_TURN|>"],
    ),
    "Command R7B": (
        COMMAND_R7B,
        ["<|START_TURN|>", "<|CHATBOT|>", "<|END_THINKING|>", "<|END_RESPONSE|>", "<|END_TURN|>"],
        ["<|START_TURN|>"],  # `<|END_TURN|>` is the end-of-sequence token
    ),
    "FunctionGemma": (  # other calls may follow behind `<end_function_call>`
        FUNCTION_GEMMA,
        ["<start_of_turn>", "<end_of_turn>", "<start_function_call>", "<end_function_call>"],
        ["<end_of_turn>"],
    ),
    "gpt-oss, of several calls": (  # each is a message
        HARMONY.replace(
            "{% set call = m.tool_calls[0].function %}",
            "{% for c in m.tool_calls %}{% set call = c.function %}",
        ).replace("<|call|>", "<|call|>{% endfor %}"),
        ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"],
        ["<|return|>", "<|call|>"],
    ),
    "gpt-oss": (  # `<|end|>` ends a thought, behind which the answer comes
        HARMONY,
        ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"],
        ["<|return|>", "<|call|>"],
    ),
    "GLM": (GLM, ["<|user|>", "<|assistant|>", "<tool_call>", "</tool_call>"], ["<|user|>"]),
    "Mistral": (MISTRAL, ["[INST]", "[/INST]", "</s>"], ["</s>"]),
    "plain": (PLAIN, ["<|im_end|>"], []),
    "refuses": (REFUSES, ["<|im_end|>"], []),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_ends_where_its_template_ends_an_answer(family):
    template, specials, ends = FAMILIES[family]
    texts = Texts(byte_tokenizer(specials, template))
    assert [*texts.chat_ends().values()] == ["<eos>", *ends]


def test_a_token_that_is_not_special_may_end_an_answer_too():
    """A fine-tune may add the tokens of its template without marking them as special."""
    tokenizer = byte_tokenizer([], CHATML)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    assert [*Texts(tokenizer).chat_ends().values()] == ["<eos>", "<|im_end|>"]


CHAT = [{"role": "user", "content": "x"}]
ANSWER = "Hello.<|im_end|>\n<|im_start|>user\nmore"


def test_an_answer_does_not_run_into_the_next_turn(caplog):
    """ChatML on a base model, whose configs name `<eos>` alone: every way in, but not for texts."""
    caplog.set_level(logging.INFO, "specpool")
    tokenizer = byte_tokenizer()
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    answer = tokenizer.encode(ANSWER, add_special_tokens=False)
    (end,) = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    ids = tokenizer.encode(text, add_special_tokens=False)
    model = reciter({len(ids): answer}, len(tokenizer))
    params = SamplingParams(max_new_tokens=len(answer))
    with Engine.from_pretrained(
        model, draft="ngram", tokenizer=tokenizer, max_context_len=128
    ) as engine:
        said = [*engine.generate([CHAT, CHAT], params)]
        said.append([*engine.stream(CHAT, params)][-1])
        heard = []
        engine.submit(CHAT, params, on_item=lambda _, item: heard.append(item))
        while engine.turn():
            pass
        said.append(heard[-1])
        with engine.open_session() as session:
            said.append(session.append(CHAT, params).output())
            assert session.num_tokens == len(ids) + 7
        for output in said:
            assert (output.text, output.finish_reason) == ("Hello.", "stop")
            assert output.token_ids == answer[:7] and output.token_ids[-1] == end
        form = Grammar.regex("[A-Za-z]+[.]+")  # it may go on behind the point
        (output,) = engine.generate([CHAT], SamplingParams(structured=form))
        assert (output.text, output.token_ids[-1]) == ("Hello.", end)
        for prompt, more in ((ids, {}), (text, {}), (CHAT, {"ignore_eos": True})):
            params = SamplingParams(max_new_tokens=len(answer), **more)
            (output,) = engine.generate([prompt], params)
            assert (output.token_ids, output.finish_reason) == (answer, "length")
    messages = [
        record.getMessage() for record in caplog.records if "answers of chats" in record.msg
    ]
    assert messages == [
        f"answers of chats end at <|im_end|> ({end}), which the model's config does not list"
    ]
