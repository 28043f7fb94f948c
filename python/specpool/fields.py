"""What a field of a configuration says of itself: its limits, and its option of the command line.

A field is declared once, such as `page_size: Annotated[int, Within(1, 1 << 20), Option("Memory")] =
16`, and described once, in the docstring of its class under `Attributes:`. `check_values` checks
it; `specpool.cli.options.derived` makes its option.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from specpool.checks import check_bool, check_choice, check_int, check_number

if TYPE_CHECKING:
    import dataclasses

    from _typeshed import DataclassInstance

    _Check = Callable[[str, object], None]

#: The titles of a help's sections, in order; "Options" is the first, for what a newcomer needs.
Section = Literal[
    "Options",
    "Prompts",
    "Sampling",
    "Form of the text",
    "Training",
    "Requests",
    "Measurement",
    "Model",
    "Drafts",
    "Memory",
    "Scheduling",
    "Server",
    "Advanced",
]


@dataclass(frozen=True, slots=True)
class Within:
    """The limits of a number, both included."""

    minimum: float
    maximum: float


@dataclass(frozen=True, slots=True)
class Option:
    """The field is an option of the command line, whose help is the first sentence of its doc.

    Attributes:
        section: where it stands in the help.
        names: how it is typed, if not as the field's name with dashes.
        kind: the type that the command line parses, if not the field's.
        read: makes the field's value of the name of the field and a value of `kind`; None = the
            value is the field's.
        form: put behind the help: how a value of `kind` is typed.
        default: shown as the default, if the field's own would not say what happens.
    """

    section: Section = "Options"
    names: Sequence[str] = ()
    kind: Any = None
    read: Callable[[str, Any], Any] | None = None
    form: str = ""
    default: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """A field as its class declares it.

    Attributes:
        name: its name.
        kind: its type, without None and `Annotated`.
        is_optional: whether it may be None.
        default: `dataclasses.MISSING` if it must be given, or if a factory makes it.
        is_required: whether it must be given.
        within: its limits.
        option: its option of the command line; None if it has none.
    """

    name: str
    kind: Any
    is_optional: bool
    default: Any
    is_required: bool
    within: Within | None
    option: Option | None


@functools.cache
def declared(kind: type[DataclassInstance]) -> tuple[Field, ...]:
    """Return the fields of a dataclass, in their order.

    Its module must not have `from __future__ import annotations`, which makes types texts.
    """
    return tuple(map(_declared, fields(kind)))


def _declared(field: dataclasses.Field[Any]) -> Field:
    annotation: Any = field.type
    marks: Sequence[Any] = ()
    if get_origin(annotation) is Annotated:
        annotation, *marks = get_args(annotation)
    kinds = [annotation]
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    return Field(
        name=field.name,
        kind=kinds[0] if len(kinds) == 1 else annotation,
        is_optional=NoneType in get_args(annotation),
        default=field.default,
        is_required=field.default is MISSING and field.default_factory is MISSING,
        within=next((mark for mark in marks if isinstance(mark, Within)), None),
        option=next((mark for mark in marks if isinstance(mark, Option)), None),
    )


def check_values(config: DataclassInstance) -> None:
    """Raise `ConfigError` for the first field whose value its type or its limits do not allow.

    Checks numbers with limits, choices (`Literal`), and `bool`; all else is left to the class.
    """
    for name, is_optional, check in _checks(type(config)):
        value = getattr(config, name)
        if value is not None or not is_optional:
            check(name, value)


@functools.cache
def _checks(kind: type[DataclassInstance]) -> tuple[tuple[str, bool, _Check], ...]:
    checks = ((field, _check(field)) for field in declared(kind))
    return tuple((field.name, field.is_optional, check) for field, check in checks if check)


def _check(field: Field) -> _Check | None:
    if get_origin(field.kind) is Literal:
        return functools.partial(check_choice, choices=get_args(field.kind))
    if field.kind is bool:
        return check_bool
    if field.within is None:
        return None
    check: Callable[..., None] = check_int if field.kind is int else check_number
    return functools.partial(check, minimum=field.within.minimum, maximum=field.within.maximum)
