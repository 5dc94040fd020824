"""A demo model, profiled once, and a document of a profile to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeq.tools.commands.bench import Test
from edgeq.tools.measure.measurement import MeasuredTest
from edgeq.tools.profile.collect import Plan, Profile, collect
from edgeq.tools.profile.document import document
from edgeq.tools.profile.record import SCHEMA
from edgeq.tools.profile.runs import Setting

TINY_LLAMA = Path(__file__).parent.parent.parent.parent / "models" / "tiny-llama"
TESTS = (Test("pp", 32, 0), Test("tg", 8, 0), Test("tg", 8, 64))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, rtn, 4 bits."""
    from edgeq.converters.convert import convert
    from edgeq.converters.planning.options import ConvertOptions

    path = tmp_path_factory.mktemp("profile") / "tiny.edgeq"
    convert(str(TINY_LLAMA), path, ConvertOptions(method="rtn"), lambda *_: None)
    return path


@pytest.fixture(scope="session")
def profiled(tiny: Path) -> Profile:
    """Two tests of tokens and one of a prompt, in two modes."""
    settings = tuple(Setting(1, mode, "f16") for mode in ("a16", "a8"))
    return collect(Plan(tiny, settings, TESTS, 3, True, {"target": "cpu"}), lambda *_: None)


@pytest.fixture(scope="session")
def written(profiled: Profile) -> dict[str, Any]:
    return document(profiled)


def invented(kind: str, test: str, seconds: float, **changes: Any) -> dict[str, Any]:
    """A record of five repetitions of so many seconds, four tokens each."""
    facts = {
        **{"model": "m", "codec": "i4 g128", "head_codec": "i6 g128", "file_bytes": 1000, "identity": "0" * 64, "version": "1"},
        **{"processor": "P", "date": "2026-01-01", "target": "cpu", "isa": "avx2", "mode": "a8", "kv": "f16", "threads": 1},
        **{"threads_prefill": 1, "mhz": 2000.0, "power_mode": None, "celsius": None, "load": 0.1, "cores": 2},
    }
    steps = [seconds / 4] * 20 if kind == "tg" else []
    own = MeasuredTest(kind, test, 4, 0, 1, 8, facts, [seconds] * 5, steps, rss=1, peak_rss=2).fields()
    return {**own, **changes}


@pytest.fixture
def calm() -> dict[str, Any]:
    """A document of tests at which nothing stands out, to be changed."""
    tests = [
        invented("load", "load", 1.0),
        invented("ttft", "ttft pp4", 1.1),
        invented("pp", "pp4", 1.0, overhead=0.01),
        invented("tg", "tg4", 1.0, bandwidth_share=0.7, bytes_per_s=7e9, read_bandwidth=1e10, overhead=-0.01),
    ]
    line = {"phase": "decode", "name": "qkv", "layer": 0, "kernels": ["k"], "seconds": 0.2, "waited": 0.01, "bytes": 1e6}
    line |= {"macs": 1e6, "float_macs": 0.0, "roofline": 0.5, "bound": "memory", "bytes_per_s": 5e6, "operations_per_s": 1e7}
    spent = {"wall": 0.21, "operations": 0.2, "waited": 0.01, "bubble": 0.01, "between": 0.006, "within": 0.004, "closure": 1.0}
    operations = {"test": "tg4", "tokens": 4, "threads": 1, "mode": "a8", "kv": "f16", **spent, "lines": [line]}
    limits = {"threads": 1, "mode": "a8", "kv": "f16", "phase": "decode", "bytes_per_s": 1e10, "operations_per_s": 1e12}
    return {
        **{"schema": SCHEMA, "partial": False, "edgeq": "1", "date": "2026-01-01", "measurements": tests},
        **{"operations": [operations], "limits": [limits], "memory": [{"seconds": 0.0, "rss": 1000, "cache": 10}]},
        **{"weights": {"bytes_per_token": 1000, "head": 100, "head_bits": 8.2}, "sensors": [], "idle_watts": None},
        **{"findings": [], "sustained": None, "what_if": []},
    }
