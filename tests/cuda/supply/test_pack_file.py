"""Packs: what is written is read, and what a stranger could send is refused before anything of it is used.  No GPU, no TVM."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.errors import EdgeqError, FormatError, InputError, UnsupportedError
from edgeq.format import kernel_pack
from edgeq.format.container import ModelFile
from edgeq.format.embedded_kernels import embed
from edgeq.format.writer import Writer
from edgeq.system import machine, trust
from edgeq.targets import kernel_packs
from edgeq.targets.cuda.supply import build, nvrtc, pack_file, supply
from edgeq.targets.cuda.supply.nvrtc import Compiled
from edgeq.targets.cuda.supply.pack import Generated, Parameter, Variant
from edgeq.targets.cuda.supply.pack_file import Pack, Packed
from edgeq.targets.cuda.supply.supply import Supply, preferred
from tests.edgeq.format.sample_file import write_body

HEADER = struct.Struct("<8sII32s")


def packed(variant: Variant) -> Packed:
    """A kernel for two GPUs; nothing looks into its machine code."""
    symbol = variant.symbol
    generated = Generated(
        variant, f"{symbol}_kernel", f"text of {symbol}", (Parameter("pointer", "x"),), (["+", "n", 1], 1, 1), (32, 1, 1)
    )
    return Packed(
        generated, {arch: Compiled(arch, f"\x7fELF{arch}{symbol}".encode(), 40, 1024, 0) for arch in ("sm_80", "sm_87")}
    )


KERNELS = {variant: packed(variant) for variant in (Variant("matvec", (4, True, 128)), Variant("select"))}
WANTED = list(KERNELS)


def pack(**changes: Any) -> Pack:
    return replace(Pack(build.versions(), build.source_digest(), KERNELS), **changes)


def only(arch: str) -> Pack:
    """The same with the images of one architecture."""
    return pack(kernels={variant: replace(each, images={arch: each.images[arch]}) for variant, each in KERNELS.items()})


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model file with a cache folder of its own, on a machine without compilers."""
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(build, "refusal", lambda: "apache-tvm is not installed; run: pip install edgeq[build]")
    monkeypatch.setattr(nvrtc, "refusal", lambda: "NVRTC is not installed; run: pip install edgeq[build]")
    path = tmp_path / "model.edgeq"
    writer = Writer(path)
    writer.finish(write_body(writer))
    return path


def beside(model: Path, data: bytes, trusted: bool = True) -> None:
    kernel_pack.beside(model).write_bytes(data)
    if trusted:
        trust.trust(trust.digest_of(data))


def kernels(model: Path, sm: int = 87, arch: str | None = None, driver: int = supply.PTX_DRIVER) -> list[bytes]:
    """The images that a GPU would get; nothing may be compiled for them."""

    def compiled_now(done: int, symbol: str) -> None:
        raise AssertionError(symbol)

    return [each.image for each in Supply(ModelFile.open(model), sm, driver, arch)(WANTED, compiled_now)]


def image(arch: str) -> list[bytes]:
    return [KERNELS[variant].images[arch].image for variant in WANTED]


def test_a_pack_is_written_and_read_and_its_bytes_are_those_of_its_contents() -> None:
    data, versions = pack_file.encode(pack()), dict(reversed(build.versions().items()))
    assert pack_file.decode(data, "pack") == pack()
    assert data == pack_file.encode(pack(kernels=dict(reversed(KERNELS.items())), versions=versions))


