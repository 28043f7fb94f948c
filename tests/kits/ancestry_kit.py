"""Engines whose EAGLE heads read a draft tree as SGLang does, for comparison."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from specpool import Engine
from specpool.engine.draft import EagleDrafter


def load_engine(*, ancestry: str = "exact", **options: Any) -> Engine:
    """`Engine.from_pretrained`; with `branch`, a head's tokens see their branch's slots."""
    with pytest.MonkeyPatch.context() as patch:
        load = functools.partial(EagleDrafter.from_pretrained, ancestry=ancestry)
        patch.setattr(EagleDrafter, "from_pretrained", load)
        return Engine.from_pretrained(**options)
