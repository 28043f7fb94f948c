"""Groups of options that several commands share; a command takes a group as one parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from specpool.cli.options import types as o
from specpool.cli.options.drafts import drafts_of
from specpool.cli.options.prompts import Given
from specpool.engine.text.structured.grammar import Grammar
from specpool.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The checkpoints."""

    target: o.Target = "specpool/tiny"
    draft: o.Drafts = None

    def drafts(self) -> list[str]:
        """Return the drafts to load, as `drafts_of` does."""
        return drafts_of(self.target, self.draft)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The prompts."""

    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")
    ] = None
    prompt_ids: Annotated[
        list[str] | None,
        typer.Option(
            help="A prompt as token ids: '1,2,3'; may be repeated.", rich_help_panel="Prompts"
        ),
    ] = None
    prompt_file: Annotated[
        str | None,
        typer.Option(help="A file of prompts; '-' = standard input. See --prompt-format."),
    ] = None
    prompt_format: Annotated[
        str | None,
        typer.Option(
            help="Format of --prompt-file: lines = each line is a prompt; jsonl = each line is "
            "JSON: a text, a list of token ids, or an object with 'prompt' (either) or 'messages' "
            "(a chat); whole = one prompt of many lines. [default: lines; whole for standard "
            "input]",
            rich_help_panel="Prompts",
        ),
    ] = None

    def given(self) -> Given:
        """Return the options as an argument of `read_prompts`."""
        return Given(self.prompt or [], self.prompt_ids or [], self.prompt_file, self.prompt_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """The device, the dtype and the threads of a model."""

    dtype: o.DtypeName = None
    device: o.DeviceName = "cpu"
    threads: o.Threads = 1
    trust_remote_code: o.TrustRemoteCode = False


def loading_of(
    models: ModelOptions, place: PlaceOptions, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `Engine.from_pretrained`.

    Args:
        models: the checkpoints.
        place: where they are loaded to.
        options: fields of `EngineConfig`.

    Raises:
        ConfigError: a draft is named twice, or `none` beside others.
    """
    return {
        "target": models.target,
        "draft": models.drafts() or None,
        "dtype": place.dtype,
        "device": place.device,
        "trust_remote_code": place.trust_remote_code,
        **options,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOptions:
    """The form that the text must have."""

    json_schema: Annotated[
        Path | None,
        typer.Option(
            help="Answer in JSON that has the schema of this file.",
            rich_help_panel="Form of the text",
        ),
    ] = None
    json_object: Annotated[
        bool,
        typer.Option(
            "--json-object", help="Answer with a JSON object.", rich_help_panel="Form of the text"
        ),
    ] = False
    regex: Annotated[
        str | None,
        typer.Option(
            help="Answer with a text that this regular expression matches.",
            rich_help_panel="Form of the text",
        ),
    ] = None
    choice: Annotated[
        list[str] | None,
        typer.Option(
            help="Answer with one of these strings; repeat it.", rich_help_panel="Form of the text"
        ),
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option(
            help="Answer in the grammar of this file, GBNF or Lark.",
            rich_help_panel="Form of the text",
        ),
    ] = None

    def fields(self) -> dict[str, Any]:
        """Return fields of `SamplingParams`.

        Raises:
            ConfigError: several forms are given, a file cannot be read, or a form is wrong.
        """
        given = {name: value for name, value in asdict(self).items() if value not in (None, False)}
        if len(given) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{names} both say what the text must be: give one")
        for name, value in given.items():
            make: Callable[..., Grammar] = getattr(Grammar, {"grammar": "ebnf"}.get(name, name))
            arguments = [text_of(value, name)] if isinstance(value, Path) else [value]
            return {"structured": make(*([] if value is True else arguments))}
        return {}


def text_of(path: Path, option: str) -> str:
    """Return the text of an option's file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{option} {path} cannot be read: {why}") from None
