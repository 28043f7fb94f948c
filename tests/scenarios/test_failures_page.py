"""`docs/failures.md` names every test of a known failure, and no test that does not exist."""

from __future__ import annotations

import re

from paths import ROOT, TESTS

PAGE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")


def written() -> dict[str, set[int]]:
    """Each test of a known failure in the suite, and the numbers in its name."""
    tests: dict[str, set[int]] = {}
    names = re.compile(r"^def (test_scenario_(\d\d(?:_and_\d\d)*)_\w+)\(", re.MULTILINE)
    for path in TESTS.rglob("test_*.py"):
        for name, numbers in names.findall(path.read_text()):
            tests[name] = {int(number) for number in numbers.split("_and_")}
    return tests


def listed() -> dict[str, set[int]]:
    """Each test that the page names, and the rows in which it stands."""
    rows: dict[str, set[int]] = {}
    for number, line in re.findall(r"^\| (\d+) \|(.*)$", PAGE, re.MULTILINE):
        for name in re.findall(r"`(test_\w+)`", line):
            rows.setdefault(name, set()).add(int(number))
    return rows


def test_the_page_and_the_tests_agree():
    tests, page = written(), listed()
    assert len(tests) > 100
    gone = page.keys() - tests.keys()
    assert not gone, f"docs/failures.md names tests that do not exist: {sorted(gone)}"
    for name, numbers in tests.items():
        if name in page:
            assert page[name] == numbers, f"{name} stands in rows {sorted(page[name])}"
    # A failure's tests on the device may stand beside its tests on the host without being named.
    numbers = set().union(*tests.values())
    assert numbers == set().union(*page.values()), "a failure with tests names none"


def test_every_failure_has_its_row_once():
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)]
    assert rows == list(range(1, 88))
    untested = {n for n in rows if not any(n in numbers for numbers in listed().values())}
    assert untested == {38}, "it cannot happen here"
