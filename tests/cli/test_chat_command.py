"""Laws of `specpool chat`: it prints of each turn what the engine did, and loses nothing."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from cli_kit import call
from specpool.engine.assets import resolve
from specpool.engine.session import Turn
from specpool.engine.worker.worker import Worker

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FIGURES = re.compile(
    r"^\[(\d+) tokens, (\d+) not computed again; first token after ([\d.]+) ms; "
    r"(\d+) new tokens, \d+ tokens/s(?:, accept length ([\d.]+))?\]$",
    re.MULTILINE,
)


@pytest.fixture
def outputs(monkeypatch) -> list:
    """The outputs of all turns that ended, as the engine gave them."""
    ended = []
    original = Turn.__next__

    def spying(self):
        item = original(self)
        if not hasattr(item, "pieces"):
            ended.append(item)
        return item

    monkeypatch.setattr(Turn, "__next__", spying)
    return ended


def chat(capsys, *lines: str, options: tuple[str, ...] = ("-n", "12")) -> str:
    code, out, err = call(capsys, "chat", *options, stdin="".join(f"{line}\n" for line in lines))
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    return out


def figures(out: str) -> list[tuple[int, int, int]]:
    """Tokens, those not computed again, and new ones of each turn."""
    return [tuple(map(int, (m[1], m[2], m[4]))) for m in FIGURES.finditer(out)]  # type: ignore[misc]


def shown(output) -> tuple[int, int, int]:
    return len(output.prompt_ids), output.num_reused, len(output.token_ids)


def test_a_turn_goes_on_with_the_text_and_says_what_it_computed(capsys, outputs):
    out = chat(capsys, "seq: 2, 4, ", " and", "", "[min]")
    assert figures(out) == [shown(output) for output in outputs] and len(outputs) == 3
    text = ""
    for line, output in zip(("seq: 2, 4, ", " and", "[min]"), outputs, strict=True):
        text += line
        assert bytes(output.prompt_ids).decode() == text
        assert f"\n> {line.rstrip()}\n{output.text}\n[" in out
        text += output.text
    for before, output in itertools.pairwise(outputs):
        assert output.num_reused >= len(before.prompt_ids + before.token_ids) - 1
    accept_lens = [match[5] for match in FIGURES.finditer(out)]
    assert accept_lens == [f"{output.accept_len:.2f}" for output in outputs]
    assert out.count("no chat template") == 1


def test_the_template_and_the_system_message_are_used(capsys, outputs, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(resolve("specpool/tiny"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    options = ("--target", str(folder), "--draft", "none", "--system", "Be brief.", "-n", "5")
    out = chat(capsys, "one", "two", "/rewind 2", "three", options=options)
    assert "no chat template" not in out
    prompts = [bytes(output.prompt_ids).decode() for output in outputs]
    first = "<system>Be brief.<user>one<assistant>"
    assert prompts[0] == first
    assert prompts[1] == f"{first}{outputs[0].text}<user>two<assistant>"
    assert prompts[2] == "<system>Be brief.<user>three<assistant>"


def test_the_system_text_comes_first_without_a_template(capsys, outputs):
    chat(capsys, "one", "two", options=("--system", "Be brief.", "-n", "5"))
    assert bytes(outputs[0].prompt_ids).decode() == "Be brief.\none"
    assert bytes(outputs[1].prompt_ids).decode().count("Be brief.") == 1


def test_rewind_forgets_turns(capsys, outputs):
    out = chat(capsys, "seq: 2, 4, ", " and", "/rewind", " and", "/rewind 2", "[min]")
    first, second, again, anew = outputs
    end = len(first.prompt_ids + first.token_ids)
    num_kept = int(re.search(rf"turns left: 1; {end} tokens, (\d+) of them with KV\n", out)[1])
    assert end - 1 <= num_kept <= end
    assert again.prompt_ids == second.prompt_ids and again.token_ids == second.token_ids
    assert again.num_reused == num_kept
    assert "turns left: 0; 0 tokens, 0 of them with KV\n" in out
    assert bytes(anew.prompt_ids).decode() == "[min]"


def test_a_fork_goes_its_own_way(capsys, outputs):
    lines = ["seq: 2, 4, ", "/fork", "/switch 2", " one", "/switch 1", " two", "/stats"]
    out = chat(capsys, *lines)
    first, first_branch, second_branch = outputs
    assert "session 2 begins here" in out and "\n2> one\n" in out.replace("2>  one", "2> one")
    history = first.prompt_ids + first.token_ids
    assert first_branch.prompt_ids == history + list(
        b" one"
    ) and second_branch.prompt_ids == history + list(b" two")
    assert first_branch.num_reused > 0 and second_branch.num_reused > 0
    rows = [re.findall(r"[\w]+", line) for line in out.splitlines() if "idle" in line]
    assert [row[:5:2] for row in rows] == [
        ["1", str(len(second_branch.prompt_ids + second_branch.token_ids)), "2"],
        ["2", str(len(first_branch.prompt_ids + first_branch.token_ids)), "1"],
    ]
    assert rows[1][6] == str(first_branch.num_reused)
    assert rows[0][6] == str(first.num_reused + second_branch.num_reused)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/foo", "there is no command /foo: /help lists them"),
        ("/", "there is no command /: /help lists them"),
        ("/rewind x", "/rewind takes one number, got 'x'"),
        ("/rewind 1 1", "/rewind takes one number, got '1 1'"),
        ("/rewind -1", "/rewind takes one number, got '-1'"),
        ("/rewind 0", "cannot go 0 turns back: there are 1"),
        ("/rewind 2", "cannot go 2 turns back: there are 1"),
        ("/fork 1", "/fork takes nothing, got '1'"),
        ("/switch 2", "there is no session 2, but [1]"),
        ("/switch", "there is no session 0, but [1]"),
        ("/quit now", "/quit takes nothing, got 'now'"),
    ],
)
def test_a_bad_command_is_one_line_and_nothing_is_lost(capsys, outputs, line, says):
    out = chat(capsys, "seq: 2, 4, ", line, " and")
    assert f"\n> {line}\nerror: {says}\n> " in out
    first, second = outputs
    assert second.prompt_ids == first.prompt_ids + first.token_ids + list(b" and")


def test_help_lists_the_commands_and_quit_leaves(capsys, outputs):
    out = chat(capsys, "/help", "/quit", "seq: 2, 4, ")
    for command in ("/rewind [n]", "/fork", "/switch N", "/stats", "/help", "/quit"):
        assert f"\n{command} " in out
    assert outputs == []


@pytest.mark.parametrize("kind", ["signal", "exception"])
def test_ctrl_c_aborts_the_answer(capsys, monkeypatch, outputs, kind):
    """Law: the session's tokens and KV are as before the turn."""
    original, turns = Turn.__next__, []

    def interrupting(self):
        turns.append(self)
        if turns.count(self) == 2 and len(set(turns)) == 2:  # amid the second turn
            if kind == "exception":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    chat(capsys, "seq: 2, 4, ", " and")
    first, expected = outputs
    monkeypatch.setattr(Turn, "__next__", interrupting)
    out = chat(capsys, "seq: 2, 4, ", "/stats", "never mind", "/stats", " and")
    assert out.count("\naborted: the session is as before\n") == 1 and len(set(turns)) == 3
    after = outputs[-1]
    assert (after.prompt_ids, after.token_ids) == (expected.prompt_ids, expected.token_ids)
    assert after.num_reused == expected.num_reused > 0
    before, behind = (re.findall(r"\w+", line)[:5] for line in out.splitlines() if "idle" in line)
    assert before == behind and int(before[2]) == len(first.prompt_ids + first.token_ids)