def test_packs_are_joined_and_the_new_one_wins() -> None:
    first = WANTED[0]
    other = Packed(KERNELS[first].generated, {"sm_90": Compiled("sm_90", b"\x7fELF", 1, 2, 3)})

    def joined(before: Pack, made: Pack) -> Pack:
        return pack_file.pack_of(kernel_pack.joined(pack_file.sets(before), pack_file.sets(made)))

    both = joined(pack(), pack(kernels={first: other}))
    assert both.archs == ["sm_80", "sm_87", "sm_90"] and set(both.kernels[first].images) == {"sm_80", "sm_87", "sm_90"}
    again = Packed(KERNELS[first].generated, {"sm_87": Compiled("sm_87", b"\x7fELF new", 1, 2, 3)})
    renewed = joined(pack(), pack(kernels={first: again}))
    assert renewed.kernels[first].images["sm_87"].image == b"\x7fELF new" and set(renewed.kernels) == set(KERNELS)
    # Machine code of other sources is not that of these kernels: nothing of its architecture is kept.
    (old,) = pack_file.sets(replace(only("sm_87"), sources="0" * 32))
    (new,) = pack_file.sets(pack(kernels={first: again}))
    assert kernel_pack.joined([old], [new]) == [new]


def test_a_text_is_stored_once_for_all_architectures() -> None:
    data = pack_file.encode(pack())
    assert data.count(b"text of matvec_4_1_128") == 1 and data.count(b"\x7fELFsm_80matvec") == 1


def test_every_truncation_and_every_flipped_byte_is_found() -> None:
    data = pack_file.encode(pack())
    for end in range(len(data)):
        with pytest.raises(EdgeqError):
            pack_file.decode(data[:end], "pack")
    for at in range(len(data)):
        with pytest.raises(EdgeqError):
            pack_file.decode(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :], "pack")
    with pytest.raises(FormatError, match="bytes that nothing describes"):
        pack_file.decode(data + b"\0", "pack")


def test_a_flipped_byte_in_machine_code_names_the_kernel() -> None:
    data = pack_file.encode(pack())
    at = data.index(b"\x7fELFsm_87matvec")
    with pytest.raises(FormatError, match=r"pack: piece \d does not match its digest"):
        pack_file.decode(data[:at] + b"\x7fELG" + data[at + 4 :], "pack")


