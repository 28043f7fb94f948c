"""A griffe extension: shows how a class of the extension module is called.

The stub declares `__new__`, because PyO3 has no `__init__`, but griffe looks only at `__init__`.
"""

from __future__ import annotations

from typing import Any

from griffe import Class, Extension, Function


class NewAsInit(Extension):
    """Show `__new__` of a class in a stub as its `__init__`."""

    def on_class_members(self, *, cls: Class, **_others: Any) -> None:
        """Move it, under the other name."""
        new = cls.members.get("__new__")
        if isinstance(new, Function) and str(cls.filepath).endswith(".pyi"):
            new.name = "__init__"
            cls.members["__init__"] = cls.members.pop("__new__")
