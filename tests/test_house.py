"""The package stays small: `python tests/house.py` prints the measures, which have limits here."""

from __future__ import annotations

import statistics

import house


def test_no_file_grows_beyond_a_few_hundred_lines():
    lines = house.file_lines()
    assert max(lines.values()) <= 450, max(lines, key=lines.__getitem__)
    assert statistics.median(lines.values()) <= 120


def test_no_function_is_longer_than_a_screen():
    """Without the docstring, the options of commands included."""
    lines = house.function_lines()
    assert max(lines.values()) <= 60, max(lines, key=lines.__getitem__)
