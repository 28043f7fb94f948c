"""Laws of the progress bar: it shows on a terminal for long work; elsewhere only on request."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator

import pytest

from specpool import ConfigError, Engine, SamplingParams
from specpool.engine import progress
from specpool.engine.assets import corpus

PROMPTS = corpus.prompts(3, 30)
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(draft="specpool/tiny-eagle", max_context_len=128) as engine:
        yield engine


def a_terminal(monkeypatch) -> Terminal:
    # In the test itself: pytest puts its own stream in place behind every fixture.
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def shown(text: str) -> list[tuple[str, str]]:
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return re.findall(r"(\d+/\d+ requests).*? (\d+ tokens)", plain)


def test_long_work_on_a_terminal_shows_a_bar(engine, monkeypatch):
    terminal = a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "LONG", 0.0)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN", 0.0)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [len(output.token_ids) for output in outputs] == [12] * 3
    steps = shown(terminal.getvalue())
    assert len(steps) > 3 and steps[-1] == ("3/3 requests", "36 tokens")
    counts = [int(tokens.split()[0]) for _, tokens in steps]
    assert counts == sorted(counts) and counts[0] < 36


def test_short_work_shows_none(engine, monkeypatch):
    terminal = a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "LONG", 60.0)
    engine.generate(PROMPTS, PARAMS)
    assert terminal.getvalue() == ""


def test_it_shows_none_where_it_is_unwanted(engine, monkeypatch):
    terminal = a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "LONG", 0.0)
    engine.generate(PROMPTS, PARAMS, progress=False)
    assert terminal.getvalue() == ""


def test_elsewhere_only_where_it_is_wanted(engine, monkeypatch):
    monkeypatch.setattr(progress, "LONG", 0.0)
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    engine.generate(PROMPTS, PARAMS)
    assert pipe.getvalue() == ""
    engine.generate(PROMPTS, PARAMS, progress=True)
    assert shown(pipe.getvalue())[-1] == ("3/3 requests", "36 tokens")


def test_an_interrupt_leaves_the_terminal_in_order(engine, monkeypatch):
    """The bar hides the cursor: it comes back."""
    terminal = a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN", 0.0)
    forward, calls = engine.core.worker.run, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(engine.core.worker, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS, progress=True)
    text = terminal.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_without_rich(engine, monkeypatch):
    terminal = a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "LONG", 0.0)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert len(engine.generate(PROMPTS, PARAMS)) == 3
    assert terminal.getvalue() == ""
    with pytest.raises(ConfigError, match=r"needs rich: pip install 'specpool\[hf\]'"):
        engine.generate(PROMPTS, PARAMS, progress=True)


def test_a_wish_that_is_none_is_refused(engine):
    with pytest.raises(ConfigError, match="progress must be True, False or None, got 1"):
        engine.generate(PROMPTS, PARAMS, progress=1)
