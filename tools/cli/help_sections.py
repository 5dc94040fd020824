"""Help in sections: options under headings of their own, and examples that are printed as they are written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class SectionedOption(click.Option):
    """An option whose help stands under the heading `section`."""

    def __init__(self, *arguments: Any, section: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.section = section


def section(title: str) -> Callable[..., Callable[[F], F]]:
    """`click.option` for options under the heading `title`."""
    return partial(click.option, cls=SectionedOption, section=title)


def decorated(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order given."""

    def apply(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


class Examples(click.Command):
    """The epilog is a list of command lines, which are not wrapped."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.strip().splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line.strip()}\n")


class SectionedCommand(Examples):
    """Sections in the order of their first option; options without one come last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        rest: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                (sections.setdefault(param.section, []) if isinstance(param, SectionedOption) else rest).append(record)
        if rest:
            sections["Other options" if sections else "Options"] = rest
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