def described(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A pack whose description was changed by somebody who knows the format: its digest is right."""
    data = pack_file.encode(pack())
    _, _, length, _ = HEADER.unpack(data[: HEADER.size])
    about = json.loads(data[HEADER.size : HEADER.size + length])
    text = change(about)
    description = text if isinstance(text, bytes) else json.dumps(about).encode()
    head = HEADER.pack(b"edgeqker", 1, len(description), hashlib.blake2b(description, digest_size=32).digest())
    return head + description + data[HEADER.size + length :]


def kernel(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """Changes what a target says of the first kernel."""
    return lambda about: about["sets"][0]["kernels"][0]["about"].update(changes)


def first(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """Changes what the container says of the first kernel."""
    return lambda about: about["sets"][0]["kernels"][0].update(changes)


def of_set(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda about: about["sets"][0].update(changes)


DEEP: Any = 1
for _ in range(100):
    DEEP = ["+", DEEP, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda about: b"",
        lambda about: b"{",
        lambda about: b"[" * 100_000,
        lambda about: b"[]",
        lambda about: b"null",
        lambda about: about.clear(),
        lambda about: about.update(sets=about["sets"] * 100),
        lambda about: about.update(sets=[about["sets"][0]] * 2),
        lambda about: about.update(sets={"a": 1}),
        lambda about: about.update(sets=5),
        lambda about: about.update(pieces={"a": 1}),
        lambda about: about.update(pieces=about["pieces"][:-1]),
        lambda about: about["pieces"][0].update(bytes=-1),
        lambda about: about["pieces"][0].update(bytes=10**30),
        lambda about: about["pieces"][0].update(bytes=True),
        lambda about: about["pieces"][0].update(bytes=1.0),
        lambda about: about["pieces"][0].update(digest=None),
        lambda about: of_set(kernels=about["sets"][0]["kernels"] * 5000)(about),
        lambda about: of_set(kernels=[about["sets"][0]["kernels"][0]] * 2)(about),
        of_set(kernels={"a": 1}),
        of_set(kernels=5),
        of_set(versions={"\x1b[31m": "1"}),
        of_set(versions={"a": 1}),
        of_set(versions={f"a{i}": "1" for i in range(100)}),
        of_set(sources=None),
        of_set(sources="another"),
        of_set(target="\x1b[2J"),
        of_set(arch="../../etc"),
        of_set(arch="sparc"),
        of_set(arch="sm_87"),
        first(name="../matvec"),
        first(name=5),
        first(pieces=[0]),
        first(pieces=[-1, 0]),
        first(pieces=[0, 1000]),
        first(pieces=[0, True]),
        first(pieces=[0] * 100),
        first(pieces=5),
        first(about=None),
        first(about=[]),
        kernel(registers="many"),
        kernel(registers=None),
        kernel(variant=["../matvec"]),
        kernel(variant=["matvec", 1.5]),
        kernel(variant=["matvec", *range(100)]),
        kernel(variant=[["matvec"]]),
        kernel(name="a\nb"),
        kernel(name=5),
        kernel(grid=["__import__('os').system('true')", 1, 1]),
        kernel(grid=[["**", 9, 9], 1, 1]),
        kernel(grid=[DEEP, 1, 1]),
        kernel(grid=[1, 1]),
        kernel(grid=[1 << 70, 1, 1]),
        kernel(block=[None, 1, 1]),
        kernel(parameters=[{"type": "int8", "value": "x"}]),
        kernel(parameters=[{"type": "int32", "value": "x"}] * 1000),
        kernel(parameters=5),
    ],
)
def test_a_hostile_description_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(FormatError):
        pack_file.decode(described(change), "pack")


def test_another_version_of_the_format_is_refused() -> None:
    data = pack_file.encode(pack())
    with pytest.raises(UnsupportedError, match="version 2; this edgeq reads 1"):
        pack_file.decode(data[:8] + struct.pack("<I", 2) + data[12:], "pack")


def test_a_pipe_a_folder_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    assert kernel_pack.read(tmp_path / "nothing") is None
    with pytest.raises(InputError):
        kernel_pack.read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a file"):
        kernel_pack.read(tmp_path / "pipe")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(kernel_pack.MAX_BYTES + 1)
    with pytest.raises(FormatError, match="at most"):
        kernel_pack.read(tmp_path / "huge")


def test_kernels_come_from_the_pack_beside_the_file_once_it_is_trusted(model: Path) -> None:
    data = pack_file.encode(pack())
    beside(model, data, trusted=False)
    reason = Supply(ModelFile.open(model), 87).refusal()
    assert reason is not None and "made elsewhere" in reason and trust.digest_of(data) in reason and "--trust-kernels" in reason
    with pytest.raises(
        UnsupportedError, match=r"2 kernels for sm_87 are missing: matvec_4_1_128, select .*build .*model.edgeq --for sm_87"
    ):
        kernels(model)
    (accepted,) = kernel_packs.accept(ModelFile.open(model))
    assert accepted.digest == trust.digest_of(data)
    assert Supply(ModelFile.open(model), 87).refusal() is None and kernels(model) == image("sm_87")
    # Another byte is another pack.
    beside(model, pack_file.encode(only("sm_87")), trusted=False)
    with pytest.raises(UnsupportedError, match="made elsewhere"):
        kernels(model)


def test_kernels_come_from_the_packs_inside_the_file(model: Path) -> None:
    before = ModelFile.open(model)
    packs = {arch: pack_file.encode(only(arch)) for arch in ("sm_80", "sm_87")}
    file = embed(before, packs, model)
    assert list(file.verify()) and set(file.metadata.kernels) == {"sm_80", "sm_87"}
    assert np.array_equal(file.array(file.metadata.arrays["norm"]), before.array(before.metadata.arrays["norm"]))
    with pytest.raises(UnsupportedError, match=r"model.edgeq \(sm_80\): machine code"):
        kernels(model)
    assert (
        len(kernel_packs.accept(ModelFile.open(model))) == 2
        and kernels(model) == image("sm_87")
        and kernels(model, 86) == image("sm_80")
    )
    # A second time: the new ones take the place of the old ones, and nothing is left over.
    again = embed(ModelFile.open(model), {"sm_87": packs["sm_87"]}, model)
    assert again.size == file.size and again.identity == file.identity


def test_a_huge_segment_is_not_read_as_a_pack(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with a hole can state any size: it takes no memory, and what would be copied of it does."""
    data = pack_file.encode(pack())
    file = embed(ModelFile.open(model), {"sm_87": data}, model)
    monkeypatch.setattr(kernel_pack, "MAX_BYTES", len(data) - 1)
    (found,) = supply.packs(file)
    assert found.pack is None and f"(sm_87): {len(data):,} bytes; a pack of kernels has at most" in str(found.refused)


def test_a_refusal_has_nothing_that_a_terminal_obeys(model: Path) -> None:
    embed(ModelFile.open(model), {"sm_87\x1b]0;title\x07": pack_file.encode(pack())}, model)
    (found,) = supply.packs(ModelFile.open(model))
    assert "machine code" in str(found.refused) and str(found.refused).isprintable() and found.name.isprintable()


def test_what_another_gpu_needs_is_named(model: Path) -> None:
    beside(model, pack_file.encode(only("sm_87")))
    reason = Supply(ModelFile.open(model), 89).refusal()
    assert reason is not None and "kernels for sm_87 only" in reason and "--for sm_89" in reason
    with pytest.raises(UnsupportedError, match="2 kernels for sm_89 are missing"):
        kernels(model, 89)
    with pytest.raises(UnsupportedError, match="sm_80 are missing"):
        kernels(model, 87, "sm_80")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sources": "0" * 32}, "another version of edgeq"),
        ({"versions": {**build.versions(), "apache-tvm": "0.1"}}, "made by apache-tvm 0.1, this edgeq takes"),
        ({"versions": {**build.versions(), "nvidia-cuda-nvrtc-cu12": "13.0"}}, "made by nvidia-cuda-nvrtc-cu12 13.0"),
    ],
)
def test_a_pack_of_another_generator_is_refused_even_if_trusted(model: Path, changes: dict[str, Any], match: str) -> None:
    beside(model, pack_file.encode(pack(**changes)))
    with pytest.raises(UnsupportedError, match=match):
        kernels(model)


