"""Laws of further options of `specpool generate`: each reaches the engine and its output."""

from __future__ import annotations

import json
import shutil

import pytest

from cli_kit import call
from specpool.assets import corpus, resolve
from specpool.cli.generate import generate
from specpool.worker.worker import Worker

PROMPT = "seq: 1, 2, 3,"
JSON = ("generate", "--json", "-p", PROMPT, "-n", "24")


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
    args = [arg for arg in JSON if arg != "--json"]
    code, out, err = call(capsys, *args, *options)
    assert code == 0, err
    plain = out.replace("\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}", "")
    plain = plain.replace("\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}", "")
    at = 0
    for output in expected:
        at = plain.index(f" prompt {output['index'] + 1}, sample {output['sample'] + 1} ", at)
        heading_end = plain.index("\n", at) + 1
        prompt = [PROMPT, "[min]"][output["index"]] if output["sample"] == 0 else ""
        assert plain[heading_end:].startswith(prompt + output["text"])


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
        (found,) = outputs(capsys, *options)
        assert texts is None or found["text"] in texts, options
    plain = outputs(capsys)
    for options in (
        ["--repetition-penalty", "1.7"],
        ["--presence-penalty", "2"],
        ["--frequency-penalty", "1.5"],
    ):
        assert outputs(capsys, *options)[0]["text"] != plain[0]["text"], options
    assert outputs(capsys, "--temperature", "1.4", "--min-p", "1")[0]["text"] == plain[0]["text"]
    assert json.loads(call(capsys, *JSON, "--json-object")[1])["outputs"][0]["text"][0] == "{"


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
    """One line gives the verdict and the dtype, one line each text; the exit code is 0."""
    options = ["-n", "60", "--dtype", "bfloat16"]
    for prompt in corpus.prompts(12):
        options += ["-p", bytes(prompt).decode()]
    code, out, err = call(capsys, "generate", "--json", *options)
    assert code == 0 and not err
    report = json.loads(out)
    assert report["same_as_plain"] and not report["identical_to_plain"]
    apart = [each for each in report["comparisons"] if each["verdict"] == "rounding"]
    assert apart and all(
        each["line"].startswith("same up to bfloat16 rounding: token ") for each in apart
    )
    monkeypatch.setattr(generate, "MOST_RUNS", 1)
    code, out, err = call(capsys, "generate", *options)
    assert code == 0 and not err
    flat = " ".join(out.replace("│", " ").split())
    count = f"{len(apart)} of 12 texts differ"
    assert f"identical to plain decoding same up to bfloat16 rounding: {count}" in flat
    assert f"prompt {apart[0]['index'] + 1} token {apart[0]['num_same']} is " in flat
    assert "(one run)" in flat


def test_a_fault_is_told_and_exits_with_1(capsys, monkeypatch):
    """The planted fault: accepted KV stays where the tree had it."""
    monkeypatch.setattr(Worker, "_compact", lambda *args: None)
    options = ["-n", "48", "-p", PROMPT, "--shape", "3x2x6", "--dtype", "bfloat16"]
    code, out, err = call(capsys, "generate", *options)
    assert code == 1
    assert "NO: a fault in 1 of 1 texts" in " ".join(out.replace("│", " ").split())
    assert err.startswith("error: prompt 1: fault: token ")
    code, out, err = call(capsys, "generate", "--json", *options)
    assert code == 1 and err.startswith("error: prompt 1: fault: token ")
    assert json.loads(out)["same_as_plain"] is False
