"""A class name means one thing in the whole package."""

from __future__ import annotations

from lab.house import duplicate_classes
from paths import ROOT


def test_no_class_name_occurs_twice():
    assert duplicate_classes(ROOT / "python" / "specpool") == {}
