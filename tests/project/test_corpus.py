"""The synthetic corpus is the same, byte for byte, for ever: prompts and weights depend on it."""

from __future__ import annotations

import hashlib

import pytest

from specpool.engine.assets.corpus import corpus, prompts
from specpool.errors import ConfigError


@pytest.mark.parametrize(
    ("seed", "num_bytes", "digest"),
    [
        (0, 3_000_000, "111d439070f666c112b231133e949eb12b1117a7a308a25338b635d002fc0ba0"),
        (1, 100_000, "965e125a67c0c5ff79037f4be886fcc013be959ee329860f041de8dc9d49937a"),
        (7, 60_000, "502aa64bec39cfaedb04ae29a53a0e0fdb2c564401c0da3d2c1e443635adc0ac"),
    ],
)
def test_the_corpus_never_changes(seed: int, num_bytes: int, digest: str) -> None:
    assert hashlib.sha256(corpus(seed, num_bytes)).hexdigest() == digest


def test_a_longer_corpus_continues_a_shorter_one() -> None:
    assert corpus(3, 0) == b""
    assert corpus(3, 500)[:123] == corpus(3, 123)


def test_prompts_are_spaced_slices_of_the_held_out_text() -> None:
    text = corpus(7, 60_000)
    assert prompts(24) == [list(text[i * 2000 : i * 2000 + 128]) for i in range(24)]
    assert prompts(2, length=5) == [list(text[:5]), list(text[2000:2005])]
    assert prompts(0) == []


@pytest.mark.parametrize(("n", "length"), [(-1, 128), (1, 0), (1, 2001)])
def test_prompts_that_cannot_be_are_refused(n: int, length: int) -> None:
    with pytest.raises(ConfigError, match=f"n={n}, length={length}"):
        prompts(n, length)
