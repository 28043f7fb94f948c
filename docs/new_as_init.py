"""A griffe extension: a class of the extension module shows how it is called.

The stub says so with `__new__`, since PyO3 has no `__init__`; griffe looks at `__init__` alone.
"""

from __future__ import annotations

from typing import Any

from griffe import Class, Extension, Function


class NewAsInit(Extension):
    """Let `__new__` of a class in a stub stand in the place of `__init__`."""

    def on_class_members(self, *, cls: Class, **_others: Any) -> None:
        """Move it, under the other name."""
        new = cls.members.get("__new__")
        if isinstance(new, Function) and str(cls.filepath).endswith(".pyi"):
            new.name = "__init__"
            cls.members["__init__"] = cls.members.pop("__new__")
