"""The parts of an answer: calls within a text, log probabilities, the page of `/metrics`."""

from __future__ import annotations

import json
import random
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paths import ROOT
from specpool import Engine, SamplingParams
from specpool.serve.api.requests import ChatRequest
from specpool.serve.api.tool_calls import ToolCalls
from specpool.serve.api.tool_formats import FORMATS, formats_of
from specpool.serve.counters import Counters
from specpool.serve.exposition import accepted_per_position, exposition

ASK = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": name}} for name in ("f", "g")],
}
CALL = '{"name": "f", "arguments": {"a": [1, "}"]}}'


def read(text, size=1, formats=FORMATS, **more):
    """Push a text in parts; returns content and calls. The deltas of calls make up the calls."""
    tools = ToolCalls(ChatRequest.model_validate(ASK | more), formats)
    parts = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    content, all_deltas = "", []
    for number, part in enumerate(parts):
        new, deltas = tools.push(part, number == len(parts) - 1)
        content += new
        for delta in deltas:
            if delta["index"] == len(all_deltas):
                all_deltas.append({**delta, "function": dict(delta["function"])})
            else:
                assert set(delta) == {"index", "function"}
                all_deltas[delta["index"]]["function"]["arguments"] += delta["function"][
                    "arguments"
                ]
    assert all_deltas == [{"index": i, **call} for i, call in enumerate(tools.calls)]
    return content, [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in tools.calls
    ]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain text", "plain text", []),
        ("", "", []),
        (CALL, "", [("f", {"a": [1, "}"]})]),
        (f"  {CALL}\n", "", [("f", {"a": [1, "}"]})]),
        (f"<tool_call>{CALL}</tool_call>", "", [("f", {"a": [1, "}"]})]),
        (
            f'Well.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{{"name": "g"}}</tool_call>',
            "Well.",
            [("f", {"a": [1, "}"]}), ("g", {})],
        ),
        ('{"name": "g", "parameters": {"b": 2}}', "", [("g", {"b": 2})]),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        ('{"a": 1}', '{"a": 1}', []),
        ("{broken", "{broken", []),
        ("1 < 2 <tool", "1 < 2 <tool", []),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        # Mistral
        (f"[TOOL_CALLS][{CALL}]", "", [("f", {"a": [1, "}"]})]),
        (f"So: [TOOL_CALLS] [{CALL}, {CALL}]", "So:", [("f", {"a": [1, "}"]})] * 2),
        (
            '[TOOL_CALLS]g[ARGS]{"x": "]"}[TOOL_CALLS]f[CALL_ID]a1[ARGS]{}',
            "",
            [("g", {"x": "]"}), ("f", {})],
        ),
        ("[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]other[ARGS]{}", []),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
        ("[TOOL", "[TOOL", []),
        # Llama 3
        (
            '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": {}}}',
            "",
            [("f", {"a": {}})],
        ),
        (f"{CALL}; {CALL}", "", [("f", {"a": [1, "}"]})] * 2),
        # A list alone, OpenAI's own form, other orders, arguments as a text
        (f"[{CALL}]", "", [("f", {"a": [1, "}"]})]),
        ("[1, 2] is a list", "[1, 2] is a list", []),
        (f'{{"type": "function", "function": {CALL}}}', "", [("f", {"a": [1, "}"]})]),
        ('{"arguments": {"b": 1}, "name": "f"}', "", [("f", {"b": 1})]),
        ('{"name": "f", "arguments": "{\\"b\\": 1}"}', "", [("f", {"b": 1})]),
        (
            '{"name": "f", "arguments": {"b": "\\"}"}, "id": "a}"} and text',
            " and text",
            [("f", {"b": '"}'})],
        ),
        (f"<tool_call>{CALL}</tool_call> Done.", " Done.", [("f", {"a": [1, "}"]})]),
        ("a [b] {c} <|d|>", "a [b] {c} <|d|>", []),
    ],
)
def test_calls_are_found_however_the_text_is_cut(text, content, calls, size):
    assert read(text, size) == (content, calls)


def test_arguments_are_told_as_they_come():
    tools = ToolCalls(ChatRequest.model_validate(ASK))
    assert tools.push('<tool_call>{"name": "f", "arguments": ', False) == ("", [])
    (first,) = tools.push('{"a": ', False)[1]
    assert first["function"] == {"name": "f", "arguments": '{"a": '} and first["id"]
    assert tools.push("1", False)[1] == [{"index": 0, "function": {"arguments": "1"}}]
    assert tools.push("}}", False)[1] == [{"index": 0, "function": {"arguments": "}"}}]
    assert tools.push("</tool_call>", True) == ("", [])
    assert tools.finish_reason == "tool_calls"


