"""A griffe extension: shows the type of a field without what else its annotation says."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, ExprSubscript, ExprTuple, Extension


class PlainAnnotations(Extension):
    """Show `Annotated[int, Within(1, 8)]` as `int`."""

    def on_attribute_instance(self, *, attr: Attribute, **_others: Any) -> None:
        """Replace the annotation by its first part."""
        annotation = attr.annotation
        if isinstance(annotation, ExprSubscript) and annotation.canonical_name == "Annotated":
            assert isinstance(annotation.slice, ExprTuple)
            attr.annotation = annotation.slice.elements[0]
