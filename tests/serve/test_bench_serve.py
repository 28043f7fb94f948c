"""`specpool bench serve`: the seed decides the trace, and the figures are those of what came."""

from __future__ import annotations

import asyncio
import json
import math
from urllib.parse import urlsplit

import pytest

from cli_kit import call
from specpool import ConfigError
from specpool.cli.bench_serve.drive import How, RequestRecord, drive
from specpool.cli.bench_serve.figures import Slo, figures_of, percentile
from specpool.cli.bench_serve.http import Caller, CallFailed
from specpool.cli.bench_serve.trace import Item, of_file, synthetic, trace_of

SIZES = {"num_requests": 500, "max_tokens": 64}


def test_a_seed_is_a_trace():
    prompts = synthetic(40, 100, 3)
    assert prompts == synthetic(40, 100, 3) != synthetic(40, 100, 4)
    trace, same = (trace_of(prompts, rate=5.0, seed=1, **SIZES) for _ in range(2))
    assert trace == same != trace_of(prompts, rate=5.0, seed=2, **SIZES)
    assert {item.prompt for item in trace[:40]} == set(prompts)  # each before any comes twice
    assert all(32 <= item.max_tokens <= 96 for item in trace)
    assert all(50 <= len(prompt) <= 150 for prompt in prompts)


def test_arrivals_are_poissons():
    """Law: at rate r the gaps have the mean 1/r and the deviation 1/r; without a rate all are 0."""
    items = trace_of(["a"], rate=20.0, seed=1, num_requests=4000, max_tokens=1)
    times = [item.arrival for item in items]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 20, rel=0.08) and deviation == pytest.approx(mean, rel=0.08)
    assert {item.arrival for item in trace_of(["a"], rate=None, seed=1, **SIZES)} == {0.0}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt"}]}, {}]),
        json.dumps(
            [{"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "hi"}]}]
        ),
        '{"question_id": 1, "category": "a", "turns": ["hi", "more"]}\n\n',
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]}',
        '{"prompt": "hi"}\n{"prompt": "hi"}',
        '"hi"',
    ],
)
def test_files_of_others_are_read(tmp_path, text):
    path = tmp_path / "set"
    path.write_text(text)
    assert set(of_file(path)) == {"hi"}


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"a": 1}', "\x00", "[" * 5000])
def test_files_without_prompts_are_refused(tmp_path, text):
    path = tmp_path / "set"
    path.write_text(text)
    with pytest.raises(ConfigError, match="dataset: "):
        of_file(path)


def test_percentiles_are_values_of_the_sample():
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([7.0], 99) == 7 and math.isnan(percentile([], 50))


def test_figures_are_those_of_the_records():
    good = RequestRecord(due=1.0, first=1.1, last=2.1, parts=[0.5, 0.5], num_tokens=11)
    slow = RequestRecord(due=0.0, first=3.0, last=4.0, parts=[1.0], num_tokens=3)
    bad = RequestRecord(due=0.0, error="cut")
    alone = [RequestRecord(due=0.0, first=0.05, last=0.55, parts=[0.1], num_tokens=6)]
    figures = figures_of([good, slow, bad], 10.0, alone, 1.0, Slo(200.0, 150.0), 2.5)
    value = {result.name: result.value for result in figures}
    assert value["TTFT p50"] == pytest.approx(100) and value["TTFT p99"] == pytest.approx(3000)
    assert value["TPOT p50"] == pytest.approx(100) and value["TPOT p99"] == pytest.approx(500)
    assert value["ITL p95"] == pytest.approx(1000) and value["E2E p50"] == pytest.approx(1100)
    assert value["output"] == pytest.approx(1.4) and value["requests"] == pytest.approx(0.2)
    assert value["goodput"] == pytest.approx(0.1) and value["failed"] == 1
    assert value["accept length"] == 2.5
    (first,) = [result for result in figures if result.name == "TTFT p50"]
    assert first.reference_value == pytest.approx(50) and first.ratio == pytest.approx(2)


HOW = How(None, chat=True, temperature=0.0, seed=0, ignore_eos=True)