def test_a_damaged_pack_is_told_and_not_used(model: Path) -> None:
    beside(model, pack_file.encode(pack())[:-3])
    with pytest.raises(UnsupportedError, match="truncated or hostile"):
        kernels(model)
    with pytest.raises(InputError, match="truncated or hostile"):
        kernel_packs.accept(ModelFile.open(model))


def test_trust_that_cannot_be_remembered_is_an_error(model: Path, tmp_path: Path) -> None:
    beside(model, pack_file.encode(pack()), trusted=False)
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(InputError, match="set XDG_CACHE_HOME"):
        kernel_packs.accept(ModelFile.open(model))


def test_nothing_is_trusted_where_the_cache_cannot_be_looked_into(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside(model, pack_file.encode(pack()))
    monkeypatch.setattr(machine, "cache_folder", lambda: Path("/" + "a" * 300))
    with pytest.raises(UnsupportedError, match="machine code that was made elsewhere"):
        kernels(model)


def test_without_a_pack_there_is_nothing_to_trust(model: Path) -> None:
    with pytest.raises(InputError, match="no pack of kernels .* edgeq build"):
        kernel_packs.accept(ModelFile.open(model))


@pytest.mark.parametrize(
    ("sm", "driver", "wanted"),
    [
        (80, 12060, ["sm_80", "compute_80"]),
        (86, 12060, ["sm_86", "sm_80", "compute_80"]),
        (89, 12060, ["sm_89", "sm_86", "sm_80", "compute_80"]),
        # NVIDIA promises nothing between boards and cards.
        (87, 12060, ["sm_87", "compute_80"]),
        (90, 12000, ["sm_90"]),
        (120, 12080, ["compute_80"]),
        (120, 12040, []),
        (75, 12060, []),
    ],
)
def test_the_machine_code_that_a_gpu_runs(sm: int, driver: int, wanted: list[str]) -> None:
    assert preferred(["compute_80", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90"], sm, driver) == wanted
