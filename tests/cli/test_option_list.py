"""The options of every command are those of `option_list.txt`: names, defaults, help, sections.

A user sees each line of that file in a `--help`. After a change that is meant, write it anew:
`python tests/cli/test_option_list.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from specpool.cli.commands import app

LIST = Path(__file__).with_name("option_list.txt")


def lines_of(command: Any, name: str) -> Iterator[str]:
    """Yield the options of a command and of those below it, as their help shows them."""
    yield f"{name} {command.help.splitlines()[0]}"
    context = typer.Context(command)
    options = []
    for param in command.get_params(context):
        shown, text = param.get_help_record(context) or (param.human_readable_name, param.help)
        section = getattr(param, "rich_help_panel", None) or "Options"
        options.append((section, f"{shown} | {' '.join(text.split())}"))
    for section, line in sorted(options, key=lambda option: option[0]):  # keeps a section's order
        yield f"    {section} | {line}"
    for below, subcommand in getattr(command, "commands", {}).items():
        yield from lines_of(subcommand, f"{name} {below}")


def listing() -> str:
    return "".join(f"{line}\n" for line in lines_of(typer.main.get_command(app), "specpool"))


def test_the_options_are_those_of_the_list():
    assert listing() == LIST.read_text()


if __name__ == "__main__":
    LIST.write_text(listing())
