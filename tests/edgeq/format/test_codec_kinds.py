"""The kind of a codec is asked in codec.py and in one table of codecs per target; everything else asks the codec."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgeq.errors import UnsupportedError
from edgeq.format.codec import FLOAT_KINDS, Codec
from edgeq.targets.cpu.lowering import codecs as cpu
from edgeq.targets.cuda.lowering import linear as cuda

ROOT = Path(__file__).parents[3]
ASKED = re.compile(r"""kind\s*(?:==|!=|in|not in)\s*\(?\s*["']int["']|["']int["']\s*(?:==|!=|in|not in)\b""")


def test_no_one_asks_whether_a_kind_is_integers_but_the_codec() -> None:
    folders = ("edgeq", "runtime", "converters", "targets", "tools")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in paths if ASKED.search(path.read_text())}
    assert len(paths) > 400 and found == {"edgeq/format/codec.py"}


@pytest.mark.parametrize("table", [cpu.CODECS, cuda.CODECS], ids=["cpu", "cuda"])
def test_a_target_has_an_entry_for_every_codec_that_it_runs(table: dict[str, object]) -> None:
    assert {*FLOAT_KINDS, "int"} <= table.keys()
    for kind in table:
        codec = Codec(kind) if kind in FLOAT_KINDS else Codec(kind, 2, 32)  # type: ignore[arg-type]
        assert list(codec.parts(16, 64))[0] == "q" and codec.integer != (kind in FLOAT_KINDS)


def test_cuda_refuses_by_name_what_it_has_no_kernels_for() -> None:
    assert cuda.launches_of(Codec("int", 4, 32)) is cuda.CODECS["int"]
    for codec in (Codec("offset", 4, 32), Codec("two-level", 6, 16)):
        with pytest.raises(UnsupportedError, match=f"weights in the codec {codec.name} yet; run with --target cpu"):
            cuda.launches_of(codec)
