"""`OptionsOf`: the options of a configuration's fields; `grouped` gives them to a command.

Typer makes one option of each parameter of a command; a group is one parameter for several options.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from specpool.fields import Field, Option, declared

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
#: Values of fields by their names.
Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FieldOption:
    """The option of a field of a configuration."""

    field: Field
    option: Option
    doc: str

    @property
    def names(self) -> Sequence[str]:
        """How it is typed; the first name is the one that texts use."""
        if self.option.names:
            return self.option.names
        name = self.field.name.replace("_", "-")
        return [f"--{name}/--no-{name}" if self.field.default is True else f"--{name}"]

    @property
    def kind(self) -> Any:
        """The type that the command line parses."""
        if self.option.kind is not None:
            return self.option.kind
        if get_origin(self.field.kind) is tuple:
            return list[get_args(self.field.kind)[0]]  # type: ignore[misc]
        return self.field.kind

    @property
    def default(self) -> Any:
        """The default that is parsed and shown; None where the field's own cannot be typed."""
        if self.field.is_required:
            return inspect.Parameter.empty
        is_typed = self.option.kind is None and not isinstance(self.field.default, tuple)
        return self.field.default if is_typed and self.field.default is not MISSING else None

    def value(self, typed: Any) -> Any:
        """Return the field's value for what was parsed.

        Raises:
            ConfigError: a text cannot be read; the message names the field.
        """
        if self.option.read is not None:
            return self.option.read(self.field.name, typed)
        return tuple(typed) if isinstance(typed, list) else typed

    def help(self, names: Mapping[str, str], default: str | None = None) -> str:
        """Return the first sentence of the field's doc, and how a value is typed.

        Args:
            names: the option of each field that the sentence may name in backticks.
            default: shown as the default in place of the option's own.
        """
        sentence = self.doc.partition(". ")[0].removesuffix(".")
        sentence = re.sub(r"`(\w+)`", lambda match: names.get(match[1], match[0]), sentence)
        repeated = "; may be repeated" if get_origin(self.kind) is list else ""
        shown = self.option.default if default is None else default
        shown = f" [default: {shown}]" if shown else ""
        return f"{sentence[:1].upper()}{sentence[1:]}{self.option.form}{repeated}.{shown}"


@functools.cache
def options_of(config: type[DataclassInstance]) -> dict[str, FieldOption]:
    """Return the options of a configuration, by field."""
    docs = docs_of(config)
    return {
        field.name: FieldOption(field, field.option, docs.get(field.name, ""))
        for field in declared(config)
        if field.option is not None
    }


def docs_of(config: type[DataclassInstance]) -> dict[str, str]:
    """Return the doc of each field, from the `Attributes:` of the class.

    There is none under `python -OO`, which drops docstrings.
    """
    _, _, attributes = inspect.cleandoc(config.__doc__ or "").partition("\nAttributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


class Untyped(str):
    """A command's own default that depends on other options: the text that the help shows."""

    __slots__ = ()


def option_of(config: type[DataclassInstance], name: str, default: str | None = None) -> Any:
    """Return the option of one field, as a mark of a parameter's annotation.

    `default` is shown as the default in place of the option's own.
    """
    options = options_of(config)
    names = {field: option.names[0] for field, option in options.items()}
    return typer.Option(
        *options[name].names,
        help=options[name].help(names, default),
        rich_help_panel=options[name].option.section,
    )


class OptionsOf:
    """Stands for the options of a configuration, as a mark of a parameter's annotation.

    The parameter gets the `Values` of the fields that were typed or have a default other than None.
    """

    def __init__(
        self,
        config: type[DataclassInstance],
        *,
        only: Sequence[str] | None = None,
        without: Sequence[str] = (),
        **defaults: Any,
    ) -> None:
        """Choose the fields.

        Args:
            config: the dataclass; its fields with an `Option` are options.
            only: names of fields; None = all.
            without: names of fields that are no options of the command.
            defaults: the command's own defaults, by field; `Untyped` leaves the field out.
        """
        options = options_of(config)
        unknown = {*without, *(only or ()), *defaults} - options.keys()
        assert not unknown, f"{config.__name__} has no options {unknown}"
        self._config, self._defaults = config, defaults
        self._names = [
            name for name in options if name not in without and (only is None or name in only)
        ]

    def parameters(self) -> list[inspect.Parameter]:
        """Return the parameters that Typer makes the options of."""
        parameters = []
        for name in self._names:
            option = options_of(self._config)[name]
            default = self._defaults.get(name, option.default)
            shown = default if isinstance(default, Untyped) else None
            default = None if shown is not None else default
            kind = option.kind | None if default is None else option.kind
            parameters.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=Annotated[kind, option_of(self._config, name, shown)],
                )
            )
        return parameters

    def group(self, typed: Mapping[str, Any]) -> Values:
        """Return the fields' values for what was parsed; see `FieldOption.value` for the errors."""
        options = options_of(self._config)
        return {
            name: options[name].value(value) for name, value in typed.items() if value is not None
        }


class _Dataclass:
    """A group whose parameter gets an object of a dataclass."""

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind

    def parameters(self) -> list[inspect.Parameter]:
        types = get_type_hints(self._kind, include_extras=True)
        return [
            param.replace(annotation=types[param.name])
            for param in inspect.signature(self._kind).parameters.values()
        ]

    def group(self, typed: Mapping[str, Any]) -> Any:
        return self._kind(**typed)


def _group(annotation: Any) -> OptionsOf | _Dataclass | None:
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _Dataclass(annotation)
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, OptionsOf)), None)


def grouped(command: Callable[..., T]) -> Callable[..., T]:
    """Give the command the options of its groups: parameters of a dataclass or `OptionsOf`."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[OptionsOf | _Dataclass, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for param in signature.parameters.values():
        group = _group(param.annotation)
        if group is None:
            parameters.append(param)
        else:
            options = group.parameters()
            groups[param.name] = group, [option.name for option in options]
            parameters += options

    @functools.wraps(command)
    def run(**typed: Any) -> T:
        for name, (group, options) in groups.items():
            typed[name] = group.group({option: typed.pop(option) for option in options})
        return command(**typed)

    # Typer reads the signature, and the annotations apart from it.
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {param.name: param.annotation for param in parameters}
    return run
