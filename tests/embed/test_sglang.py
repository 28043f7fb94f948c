"""The plug-in for SGLang. What needs SGLang itself is in the files `sglang_*cases.py`."""

from __future__ import annotations

import importlib.metadata
import random
from pathlib import Path

import numpy as np
import pytest

import specpool.plugins.sglang
from engine_kit import SECONDS, run, run_cases
from specpool.plugins.sglang import slots

#: Files whose runs are forked children: one process imports SGLang for them, and they share runs.
FORKED = [f"sglang_{cases}_cases.py" for cases in ("loop", "rows", "accelerator")]


@pytest.mark.timeout(SECONDS)
def test_on_sglang() -> None:
    # The last file of each group puts the plug-in into the process itself.
    groups = [*FORKED, "sglang_cases.py"], ["sglang_reserve_cases.py"]
    run_cases("sglang", *groups, imports=["sglang_loop"])


@pytest.mark.full
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("cases", FORKED)
def test_the_rest_on_sglang(cases: str) -> None:
    run_cases("sglang", [cases], chosen="full")


@pytest.mark.full
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("release", ["0.5.20", "0.5.21", "0.5.22"])
def test_level_rows_on_an_older_sglang(release: str) -> None:
    """The laws; the rest of that file names what one release does with one seed."""
    laws = ["sglangs_loop_runs_on_the_ledger", "the_laws_fail_without_one_guard"]
    cases = [f"sglang_rows_cases.py::test_{law}" for law in laws]
    run_cases("sglang", cases, imports=["sglang_loop"], release=release)


@pytest.mark.full
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("tree_core", ["rust", "python"])
def test_on_each_of_sglangs_tree_cores(tree_core: str) -> None:
    """The one in Rust is SGLang's default, and needs a newer torch than the other tests have."""
    groups = [[f"sglang_{cases}_cases.py"] for cases in ("loop", "rows")]
    run_cases("sglang", *groups, imports=["sglang_loop"], tree_core=tree_core)


def test_sglang_finds_the_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="specpool")
    assert entry.load() is specpool.plugins.sglang.register


def test_without_the_setting_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, specpool.plugins.sglang as s; s.register(); "
        "print(sorted({'torch', 'sglang'} & set(sys.modules)))"
    )
    done = run("-c", code)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"SPECPOOL_SGLANG": "page"},
            "SPECPOOL_SGLANG='page' is not one of off, pages, reserve, rows",
        ),
        (
            {"SPECPOOL_SGLANG": "pages", "SPECPOOL_SGLANG_DRIFT": "x"},
            "SPECPOOL_SGLANG_DRIFT='x' is not one of own, exit",
        ),
        ({"SPECPOOL_SGLANG": "pages", "SPECPOOL_SGLANG_DRIFT": "exit"}, "SGLang is not as known: "),
    ],
)
def test_a_wrong_setting_and_an_unknown_sglang_end_the_process(
    settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")  # an SGLang without any of the names
    code = "import specpool.plugins.sglang as s; s.register(); print('served')"
    done = run("-c", code, PYTHONPATH=str(tmp_path), **settings)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_sglang_keeps_its_own_allocator(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    code = "import specpool.plugins.sglang as s; s.register(); print('served')"
    done = run("-c", code, PYTHONPATH=str(tmp_path), SPECPOOL_SGLANG="pages")
    assert done.stdout.strip() == "served"
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("specpool: SGLang's own allocator serves: ")


@pytest.mark.parametrize("seed", range(50))
def test_slots_of_requests_that_grow_token_by_token(seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 3, 16])
    prefix = [rng.randint(0, 3 * page_size) for _ in range(rng.randint(0, 9))]
    seq = [n + rng.choice([0, 1, rng.randint(0, 4 * page_size)]) for n in prefix]
    last = [1000 * page_size + n - 1 for n in prefix]
    counts = slots.new_pages(np.array(prefix, np.int64), np.array(seq, np.int64), page_size)
    pages = np.array(rng.sample(range(1, 500), int(counts.sum())), np.int64)
    left, expected = iter(pages.tolist()), []
    for begin, end, slot in zip(prefix, seq, last, strict=True):
        for position in range(begin, end):
            slot = next(left) * page_size if position % page_size == 0 else slot + 1
            expected.append(slot)
    assert next(left, None) is None
    arrays = [np.array(ints, np.int64) for ints in (prefix, seq, last)]
    assert slots.of_extension(*arrays, counts, pages, page_size).tolist() == expected
    by_page = [page * page_size + at for page in pages.tolist() for at in range(page_size)]
    assert slots.of_pages(pages, page_size).tolist() == by_page


def test_the_slot_of_one_more_token() -> None:
    opens = np.array([False, True, False, True])
    found = slots.of_next_token(np.array([7, 11, 20, 3]), opens, np.array([40, 36]))
    assert found.tolist() == [8, 40, 21, 36]
