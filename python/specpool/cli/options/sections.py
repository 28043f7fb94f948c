"""The sections of a command's help: the options that a newcomer needs first, then groups."""

from __future__ import annotations

from typing import Any, get_args

from typer.core import TyperCommand

from specpool.fields import Section

# A title is the `rich_help_panel` of an option; an option without one is in the first section.
_FIRST = "Options"
_ORDER = ("Arguments", *get_args(Section))


class SectionedCommand(TyperCommand):
    """A command whose help lists its options by section."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write each section that has an option, in the order of `Section`."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            line = param.get_help_record(ctx)
            if line is None:
                continue
            title = getattr(param, "rich_help_panel", None) or _FIRST
            if param.param_type_name == "argument":
                title = "Arguments"
            sections.setdefault(title, []).append(line)
        for title in sorted(sections, key=_ORDER.index):
            with formatter.section(title):
                formatter.write_dl(sections[title])
