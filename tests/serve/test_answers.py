"""The parts of an answer: calls within a text, log probabilities, the page of `/metrics`."""

from __future__ import annotations

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paths import ROOT
from specpool import Engine, SamplingParams
from specpool.serve.api.requests import ChatRequest
from specpool.serve.api.tool_calls import ToolCalls
from specpool.serve.counters import Counters
from specpool.serve.exposition import accepted_per_position, exposition

ASK = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": name}} for name in ("f", "g")],
}
CALL = '{"name": "f", "arguments": {"a": [1, "}"]}}'


def read(text, size=1, **more):
    """Push a text in parts; returns content and calls."""
    tools = ToolCalls(ChatRequest.model_validate(ASK | more))
    parts = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    content = ""
    for number, part in enumerate(parts):
        content += tools.push(part, number == len(parts) - 1)[0]
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
    ],
)
def test_calls_are_found_however_the_text_is_cut(text, content, calls, size):
    assert read(text, size) == (content, calls)


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
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            position = sample.labels.get("position", "")
            found[sample.name + position] = sample.value
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == "toy"
    assert found["vllm:spec_decode_num_drafts_total"] == stats.drafted_round_ct
    assert found["vllm:spec_decode_num_draft_tokens_total"] == stats.draft_ct
    accepted = found["vllm:spec_decode_num_accepted_tokens_total"]
    by_position = [
        found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{i}"] for i in (0, 1, 2)
    ]
    assert accepted == stats.correct_draft_ct == sum(by_position) > 0
    assert by_position == sorted(by_position, reverse=True)
    assert found["specpool_group_pages"] and found["vllm:prefix_cache_queries_total"]


def test_accepted_by_position():
    """Three rounds of one token, two of three, one of four: bonus included."""
    assert accepted_per_position((0, 3, 0, 2, 1)) == [3, 3, 1]
    assert accepted_per_position((0, 5)) == []


def test_the_dashboard_asks_for_metrics_that_are_there():
    board = json.loads((ROOT / "docs" / "serve" / "grafana.json").read_text())
    with Engine.from_pretrained(max_context_len=64) as engine:
        text = exposition(Counters("toy"), engine.stats())[0].decode()
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    for panel in board["panels"]:
        for target in panel["targets"]:
            for name in re.findall(r"(?:vllm:|specpool_)\w+", target["expr"]):
                found = {name, name.removesuffix("_bucket"), name.removesuffix("_total")} & names
                assert found, f"{panel['title']}: {name}"
