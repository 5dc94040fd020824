"""What an answer has to look like, as OpenAI's interface says it, and grammars beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.errors import InputError
from edgeq.runtime.answers import constraint
from edgeq.runtime.arguments import instance

ResponseFormat = Mapping[str, Any]
"""{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {...}}}, or
{"type": "grammar", "grammar": TEXT, "syntax": "lark" or "gbnf"}, which OpenAI's interface does not have."""
KINDS = ("text", "json_object", "json_schema", "grammar")


def grammar_of(response_format: ResponseFormat | None) -> str | None:
    """The grammar that Constraints compiles; None: any text.

    InputError: a type that is not known, no schema, or a schema or a grammar that is too large.
    """
    if response_format is not None and isinstance(response_format, Mapping) and response_format.get("type") == "grammar":
        syntax = response_format.get("syntax", "lark")
        if syntax not in ("lark", "gbnf"):
            raise InputError(f"`response_format` has syntax {str(syntax)[:40]!r}; supported: lark, gbnf")
        grammar = response_format.get("grammar")
        instance("grammar", grammar, str, "a string")
        return constraint.of_lark(str(grammar)) if syntax == "lark" else constraint.of_gbnf(str(grammar))
    schema = schema_of(response_format)
    return None if schema is None else constraint.of_schema(schema)


def schema_of(response_format: ResponseFormat | None) -> str | None:
    """The schema as llguidance reads it; None: any text.  InputError: no schema, or a grammar."""
    if response_format is None:
        return None
    instance("response_format", response_format, Mapping, 'a dict such as {"type": "json_object"}, or None')
    kind = response_format.get("type")
    if kind not in KINDS[:-1]:
        raise InputError(f"`response_format` has type {str(kind)[:40]!r}; supported: {', '.join(KINDS)}")
    if kind == "json_object":
        return constraint.schema_text({"type": "object"})
    if kind == "json_schema":
        inner = response_format.get("json_schema")
        if not isinstance(inner, Mapping) or "schema" not in inner:
            raise InputError('`response_format` of type json_schema needs {"json_schema": {"schema": {...}}}')
        return constraint.schema_text(inner["schema"])
    return None
