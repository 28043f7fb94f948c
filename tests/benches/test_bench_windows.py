"""`python -m benches windows`: rows hold less, the text is the same; refusals are one line."""

from __future__ import annotations

import json

import pytest

from benches import windows as bench_windows
from benches.__main__ import main
from specpool.engine.memory.kv_cache import KVCache
from specpool.errors import CorruptState

SMALL = ("--window", "8", "--batch", "2", "--prompt", "12", "--tokens", "40", "--page-size", "4")


def bench(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["benches", "windows", *args])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, *capsys.readouterr()


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", ["0", "1"])
def test_rows_hold_their_windows(monkeypatch, capsys, depth):
    code, out, err = bench(monkeypatch, capsys, *SMALL, "--depth", depth, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["machine"]["transformers"]
    results = {result["name"]: result for result in found["results"]}
    share = {}
    for family, (_, slides) in bench_windows.FAMILIES.items():
        held = results[f"{family}: held per row"]
        share[family] = held["ratio"]
        num_full = 0 if slides is None else slides.count(False)
        # Of 52 tokens, a round ahead: 14 pages in full layers, most of them not held in others.
        assert num_full / 6 < held["ratio"] < num_full / 6 + 0.6 * (1 - num_full / 6)
        slots = results[f"{family}: slots of a window group"]
        assert 8 < slots["value"] <= slots["reference_value"] == 8 + 5 + int(depth) * 5 + 8
    assert share["mistral"] < share["gemma3"] < share["gemma2"]


def test_the_table_has_the_families_asked_for(monkeypatch, capsys):
    code, out, _ = bench(monkeypatch, capsys, *SMALL, "--family", "gemma2")
    assert code == 0 and "gemma2" in out and "mistral" not in out


def test_a_text_that_differs_is_no_figure(monkeypatch):
    load = bench_windows.Load(8, 1, 20, 60, 4, 0)
    pages_of = KVCache.pages_of

    def beyond(self, group, rows, least, ends):
        return pages_of(self, group, rows, least + 4 * (self.windows[group] is not None), ends)

    monkeypatch.setattr(KVCache, "pages_of", beyond)
    with pytest.raises(CorruptState, match="mistral: the texts with and without window groups"):
        bench_windows.measured("mistral", load)


def test_a_row_that_holds_more_than_its_window_is_no_figure(monkeypatch):
    load = bench_windows.Load(8, 1, 20, 60, 4, 0)
    monkeypatch.setattr(bench_windows.Load, "most_window_slots", 12)
    with pytest.raises(
        CorruptState, match=r"a row holds .* slots behind a window of 8, at most 12"
    ):
        bench_windows.measured("mistral", load)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--batch", "0"], "--batch must be an integer in [1, 1024], got 0"),
        (["--window", "0"], "--window must be an integer in [1, 4096], got 0"),
        (["--depth", "2"], "--depth must be an integer in [0, 1], got 2"),
        (
            ["--window", "512"],
            "a window of 512 hides nothing from 64 + 448 tokens",
        ),
        (
            ["--family", "llama"],
            "--family must be one of mistral, gemma2, gemma3, gpt_oss, got 'llama'",
        ),
    ],
)
def test_a_bad_option_is_one_line(monkeypatch, capsys, args, says):
    assert bench(monkeypatch, capsys, *args) == (2, "", f"error: {says}\n")
