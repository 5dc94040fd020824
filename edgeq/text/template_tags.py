"""The tags that chat templates of the Hugging Face hub use beside those of jinja2."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; here it means its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


TAGS: list[type[Extension]] = [GenerationTag, LoopControlExtension]
