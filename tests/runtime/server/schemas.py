"""Two hundred JSON Schemas: what people send, and every keyword alone and beside others.

`SCHEMAS` are held to; `REFUSED` have what llguidance does not know, and the word that the error must name.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(required: list[str] | None = None, /, **properties: Schema) -> Schema:
    """An object with these members and no others; all of them are required unless some are named."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def array(items: Schema, least: int = 0, most: int = 4) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
SHORT = {"type": "string", "maxLength": 12}
COUNT = {"type": "integer", "minimum": 0, "maximum": 999}
RATIO = {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}
FLAG = {"type": "boolean"}
POINT = record(x=COUNT, y=COUNT)

NUMBERS: list[Schema] = [
    {"type": "integer", "minimum": least, "maximum": most}
    for least, most in (
        (0, 0),
        (0, 9),
        (-5, 5),
        (7, 13),
        (-1000, -990),
        (99, 101),
        (0, 255),
        (-128, 127),
        (1900, 2100),
        (0, 65535),
    )
]
NUMBERS += [
    {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": most}
    for least, most in ((0, 2), (-3, 3), (9, 11), (98, 1001), (-2, 0))
]
NUMBERS += [{"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": step} for step in (2, 5, 7, 10, 25, 100)]
NUMBERS += [
    {"type": "number", "minimum": least, "maximum": most, "multipleOf": 0.5}
    for least, most in ((0, 1), (-1, 1), (0.5, 0.5), (10, 20), (-2.5, 2.5), (99, 101))
]
NUMBERS += [{"type": "number", "minimum": 0, "maximum": 1, "multipleOf": step} for step in (0.1, 0.01, 0.25, 0.125)]

PATTERNS = (
    "^[a-z]{2}$",
    "^[A-Z][a-z]{1,6}$",
    "^[0-9]{4}-[0-9]{2}$",
    "^(yes|no|maybe)$",
    "^#[0-9a-f]{6}$",
    "^v[0-9]\\.[0-9]\\.[0-9]$",
    "^[a-z_][a-z0-9_]{0,7}$",
    "^\\+[1-9][0-9]{6,9}$",
    "^[01]{8}$",
    "^a+b+$",
    "^(ab){1,3}$",
    '^[^"\\\\]{3}$',
    "^$",
    "^\\w{1,5}$",
    "^\\d{3}-\\d{4}$",
    "^.{4}$",
    "^[é-ü]{2}$",
    "^(a|b)(c|d)(e|f)$",
    "^x?y?z?$",
    "^[a-f0-9]{8}(-[a-f0-9]{4}){2}$",
)
STRINGS: list[Schema] = [{"type": "string", "pattern": pattern} for pattern in PATTERNS]
STRINGS += [
    {"type": "string", "minLength": least, "maxLength": most}
    for least, most in ((0, 0), (0, 3), (1, 1), (5, 5), (3, 9), (10, 12))
]
STRINGS += [{"type": "string", "format": name} for name in ("date", "time", "date-time", "ipv4", "uuid", "duration")]
STRINGS += [
    {"type": "string", "enum": words}
    for words in (["a"], ["red", "green", "blue"], ["", " "], ["naïve", "日本", "🙂"], ['"', "\\", "\n"])
]

CHOICES: list[Schema] = [
    {"enum": [1, "two", None, True, 3.5]},
    {"enum": [[], {}, [1, 2], {"a": 1}]},
    {"const": 7},
    {"const": "x"},
    {"const": None},
    {"const": False},
    {"const": {"a": [1, {"b": "c"}]}},
    {"const": []},
    {"type": "null"},
    FLAG,
    {"type": ["boolean", "null"]},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    {"type": ["boolean", "null"], "description": "a word about it"},
    {"anyOf": [WORD, COUNT]},
    {"anyOf": [{"type": "null"}, POINT]},
    {"anyOf": [{"const": 1}, {"const": 2}, {"const": 3}]},
    {"anyOf": [record(kind={"const": "a"}, n=COUNT), record(kind={"const": "b"}, w=WORD)]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {"oneOf": [{"const": "a"}, {"const": "b"}]},
    {"oneOf": [record(kind={"const": "circle"}, r=COUNT), record(kind={"const": "square"}, a=COUNT)]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    {"allOf": [{"type": "string", "maxLength": 4}, {"minLength": 2}]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": COUNT}, "required": ["a"]},
            {"additionalProperties": False, "properties": {"a": {}}},
        ]
    },
    {"enum": ["a", "b"], "type": "string"},
    {"anyOf": [{"type": "integer", "maximum": 3, "minimum": 1}, {"const": "none"}]},
]

ARRAYS: list[Schema] = [
    array(items, least, most) for items in (COUNT, WORD, FLAG, POINT) for least, most in ((0, 0), (0, 2), (2, 2), (1, 4))
]
ARRAYS += [
    array(array(COUNT, 1, 2), 1, 2),
    array({"anyOf": [COUNT, WORD]}, 2, 3),
    array({"type": "null"}, 3, 3),
    array(RATIO, 1, 3),
    {"type": "array", "prefixItems": [WORD, COUNT], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [WORD, COUNT], "items": FLAG, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": "add"}, COUNT, COUNT], "minItems": 3, "maxItems": 3},
    {"type": "array", "items": {"enum": ["n", "e", "s", "w"]}, "minItems": 1, "maxItems": 6},
    {"type": "array", "maxItems": 0},
    array(record(["id"], id=COUNT, name=WORD), 1, 2),
]

OBJECTS: list[Schema] = [
    record(),
    record(a=COUNT),
    record(a=COUNT, b=WORD, c=FLAG),
    record([], a=COUNT),
    record([], a=COUNT, b=WORD),
    record(["b"], a=COUNT, b=WORD, c=FLAG),
    record(p=POINT, q=POINT),
    record(deep=record(deep=record(deep=record(end=COUNT)))),
    record(**{"a b": COUNT, 'c"d': WORD, "é": FLAG, "": COUNT}),
    record(list=array(POINT, 0, 2)),
    record(maybe={"anyOf": [POINT, {"type": "null"}]}),
    record(n={"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
    {"type": "object", "additionalProperties": COUNT, "maxProperties": 3},
    {"type": "object", "additionalProperties": FLAG, "maxProperties": 2},
    {"type": "object", "properties": {"id": COUNT}, "required": ["id"], "additionalProperties": FLAG},
    {"type": "object", "patternProperties": {"^[a-z]{1,3}$": COUNT}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^n_[a-z]{1,3}$": COUNT, "^w_[a-z]{1,3}$": WORD}, "additionalProperties": False},
    {"type": "object", "required": ["a"], "properties": {"a": FLAG}, "additionalProperties": False},
    {"type": "object", "properties": {"a": FLAG, "b": False}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "maxProperties": 0},
    record(**{f"field_{i}": FLAG for i in range(30)}),
    record([], **{f"field_{i}": FLAG for i in range(30)}),
    record(date={"type": "string", "format": "date"}, uuid={"type": "string", "format": "uuid"}),
    {"type": "object", "properties": {}, "additionalProperties": False},
    record(**{f"k{i}": {"enum": [i, str(i)]} for i in range(12)}),
]

TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": record(["value"], value=COUNT, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})},
}
REFERENCES: list[Schema] = [
    {"$ref": "#/$defs/n", "$defs": {"n": COUNT}},
    {"$ref": "#/definitions/n", "definitions": {"n": WORD}},
    TREE,
    {"$defs": {"p": POINT}, **record(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"})},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": COUNT}, "$ref": "#/$defs/a"},
    {"$defs": {"kind": {"enum": ["x", "y"]}}, **array({"$ref": "#/$defs/kind"}, 1, 3)},
    {
        "properties": {"a": COUNT, "b": {"$ref": "#/properties/a"}},
        "type": "object",
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {"$defs": {"a~b": FLAG}, "$ref": "#/$defs/a~0b"},
    {"$defs": {"a/b": FLAG}, "$ref": "#/$defs/a~1b"},
    {"$defs": {"t": array(FLAG, 1, 2)}, "anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]},
]

PEOPLE = ("person", "company", "sensor", "order", "event")
REAL: list[Schema] = [
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        "description": f"A {name}.",
        "examples": [{}],
        "default": {},
    }
    | record(
        ["id", "name", "tags"],
        id={"title": "Id", "type": "integer", "minimum": 1, "maximum": 9999},
        name={"title": "Name", "description": "what it is called", **SHORT},
        tags=array(WORD, 0, 3),
        score={"anyOf": [RATIO, {"type": "null"}], "default": None},
        kind={"enum": ["new", "old"], "default": "new"},
    )
    for name in PEOPLE
]
REAL += [
    record(city=SHORT, unit={"enum": ["celsius", "fahrenheit"]}),
    record(steps=array(record(explanation=SHORT, output=SHORT), 1, 2), final_answer=SHORT),
    record(sentiment={"enum": ["positive", "neutral", "negative"]}, confidence=RATIO, reasons=array(SHORT, 0, 2)),
    record(command={"enum": ["open", "close", "wait"]}, seconds={"type": "integer", "minimum": 0, "maximum": 60}),
    record(path={"type": "string", "pattern": "^/[a-z]{1,8}(/[a-z]{1,8}){0,2}$"}, lines=array(COUNT, 2, 2)),
    record(
        results=array(
            record(["title"], title=SHORT, url={"type": "string", "pattern": "^https://[a-z]{3,8}\\.org/$"}, rank=COUNT), 0, 2
        )
    ),
    record(usage=record(prompt=COUNT, answer=COUNT), ok=FLAG, error={"anyOf": [SHORT, {"type": "null"}]}),
    array(record(role={"enum": ["user", "assistant"]}, content=SHORT), 1, 3),
    record(matrix=array(array(RATIO, 2, 2), 2, 2)),
    record(start={"type": "string", "format": "date-time"}, minutes=COUNT),
]

SCALARS = [COUNT, WORD, FLAG, RATIO, SHORT, {"const": "x"}, {"enum": [1, 2]}, {"type": "null"}, STRINGS[2], NUMBERS[1]]
WRAPPED: list[Schema] = [{"anyOf": [POINT, scalar]} for scalar in SCALARS]
WRAPPED += [record([], first=scalar, second=scalar) for scalar in SCALARS]
WRAPPED += [record(value={"description": "what it is", **scalar}, more=array(scalar, 1, 2)) for scalar in SCALARS]
WRAPPED += [{"$defs": {"s": scalar}, **array({"$ref": "#/$defs/s"}, 2, 2)} for scalar in SCALARS]

SCHEMAS = [*NUMBERS, *STRINGS, *CHOICES, *ARRAYS, *OBJECTS, *REFERENCES, *REAL, *WRAPPED]

REFUSED: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, "not"),
    ({"if": FLAG, "then": FLAG}, "if"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": FLAG}, "contains"),
    ({"type": "object", "propertyNames": WORD}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "string", "format": "unheard-of"}, "unheard-of"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"$ref": "https://example.org/schema"}, "example.org"),
    ({"$ref": "#"}, "satisfy"),
    ({"type": "colour"}, "colour"),
    ({"enum": []}, "empty"),
    ({"oneOf": [SHORT, WORD]}, "oneOf"),
    ({"type": "object", "minProperties": 1, "properties": {"a": FLAG}}, "min/maxProperties"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum"),
    ({"$ref": "#/$defs/gone"}, "gone"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    ([], "JSON object"),
    (False, "JSON object"),
    ("{}", "JSON object"),
    ({"type": "object", "properties": {f"p{i}": FLAG for i in range(501)}}, "500"),
    ({"description": "x" * 70_000}, "characters"),
    ({"type": "number", "minimum": float("nan")}, "JSON"),
]
