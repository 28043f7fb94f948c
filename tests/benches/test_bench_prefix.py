"""`python -m benches prefix`: what it counts, and what it refuses."""

from __future__ import annotations

import json

import pytest

from benches import prefix
from benches.prefix import PAGE_SIZE, PlainTree, Trace, _least
from cli_kit import call


def test_the_json_has_what_is_computed_and_what_must_be(capsys, monkeypatch):
    """Law: with the cache fewer tokens are computed, and about as many as must be."""
    monkeypatch.setattr(prefix, "INDEXED", (800,))
    monkeypatch.setattr(prefix, "NUM_NEW", 4)
    options = ["--requests", "8", "--common", "60", "--repeats", "1", "--json"]
    code, out, _ = call(capsys, "benches", "prefix", *options)
    assert code == 0
    results = json.loads(out)["results"]
    of_common = [each for each in results if each["name"].startswith("8 requests")]
    off, least = [each for each in of_common if "computed" in each["name"]]
    assert off["value"] == least["value"] < off["reference_value"] / 2
    assert off["reference_value"] == 8 * 80
    assert least["reference_value"] <= least["value"] <= least["reference_value"] + 8
    alike = next(each for each in results if each["name"] == "random texts: tokens computed")
    assert alike["value"] <= alike["reference_value"]
    host = next(each for each in results if "pool for few of them: tokens" in each["name"])
    assert host["value"] < host["reference_value"] <= 16 * 60


def test_the_least_is_what_lies_behind_the_longest_beginning():
    rounds = [[[1, 2, 3], [1, 2, 4, 5]], [[1, 2, 4, 5], [9]]]
    assert _least(Trace("a trace", rounds)) == 3 + 2 + 1 + 1


def test_the_plain_tree_finds_whole_pages():
    tree, tokens = PlainTree(), list(range(3 * PAGE_SIZE))
    assert tree.insert(tokens, [1, 2, 3]) == 0
    assert tree.insert([*tokens[: 2 * PAGE_SIZE], 7], [8, 9]) == 2 * PAGE_SIZE
    assert tree.match(tokens[: 2 * PAGE_SIZE + 5]) == [1, 2]
    assert tree.match([5] * PAGE_SIZE) == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--requests", "7"], "requests must be an integer in [8,"),
        (["--common", "0"], "common must be an integer in [8,"),
        (["--repeats", "0"], "repeats must be an integer in [1,"),
        (["--shape", "3x"], "3x"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(capsys, options, why):
    code, _, err = call(capsys, "benches", "prefix", *options)
    assert code == 2 and why in err and len(err.splitlines()) == 1
