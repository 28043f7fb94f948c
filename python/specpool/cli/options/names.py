"""`NamingGroup`: makes errors name the option as the user typed it, not the Python field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from specpool.errors import ConfigError

#: A message about one prompt. Python numbers prompts from 0, the headings of an output from 1.
_PROMPT = re.compile(
    r"\A((?:the chat template refuses |(?:'\w+' of )?message \d+ of )?prompt )(\d+)"
)


def with_option_names(text: str, options: Mapping[str, str]) -> str:
    """Replace Python names in an error message by the options, and number prompts from 1.

    A name without an underscore may be an ordinary word. It is replaced only at the start of the
    message, before " must " or ": ".

    Args:
        text: the message of an error.
        options: name of the parameter -> the option, such as `{"page_size": "--page-size"}`.
    """
    text = _PROMPT.sub(lambda match: f"{match[1]}{int(match[2]) + 1}", text)
    for field, option in options.items():
        if "_" in field:
            text = re.sub(rf"(?<![\w/.'\"-]){field}(?![\w/.'\"-])", option, text)
        else:
            text = re.sub(rf"\A{field}(?= must |: )", option, text)
    return text


def help_if_alone(context: typer.Context) -> None:
    """Print a group's help and exit with code 2, if no command of the group was named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


class NamingGroup(TyperGroup):
    """A group of commands whose errors name options, and whose help shows whole sentences."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with its whole first sentence, on as many lines as needed."""
        rows = [(name, self.commands[name].get_short_help_str(1000)) for name in self.commands]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a `ConfigError` gets the names of the command's options."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            command = self.commands.get(ctx.invoked_subcommand or "")
            options = {
                param.name: max(param.opts, key=len)
                for param in (command.params if command is not None else ())
                if param.name and param.opts and param.opts[0].startswith("-")
            }
            raise type(error)(with_option_names(str(error), options)) from error
