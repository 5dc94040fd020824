"""Types of arguments and options: which values each takes, and the line that a user gets for any other."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import click

from edgeq.errors import InputError
from edgeq.tools.hub.names import is_hub_name

MAX_NUMBER = 1 << 24
MAX_EDGE = 10_000
GGUF_MAGIC = b"GGUF"
RANDOM = "random"
UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_DECIMAL = re.compile(r"\d{1,12}(\.\d{1,12})?|\.\d{1,12}")
_BYTES = re.compile(rf"({_DECIMAL.pattern}) ?(?P<unit>b|[kmg]i?b)", re.IGNORECASE)
TOWER = "edgeq.tower"
"""Where a context of click has the value of --mmproj."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def number(text: str, most: int = MAX_NUMBER) -> int | None:
    """The number that `text` writes in digits; None if it is not a number, or above `most`."""
    # Python refuses to read thousands of digits.
    return int(text) if text.isdecimal() and len(text) < 10 and int(text) <= most else None


class OneOf(click.Choice):  # type: ignore[type-arg]
    """One of a few names, in lower or upper case; a shell completes them."""

    def __init__(self, *names: str) -> None:
        super().__init__(names, case_sensitive=False)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "|".join(self.choices)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        for name in self.choices:
            if str(value).casefold() == name:
                return str(name)
        self.fail(f"{value!r} is not known; supported: {', '.join(self.choices)}", param, ctx)


class Count(click.ParamType):  # type: ignore[type-arg]
    """A number of at least `least`."""

    name = "number"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        count = number(str(value))
        if count is None or count < self.least:
            self.fail(f"{value!r}: expected a number from {self.least} to {MAX_NUMBER}", param, ctx)
        return count


class PixelSize(click.ParamType):  # type: ignore[type-arg]
    """WIDTHxHEIGHT in pixels."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        width, _, height = str(value).casefold().partition("x")
        sizes = number(width, MAX_EDGE), number(height, MAX_EDGE)
        if sizes[0] and sizes[1]:
            return sizes[0], sizes[1]
        self.fail(f"{value!r}: expected width x height in pixels, such as 448x448, each at most {MAX_EDGE}", param, ctx)


class Threads(click.ParamType):  # type: ignore[type-arg]
    """`auto` (0: the target chooses) or a number of threads."""

    name = "threads"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if str(value).casefold() == "auto":
            return 0
        if threads := number(str(value), 1024):
            return threads
        self.fail(f"{value!r}: expected auto or a number from 1 to 1024", param, ctx)


class Seed(click.ParamType):  # type: ignore[type-arg]
    """`random` (RANDOM: drawn when the command runs) or a number."""

    name = "seed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value)
        if text.casefold() == RANDOM:
            return RANDOM
        if text.isdecimal() and len(text) <= 20 and int(text) < 1 << 64:
            return int(text)
        self.fail(f"{value!r}: expected random or a number from 0 to 2**64 - 1", param, ctx)


class Gamma(click.ParamType):  # type: ignore[type-arg]
    """`auto` (None: chosen by measured speed-up) or the length of a draft in tokens."""

    name = "gamma"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if str(value).casefold() == "auto":
            return None
        if (gamma := number(str(value))) is not None:
            return gamma
        self.fail(f"{value!r}: expected auto or a number from 1 to 7", param, ctx)


class GroupSize(click.ParamType):  # type: ignore[type-arg]
    """A number of input channels, or `row` (0: one group per output channel)."""

    name = "group size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if str(value).casefold() == "row":
            return 0
        if size := number(str(value)):
            return size
        self.fail(f"{value!r}: expected 16, 32, 64, 128 or row", param, ctx)


class Bits(click.ParamType):  # type: ignore[type-arg]
    """W, W/A or W/A/KV: bits of weights, of activations and of the cache; W with a decimal point is an average."""

    name = "bits"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, float]:
        parts = str(value).split("/")
        if _DECIMAL.fullmatch(parts[0]) and "." in parts[0]:
            # What follows is read as after a whole number.
            rest = self.convert("/".join(["4", *parts[1:]]), param, ctx)
            return {"average_bits": float(parts[0])} | {key: bits for key, bits in rest.items() if key != "bits"}
        if len(parts) <= 3 and all(number(part, 64) is not None for part in parts):
            return dict(zip(("bits", "activation_bits", "kv_bits"), map(int, parts), strict=False))
        self.fail(f"{value!r}: expected bits of weights, activations and cache, such as 4, 4/8 or 4/4/4", param, ctx)


class VisionBits(click.ParamType):  # type: ignore[type-arg]
    """W or W/A: bits of a vision tower's weights and activations."""

    name = "bits"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        parts = str(value).split("/")
        if len(parts) <= 2 and all(number(part, 64) is not None for part in parts):
            return dict(zip(("vision_bits", "vision_activation_bits"), map(int, parts), strict=False))
        self.fail(f"{value!r}: expected bits of weights and activations, such as 8/8 or 4/8", param, ctx)