def run(server, items, **options):
    async def work():
        caller = Caller(urlsplit(server.url), None)
        try:
            return await drive(caller, items, HOW, **options)
        finally:
            caller.close()

    return asyncio.run(work())


def test_a_closed_loop_and_a_poisson_process(server):
    items = [Item(f"seq: {n}, ", 12, 0.01 * n) for n in range(12)]
    for concurrency in (3, None):
        records, seconds = run(server, items, concurrency=concurrency, seconds=60)
        assert [record.error for record in records] == [None] * 12
        assert all(record.num_tokens == 12 for record in records)
        assert all(record.due <= record.first <= record.last <= seconds for record in records)


def test_what_has_not_ended_in_time_is_given_up(server):
    items = [Item("seq: 1, ", 240, 0.0)] * 20
    records, _ = run(server, items, concurrency=2, seconds=0.3)
    assert any("time was over" in (r.error or "") for r in records)
    assert len(records) < 20


def test_an_error_is_counted(server):
    records, _ = run(server, [Item("a" * 400, 4, 0.0)], concurrency=1, seconds=60)
    assert "400" in records[0].error and "leaves room" in records[0].error


def test_a_stream_that_is_cut_is_no_answer():
    async def work(content):
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(content)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        caller = Caller(urlsplit(f"http://127.0.0.1:{port}"), None)
        try:
            return [event async for event in caller.events("/", None)]
        finally:
            server.close()

    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    event = b'10\r\ndata: {"a": 1}\n\n\r\n'
    done = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    failure = b'16\r\ndata: {"error": "x"}\n\n\r\n0\r\n\r\n'
    assert asyncio.run(work(head + event + done)) == [{"a": 1}]
    for content, why in (
        (head + event, "cut"),
        (head + event + b"0\r\n\r\n", "without"),
        (head + event + failure, "an error in the stream"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\nno", "500: no"),
        (b"", "cut"),
    ):
        with pytest.raises(CallFailed, match=why):
            asyncio.run(work(content))


def test_the_command_prints_one_object(server, capsys, monkeypatch):
    code, out, err = call(
        capsys,
        *("bench", "serve", "--url", f"{server.url}/v1", "--requests", "8", "--concurrency", "4"),
        *("--max-tokens", "8", "--prompt-characters", "40", "--slo-ttft", "60000", "--json"),
    )
    assert code == 0, err
    report = json.loads(out)
    value = {result["name"]: result["value"] for result in report["results"]}
    assert set(report) == {"machine", "results"} and value["failed"] == 0
    assert value["goodput"] == value["requests"] > 0 and value["accept length"] > 1
    assert {"TTFT p50", "TPOT p95", "ITL p99", "E2E p50", "output"} <= set(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "http://example.com"], "another machine"),
        (["--url", "ftp://127.0.0.1"], "--url must begin with http"),
        (["--url", "http://127.0.0.1:99999"], "127.0.0.1:99999' is no address: Port out of"),
        (["--url", "http://[::1"], "--url: 'http://[::1' is no address: Invalid IPv6 URL"),
        (["--url", "http://127.0.0.1:1"], "no connection"),
        (["--rate", "1", "--concurrency", "2"], "both say"),
        (["--rate", "-1"], "--rate must be above 0"),
        (["--seconds", "nan"], "--seconds must be above 0"),
        (["--requests", "0"], "--requests must be an integer in [1, "),
        (["--dataset", "/no/such"], "--dataset: /no/such cannot be read"),
        (["--target", "/no/such"], "no model at '/no/such'"),
        (["--target", ""], "the name of a model is empty"),
        (["--draft", ""], "the name of a model is empty"),
        (["--model", ""], "--model is empty"),
        (["--url", "http://127.0.0.1:1", "--draft", "ngram"], "--draft ngram is of a server that"),
    ],
)
def test_wrong_options_are_refused_at_once(capsys, options, message):
    code, _, err = call(capsys, "bench", "serve", *options)
    assert code == 2 and message in err and len(err.splitlines()) == 1