def test_ctrl_c_in_a_forward_loses_the_kv_and_no_token(capsys, monkeypatch, outputs):
    """The second Ctrl-C: nothing is known of what ran, so the next turn computes it anew."""
    chat(capsys, "seq: 2, 4, ", " and")
    expected = outputs[-1]
    original, calls = Worker.run, []

    def interrupting(self, steps):
        calls.append(steps[0].requests[0])
        if len(set(calls)) == 2 and calls.count(calls[-1]) == 2:
            raise KeyboardInterrupt
        return original(self, steps)

    monkeypatch.setattr(Worker, "run", interrupting)
    out = chat(capsys, "seq: 2, 4, ", "never mind", " and")
    assert out.count("\naborted: the session is as before\n") == 1 and len(set(calls)) == 3
    after = outputs[-1]
    assert (after.prompt_ids, after.token_ids) == (expected.prompt_ids, expected.token_ids)


def test_ctrl_c_where_no_answer_runs_leaves(capsys, monkeypatch, outputs):
    from specpool.cli import chat as command

    def stopping(self, line):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.Talk, "hear", stopping)
    chat(capsys, "seq: 2, 4, ", "never said")
    assert outputs == []


def test_a_full_session_says_so_and_goes_on(capsys, outputs):
    options = ("--max-context-len", "40", "-n", "30")
    out = chat(capsys, "seq: 2, 4, ", "more", "/rewind", "seq: 1, 2, ", options=options)
    assert out.count("the session is full at 40 tokens: /rewind goes back\n") == 2
    assert (
        "error: the session has 40 tokens and gets 4; with one new token at least, its limit of 40 "
        "leaves room for 0; the session is as before, /rewind goes back\n" in out
    )
    first, second = outputs
    assert len(first.token_ids) == len(second.token_ids) == 29


def test_a_turn_that_fails_leaves_the_session(capsys, monkeypatch, outputs):
    from specpool.engine.models import TargetModel

    original, calls = TargetModel.forward, []

    def failing(self, *args, **options):
        calls.append(1)
        if len(calls) == len_before[0]:
            raise RuntimeError("out of luck")
        return original(self, *args, **options)

    len_before = [0]
    monkeypatch.setattr(TargetModel, "forward", failing)
    chat(capsys, "seq: 2, 4, ")
    len_before[0] = len(calls) + 1
    calls.clear()
    out = chat(capsys, "seq: 2, 4, ", "never", "/rewind")
    assert "out of luck; the session is as before\n" in out and "turns left: 0" in out


def test_bad_options_are_one_line(capsys):
    for options, says in (
        (["--temperature", "-1"], "temperature must be a number in [0, 10000], got -1.0"),
        (["--threads", "0"], "threads must be an integer in [1, 1024], got 0"),
        (["--page-size", "0"], "--page-size must be an integer in [1, 1048576], got 0"),
        (["--target", "/nowhere"], "/nowhere"),
    ):
        code, out, err = call(capsys, "chat", *options, stdin="")
        assert (code, out) == (2, "") and err.startswith("error: ") and says in err
        assert err.count("\n") == 1


def test_a_target_without_a_tokenizer_is_refused(capsys, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(resolve("specpool/tiny"), folder)
    for path in Path(folder).glob("*token*"):
        path.unlink()
    options = ("--target", str(folder), "--draft", "none")
    code, _, err = call(capsys, "chat", *options, stdin="hello\n")
    assert (code, err) == (2, "error: the target has no tokenizer: there is no text to talk in\n")


def test_a_closed_standard_input_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    code, _, err = call(capsys, "chat")
    assert (code, err) == (2, "error: standard input is closed: chat reads its lines from there\n")