class Amount(click.ParamType):  # type: ignore[type-arg]
    """A number above 0."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if _DECIMAL.fullmatch(str(value)) and (amount := float(value)) > 0:
            return amount
        self.fail(f"{value!r}: expected a number above 0", param, ctx)


class Bytes(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes with a unit: 600MB, 0.5GB, 512MiB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = _BYTES.fullmatch(str(value).strip())
        if not found or float(found[1]) <= 0:
            self.fail(f"{value!r}: expected a size such as 600MB, 0.5GB or 512MiB", param, ctx)
        return float(found[1]) * UNITS[found["unit"].casefold()]


class CalibrationText(click.Path):
    """The path of a text, or `built-in`."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return "built-in" if str(value).casefold() == "built-in" else super().convert(value, param, ctx)


class Several(click.ParamType):  # type: ignore[type-arg]
    """A list of values of another type with commas between them; a value that is given twice counts once."""

    name = "list"

    def __init__(self, item: click.ParamType) -> None:  # type: ignore[type-arg]
        self.item = item

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(self.item.convert(part, param, ctx) for part in str(value).split(",")))


def remember_tower(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    """Keep the value of --mmproj for `resolve_files`."""
    ctx.meta[TOWER] = value


class EdgeqFile(click.Path):
    """The path of an .edgeq file or of a GGUF file, or the name of either on the hub, for `resolve_files`.

    InputError: it is something else that people have models in; the message has the command that converts it.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if is_hub_name(str(value)):
            return path
        convert_first = f"convert it first: {conversion(path)}"
        if os.path.isdir(path):
            if os.path.exists(path / "config.json"):
                raise InputError(f"{path}: the folder of a checkpoint, not an .edgeq file; {convert_first}")
            raise InputError(f"{path}: a folder; give the path of an .edgeq file")
        if not os.path.exists(path) and is_hub_id(path):
            hub = f"if it is a model on the Hugging Face hub, give hf:{path}, or {convert_first}"
            raise InputError(f"{path}: no such file; {hub}")
        return path


def resolve_files(ctx: click.Context) -> None:
    """Put an .edgeq file in the place of each value of type EdgeqFile: what lies on the hub is fetched, and a GGUF file is
    converted into the cache, with the tower that `remember_tower` was given, or else the one that lies beside it on the hub.

    It takes minutes, so it comes after everything that can be wrong with a command line.

    InputError: --mmproj beside a file that is no GGUF file.  Errors of names of the hub: as edgeq.tools.hub.fetch.model_file.
    """
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        if isinstance(param.type, EdgeqFile) and value is not None:
            several = isinstance(value, tuple)
            found = tuple(_edgeq_file(path, ctx.meta.get(TOWER)) for path in (value if several else (value,)))
            ctx.params[param.name or ""] = found if several else found[0]


def _edgeq_file(path: Path, given: Path | None) -> Path:
    tower = given
    if is_hub_name(str(path)):
        from edgeq.tools.hub.fetch import model_file

        path, beside = model_file(str(path), with_tower=given is None)
        tower = given or beside
    if is_gguf(path):
        from edgeq.tools.commands.from_gguf import converted

        return converted(path, tower)
    if given:
        raise InputError(f"--mmproj goes with a GGUF file, and {path} is none; leave it out")
    return path


def conversion(source: Path) -> str:
    """The command that makes an .edgeq file of a folder or hub id."""
    return shlex.join(["edgeq", "convert", str(source), "-o", f"{source.resolve().name}.edgeq"])


def is_hub_id(path: Path) -> bool:
    """Whether a path that does not exist reads like OWNER/NAME; a misspelt file lies in a folder that exists."""
    return bool(_HUB_ID.fullmatch(str(path))) and path.suffix != ".edgeq" and not os.path.exists(path.parent)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do; none, and what cannot be read, does not."""
    try:
        # A pipe would wait for its writer.
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False
