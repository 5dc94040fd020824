"""What TVM generates: the same text each time, compiled for every GPU that is supported, without a spilled register."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgeq.codec import BITS
from edgeq.errors import UnsupportedError
from edgeq.targets.cuda import build
from edgeq.targets.cuda.pack import Variant, encode
from tests.cuda import nvrtc

pytestmark = pytest.mark.cuda

SMS = (80, 87, 89, 90)
FORMS = [Variant("form", (integer, group)) for integer in (False, True) for group in (16, 32, 64, 128)]
PRODUCTS = [
    Variant(kernel, (bits, zero, integer, group))
    for kernel in ("few", "many")
    for bits in BITS
    for zero in (False, True)
    for integer in (False, True)
    for group in (16, 32, 64, 128)
]
EMBEDS = [Variant("embed", (bits, zero)) for bits in BITS for zero in (False, True)]
OTHERS = [
    *(Variant("attend", (head_dim,)) for head_dim in (32, 64, 80, 96, 128, 256)),
    *(Variant(name) for name in ("rms_norm", "swiglu", "select", "rope", "cache_write")),
]
SHARE = {
    Variant("few", (4, True, True, 128)),
    Variant("many", (4, True, False, 128)),
    Variant("embed", (8, False)),
    Variant("attend", (32,)),
    *OTHERS[-5:],
}
"""What `make test` compiles; the rest is for `make test-cuda`."""
VARIANTS = [
    pytest.param(v, marks=() if v in SHARE else pytest.mark.exhaustive, id=v.symbol)
    for v in (*FORMS, *PRODUCTS, *EMBEDS, *OTHERS)
]
GATHERED = re.compile(r"make_(uint|int|float)[24]\(")


@pytest.fixture(autouse=True)
def needed(needs_generator: None) -> None:
    if reason := nvrtc.refusal():
        pytest.skip(reason)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_kernel_compiles_for_every_gpu_and_spills_nothing(variant: Variant) -> None:
    (generated,) = build.kernels([variant])
    assert not GATHERED.search(generated.text), "a vector load is gathered word by word"
    for sm in SMS:
        compiled = nvrtc.compiled(generated, sm)
        assert compiled.cubin[:4] == b"\x7fELF" and not compiled.spilled and compiled.registers <= 255


@pytest.mark.exhaustive
def test_text_and_machine_code_are_the_same_each_time(tmp_path: Path) -> None:
    """In processes of their own, whose hashes of strings differ, with nothing kept."""
    variant = Variant("few", (3, True, True, 16))
    code = (
        "from edgeq.targets.cuda.kernels.generate import generate; from edgeq.targets.cuda.pack import Variant, encode;"
        f"print(encode(generate(Variant({variant.kernel!r}, {variant.literals!r}))))"
    )
    (generated,) = build.kernels([variant])
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(other) == json.loads(encode(generated))
    assert nvrtc.compiled(generated, 87) == nvrtc.compiled(generated, 87)


def test_a_kernel_is_kept_and_a_damaged_one_is_generated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    variant = Variant("select")
    first = build.kernels([variant])
    (path,) = (tmp_path / "edgeq" / "cuda").iterdir()
    stored = path.read_text()
    assert build.kernels([variant]) == first
    for damage in ("", stored[:-20], stored.replace("select", "s")):
        path.write_text(damage)
        assert build.kernels([variant]) == first
        assert path.read_text() == stored
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file where the folder should be")
    assert build.kernels([variant]) == first


def test_without_tvm_the_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "refusal", lambda: "apache-tvm is not installed; run: pip install edgeq[build]")
    with pytest.raises(UnsupportedError, match=r"few_4_1_0_128 .* pip install edgeq\[build\]"):
        build.kernels([Variant("few", (4, True, False, 128))])
