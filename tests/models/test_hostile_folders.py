"""Hostile folders by the hundred: each runs, or gets one error; nothing of it is executed.

`make test` takes a slice. SPECPOOL_HOSTILE=5000 takes as many of each kind as the number says.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostile import Hostile, Opened
from specpool import Engine, SamplingParams, SpecpoolError
from specpool.engine.config import EngineConfig
from specpool.engine.draft import EagleDrafter
from specpool.engine.models import TargetModel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")

NUM_CASES = int(os.environ.get("SPECPOOL_HOSTILE", "48"))
PER_TEST = 12
SEEDS = range(0, NUM_CASES, PER_TEST)
PARAMS = SamplingParams(max_new_tokens=3)
OPTIONS: dict[str, Any] = {"max_context_len": 48, "num_pages": 16}


@pytest.fixture(autouse=True)
def _guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse questions, bound memory and templates, and keep warnings from being errors."""
    import resource

    def asked(*args: object) -> str:
        raise AssertionError("a question on standard input")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr("specpool.engine.text.chat_template.MOST_SECONDS", 5.0)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), before[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def judge(case: Hostile, run: Any) -> None:
    """Run a case: the result must be a text, or one error of one line."""
    with Opened(case.secret) as opened:
        try:
            run()
        except SpecpoolError as error:
            text = str(error)
            assert "\n" not in text and len(text) < 2000, case.done
            assert "allocate" not in text and "MemoryError" not in text, (case.done, text)
        except BaseException as error:
            raise AssertionError(f"{case.done}: {type(error).__name__}: {error!s:.300}") from error
        assert not opened.names(), case.done
    assert not case.mark.exists(), case.done


def generate(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    outputs = engine.generate([[1, 2, 3]] if tokenizer is None else ["a 1, b"], PARAMS)
    if getattr(tokenizer, "chat_template", None):
        try:
            outputs += engine.generate([{"role": "user", "content": "a"}], PARAMS)
        except SpecpoolError as error:  # by the limit on what a template may take
            assert "the chat template refuses" in str(error) or "tokens" in str(error)
    for output in outputs:
        assert output.token_ids or output.error, output


@pytest.mark.sample(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", SEEDS)
def test_a_hostile_target_runs_or_is_one_error(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + PER_TEST):
        root = tmp_path / str(seed)
        case = Hostile(root, seed)

        def run(case: Hostile = case) -> None:
            with Engine.from_pretrained(case.folder, **OPTIONS) as engine:
                generate(engine)

        judge(case, run)
        shutil.rmtree(root)


@pytest.mark.sample(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", SEEDS)
def test_a_hostile_head_runs_or_is_one_error(
    first: int, target: TargetModel, tmp_path: Path
) -> None:
    for seed in range(first, first + PER_TEST):
        root = tmp_path / str(seed)
        case = Hostile(root, seed, ["specpool/tiny-eagle", "specpool/tiny-eagle3"][seed % 2])

        def run(case: Hostile = case) -> None:
            drafter = EagleDrafter.from_pretrained(case.folder, target)
            engine = Engine(target, drafter, config=EngineConfig(**OPTIONS))
            (output,) = engine.generate([[1, 2, 3]], PARAMS)
            assert output.token_ids and not output.error, output

        judge(case, run)
        shutil.rmtree(root)
