"""Laws of further options of `specpool generate`: each reaches the engine and its output."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from cli_kit import call
from specpool import Engine
from specpool.cli.generate import generate
from specpool.engine.assets import corpus, resolve
from specpool.engine.worker.draft_round import DraftRound

PROMPT = "seq: 1, 2, 3,"
JSON = ("generate", "--json", "--compare", "-p", PROMPT, "-n", "24")


def outputs(capsys, *options: str) -> list[dict]:
    code, out, err = call(capsys, *JSON, *options)
    assert code == 0, err
    report = json.loads(out)
    assert report["identical_to_plain"] and not report["errors"]
    return report["outputs"]


def test_samples_are_printed_one_after_the_other(capsys):
    """Each sample is printed in full under its own heading, as in the JSON."""
    options = ["--samples", "3", "--temperature", "1", "-p", "[min]", "--overlap-depth", "1"]
    expected = outputs(capsys, *options)
    places = [(o["index"], o["sample"]) for o in expected]
    assert places == [(i, s) for i in range(2) for s in range(3)]
    assert [o["seed"] for o in expected] == [0, 1, 2] * 2
    assert len({o["text"] for o in expected}) > 3
    code, out, err = call(capsys, "generate", "-p", PROMPT, "-n", "24", *options)
    assert code == 0, err
    at = 0
    for output in expected:
        number = output["index"] + 1
        if output["sample"] == 0:
            at = out.index(f" prompt {number} ", at)
            assert out[out.index("\n", at) + 1 :].startswith(f"{[PROMPT, '[min]'][number - 1]}\n")
        at = out.index(f" answer {number}, sample {output['sample'] + 1} ", at)
        assert out[out.index("\n", at) + 1 :].startswith(output["text"])


def test_a_stop_string_ends_the_text(capsys):
    (whole,) = outputs(capsys)
    stop = whole["text"][9:11]
    (cut,) = outputs(capsys, "--stop", stop, "--stop", "never")
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"


def test_forms_penalties_and_biases_reach_the_engine(capsys, tmp_path):
    schema, rules = tmp_path / "schema.json", tmp_path / "rules.gbnf"
    schema.write_text('{"enum": ["alpha", "beta"]}')
    rules.write_text('root ::= "a" [bc] "d"')
    for options, texts in (
        (["--json-schema", str(schema)], ['"alpha"', '"beta"']),
        (["--grammar", str(rules)], ["abd", "acd"]),
        (["--regex", "[0-9]{2}x"], [f"{i:02}x" for i in range(100)]),
        (["--choice", "yes", "--choice", "no"], ["yes", "no"]),
        (["--logit-bias", "120:100", "-n", "5"], ["xxxxx"]),
        (["--logit-bias", "120:9", "--logit-bias", "121:9", "--frequency-penalty", "2"], None),
    ):
        (output,) = outputs(capsys, *options)
        assert texts is None or output["text"] in texts, options
    plain = outputs(capsys)
    for options in (
        ["--repetition-penalty", "1.7"],
        ["--presence-penalty", "2"],
        ["--frequency-penalty", "1.5"],
    ):
        assert outputs(capsys, *options)[0]["text"] != plain[0]["text"], options
    assert outputs(capsys, "--temperature", "1.4", "--min-p", "1")[0]["text"] == plain[0]["text"]
    assert json.loads(call(capsys, *JSON, "--json-object")[1])["outputs"][0]["text"][0] == "{"


def test_nothing_is_decoded_plainly_unless_asked(capsys, monkeypatch):
    """Law: `generate` generates once; `--compare` adds the plain runs and the table."""
    shapes = []
    stream = Engine.stream
    monkeypatch.setattr(
        Engine,
        "stream",
        lambda self, *args, shape=None: shapes.append(shape) or stream(self, *args, shape=shape),
    )
    code, out, err = call(capsys, "generate", "-p", PROMPT, "-n", "24")
    assert code == 0 and shapes == [None]
    (expected,) = outputs(capsys)
    text = out[out.index("\n", out.index("answer 1")) + 1 :]
    assert text == f"{expected['text']}\n"  # as it is: no marks, no table
    assert re.fullmatch(
        r"24 tokens, [\d.]+ a round in \d+ rounds, \d+ tokens/s in one run, "
        r"1 of 1 cut at -n 24\n",
        err,
    )
    assert (
        json.loads(call(capsys, *(word for word in JSON if word != "--compare"))[1])[
            "identical_to_plain"
        ]
        is None
    )


def test_outputs_are_written_as_they_are_complete(capsys, tmp_path):
    """Law: `--out` has what `--json` has, a line each, and never loses a file."""
    path = tmp_path / "out.jsonl"
    options = ["--samples", "2", "--temperature", "1", "-p", "[min]", "--logprobs", "2"]
    expected = outputs(capsys, *options)
    args = ["generate", "-p", PROMPT, "-n", "24", *options, "--out", str(path)]
    code, out, err = call(capsys, *args)
    assert code == 0, err
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines.sort(key=lambda line: (line["index"], line["sample"]))
    timed = {"queue_seconds", "first_token_seconds", "seconds"}
    for line, output in zip(lines, expected, strict=True):
        assert line.pop("prompt") == [PROMPT, "[min]"][output["index"]]
        assert [line[k] for k in output if k not in timed] == [
            output[k] for k in output if k not in timed
        ]
        assert len(line["logprobs"]) == len(line["token_ids"])
    before = path.read_bytes()
    code, out, err = call(capsys, *args)
    assert (code, out) == (
        2,
        "",
    ) and err == f"error: {path} exists: give --force to write over it\n"
    assert path.read_bytes() == before
    assert call(capsys, *args, "--force", "-n", "3")[0] == 0
    assert all(len(json.loads(line)["token_ids"]) == 3 for line in path.read_text().splitlines())


def test_log_probabilities_are_listed(capsys):
    """Law: a line a token, with its log probability and the likeliest tokens, likeliest first."""
    (output,) = outputs(capsys, "--logprobs", "2")
    code, out, err = call(capsys, "generate", "-p", PROMPT, "-n", "24", "--logprobs", "2")
    assert code == 0, err
    lines = out[out.index("log probability of each token") :].splitlines()[1:]
    assert len(lines) == len(output["token_ids"]) == 24
    for line, token, entry in zip(lines, output["token_ids"], output["logprobs"], strict=True):
        first, second = entry["top"].values()
        assert first >= second and line.startswith(f"{entry['logprob']:9.3f}  {chr(token)!r}")
        assert line.endswith(f"{second:.3f}") and line.count(f"{first:.3f}") >= 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_ends_the_run_with_one_line(capsys):
    args = ["generate", "-p", PROMPT, "-n", "4", "--out", "/dev/full", "--force"]
    code, _, err = call(capsys, *args)
    assert (code, err) == (2, "error: cannot write /dev/full: No space left on device\n")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        ["--overlap-depth", "1"],
        ["--prefill-tokens", "3"],
        ["--prefill-tokens", "3", "--mixed-chunks"],
        ["--busy-check", "2", "--overlap-depth", "1"],
    ],
)
def test_options_of_the_loop_change_no_text(capsys, options):
    (text,), (same,) = outputs(capsys), outputs(capsys, *options)
    assert same["token_ids"] == text["token_ids"]


def test_a_prompt_may_be_a_users_message(capsys, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(resolve("specpool/tiny"), folder)
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"
    (folder / "chat_template.jinja").write_text(template)
    (output,) = outputs(capsys, "--target", str(folder), "--draft", "ngram", "--chat")
    assert bytes(output["prompt_ids"]).decode() == f"<user>{PROMPT}<answer>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chat"], "the tokenizer has no chat template"),
        (["--samples", "0"], "--samples must be an integer in [1, 65536], got 0"),
        (["--overlap-depth", "2"], "--overlap-depth must be an integer in [0, 1], got 2"),
        (["--prefill-tokens", "0"], "--prefill-tokens must be"),
        (["--busy-check", "3"], "--busy-check must be an integer in [0, 2], got 3"),
        (["--stop", ""], "stop must hold strings that are not empty"),
        (["a text"], "extra argument(s) (a text): give a prompt with --prompt or -p, as in -p 't"),
    ],
)
def test_bad_options_are_refused(capsys, options, message):
    code, out, err = call(capsys, *JSON, *options)
    assert (code, out) == (2, "") and message in err


def test_the_environment_sets_the_busy_check(capsys, monkeypatch):
    monkeypatch.setenv("SPECPOOL_BUSY_CHECK", "often")
    code, _, err = call(capsys, *JSON)
    assert code == 2 and "SPECPOOL_BUSY_CHECK must be 0, 1 or 2, got 'often'" in err
    outputs(capsys, "--busy-check", "1")  # asked for: the variable does not count


def test_texts_that_rounding_parts_are_the_same(capsys, monkeypatch):
    """One line gives the verdict and the dtype, one line each text; the exit code is 0.

    A fifth of the texts differ; which ones, depends on the processor. The table tells of the runs
    that the JSON tells of, which take seconds.
    """
    timed, results = generate.timed, {}

    def once(engine, prompts, *args, shape=None, **callbacks):
        key = len(prompts), shape
        if key not in results:
            results[key] = timed(engine, prompts, *args, shape=shape, **callbacks)
        return results[key]

    monkeypatch.setattr(generate, "timed", once)
    options = ["-n", "60", "--dtype", "bfloat16"]
    for prompt in corpus.prompts(24):
        options += ["-p", bytes(prompt).decode()]
    code, out, err = call(capsys, "generate", "--json", "--compare", *options)
    assert code == 0 and not err
    report = json.loads(out)
    assert report["same_as_plain"] and not report["identical_to_plain"]
    apart = [
        comparison for comparison in report["comparisons"] if comparison["verdict"] == "rounding"
    ]
    assert apart and all(
        comparison["line"].startswith("same up to bfloat16 rounding: token ")
        for comparison in apart
    )
    code, out, err = call(capsys, "generate", "--compare", *options, runs=2)
    assert code == 0 and not err
    flat = " ".join(out.replace("│", " ").split())
    count = f"{len(apart)} of 24 texts differ"
    assert f"identical to plain decoding same up to bfloat16 rounding: {count}" in flat
    assert f"prompt {apart[0]['index'] + 1} token {apart[0]['num_same']} is " in flat
    assert flat.count(", 2 runs)") == 2  # a speed has a range


def test_a_fault_is_told_and_exits_with_1(capsys, monkeypatch):
    """The planted fault: accepted KV stays where the tree had it."""
    monkeypatch.setattr(DraftRound, "_compact", lambda *args: None)
    options = ["-n", "48", "-p", PROMPT, "--shape", "3x2x6", "--dtype", "bfloat16"]
    code, out, err = call(capsys, "generate", "--compare", *options)
    assert code == 1
    assert "NO: a fault in 1 of 1 texts" in " ".join(out.replace("│", " ").split())
    assert err.startswith("error: prompt 1: fault: token ")
    code, out, err = call(capsys, "generate", "--json", "--compare", *options)
    assert code == 1 and err.startswith("error: prompt 1: fault: token ")
    assert json.loads(out)["same_as_plain"] is False