def test_the_template_says_how_calls_are_marked():
    def marks(template):
        return {mark for form in formats_of(template) for mark in form.marks}

    assert marks("{% if tools %}<tool_call>{% endif %}") == {"<tool_call>"}
    assert marks("[TOOL_CALLS]") == {"[TOOL_CALLS]"}
    assert marks({"default": "", "tool_use": "<|tool_call|>"}) == {"<|tool_call|>"}
    assert formats_of(None) == formats_of("{{ messages }}") == FORMATS
    text, mistral = f"[TOOL_CALLS][{CALL}]", formats_of("[TOOL_CALLS]")
    assert read(text, 5, mistral)[1] and not read("a" + text, 5, formats_of("<tool_call>"))[1]


@pytest.mark.parametrize("seed", range(50))
def test_no_cut_of_a_text_changes_what_is_found(seed):
    """Texts of random pieces, in random parts: the same content and calls as in one part."""
    rng = random.Random(seed)
    marks = [mark for form in FORMATS for mark in form.marks]
    pieces = [CALL, "{", "}", "[", "]", '"', "\\", ", ", "; ", "text", *marks, "</tool_call>"]
    pieces += ['{"name": "g"}', "f[ARGS]", "{}", "\n", '{"name": "f", "arguments": {']
    text = "".join(rng.choices(pieces, k=rng.randrange(1, 9)))

    def found(sizes):
        tools, content, rest = ToolCalls(ChatRequest.model_validate(ASK)), "", text
        while rest:
            size = next(sizes)
            content += tools.push(rest[:size], len(rest) <= size)[0]
            rest = rest[size:]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in tools.calls]
        if not calls:
            assert content == text
        return content, calls

    whole = found(iter([len(text)]))
    for _ in range(10):
        assert found(iter(lambda: rng.randrange(1, 6), None)) == whole


def test_without_tools_a_call_is_text():
    assert read(CALL, 5, tool_choice="none") == (CALL, [])


def test_a_forced_function_has_the_text_for_its_arguments():
    choice = {"type": "function", "function": {"name": "g"}}
    assert read('{"b": 1}', 2, tool_choice=choice) == ("", [("g", {"b": 1})])


def test_vllms_names_have_the_engines_numbers():
    """Law: drafts, accepted drafts and those by position add up as the statistics do."""
    with Engine.from_pretrained(draft="specpool/tiny-eagle", max_context_len=256) as engine:
        engine.generate(["seq: 2, 4, ", "def "], SamplingParams(max_new_tokens=40))
        stats = engine.stats()
    text, kind = exposition(Counters("toy"), stats)
    assert kind.startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            position = sample.labels.get("position", "")
            values[sample.name + position] = sample.value
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == "toy"
    assert values["vllm:spec_decode_num_drafts_total"] == stats.drafted_round_ct
    assert values["vllm:spec_decode_num_draft_tokens_total"] == stats.draft_ct
    accepted = values["vllm:spec_decode_num_accepted_tokens_total"]
    by_position = [
        values[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{i}"] for i in (0, 1, 2)
    ]
    assert accepted == stats.correct_draft_ct == sum(by_position) > 0
    assert by_position == sorted(by_position, reverse=True)
    assert values["specpool_group_pages"] and values["vllm:prefix_cache_queries_total"]


def test_accepted_by_position():
    """Three rounds of one token, two of three, one of four: bonus included."""
    assert accepted_per_position((0, 3, 0, 2, 1)) == [3, 3, 1]
    assert accepted_per_position((0, 5)) == []


def test_the_dashboard_asks_for_metrics_that_are_there():
    board = json.loads((ROOT / "docs" / "serve" / "grafana.json").read_text())
    with Engine.from_pretrained(
        draft="specpool/tiny-eagle", max_context_len=64, adaptive="ema"
    ) as engine:
        text = exposition(Counters("toy"), engine.stats())[0].decode()
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    for panel in board["panels"]:
        for target in panel["targets"]:
            for name in re.findall(r"(?:vllm:|specpool_)\w+", target["expr"]):
                exported = {name, name.removesuffix("_bucket"), name.removesuffix("_total")} & names
                assert exported, f"{panel['title']}: {name}"
