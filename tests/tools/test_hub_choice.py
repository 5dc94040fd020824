"""Which files of a repository are a model, and which model a name of the hub means."""

from __future__ import annotations

import pytest

from edgeq.errors import CheckpointError, InputError
from edgeq.tools.hub.choice import HubModel, RepositoryFile, chosen, models_in, tower_in
from edgeq.tools.hub.names import HubName, hub_name


def models(*paths: str) -> list[HubModel]:
    return models_in(RepositoryFile(path, 1_000_000, "0" * 64) for path in paths)


def path(name: str, *paths: str) -> str | None:
    found = chosen(hub_name(name), models(*paths))
    return found and found.files[0].path


def test_a_name_is_taken_apart() -> None:
    assert hub_name("hf:a/b") == HubName("a/b") and hub_name("hf:a/b.c-d:Q4_K_M") == HubName("a/b.c-d", "Q4_K_M")
    assert str(hub_name("hf:a/b:q8_0")) == "hf:a/b:q8_0"


@pytest.mark.parametrize(
    "text", ["hf:", "hf:a", "hf:a/b/c", "hf:a/b:", "hf:/a", "hf:a/b:x y", "hf:../..//x", "a/b", "hf:a/b:c:d"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="expected hf:ORG/REPO"):
        hub_name(text)


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("gemma-3-270m-q4_k_m.gguf", "Q4_K_M"),
        ("sub/Qwen3-0.6B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("phi-3-mini-4k-instruct-fp16.gguf", "F16"),
        ("m.BF16.gguf", "BF16"),
        ("m-IQ4_XS.GGUF", "IQ4_XS"),
        ("gpt-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("ggml-model.gguf", "ggml-model"),
        ("Qwen2.5.gguf", "Qwen2.5"),
    ],
)
def test_the_type_is_read_from_the_name(file: str, quant: str) -> None:
    assert [model.quant for model in models(file)] == [quant]


def test_a_projector_and_an_importance_matrix_are_no_models() -> None:
    assert not models("mmproj-F16.gguf", "m.imatrix.gguf", "imatrix.gguf", "README.md", "config.json", "model.safetensors")


def test_of_several_towers_the_nearest_and_smallest_comes_first() -> None:
    def tower(*paths: str) -> str | None:
        files = [RepositoryFile(path, 1_000_000, "0" * 64) for path in paths]
        found = tower_in(files, models_in(files)[0])
        return found and found.files[0].path

    assert tower("m.gguf", "mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf") == "mmproj-F16.gguf"
    assert tower("m.gguf", "m-mmproj-f16.gguf", "mmproj-m-Q8_0.GGUF") == "mmproj-m-Q8_0.GGUF"
    assert tower("a/m.gguf", "b/mmproj-Q8_0.gguf", "a/mmproj.gguf") == "a/mmproj.gguf"
    assert tower("m.gguf", "mmproj.txt") is None


def test_a_split_file_is_one_model_if_it_is_whole() -> None:
    parts = [f"Q8_0/m-Q8_0-{i:05}-of-00003.gguf" for i in (2, 1, 3)]
    [model] = models(*parts)
    assert model.quant == "Q8_0" and [file.path for file in model.files] == sorted(parts) and model.size == 3_000_000
    assert not models(*parts[:2])


TYPES = ("m-Q8_0.gguf", "m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-F16.gguf")


@pytest.mark.parametrize(
    ("name", "paths", "expected"),
    [
        ("hf:a/b", TYPES, "m-Q4_K_M.gguf"),
        ("hf:a/b", ("m-Q8_0.gguf", "m-F16.gguf"), "m-Q8_0.gguf"),
        ("hf:a/b", ("m-F16.gguf",), "m-F16.gguf"),
        ("hf:a/b:q8_0", TYPES, "m-Q8_0.gguf"),
        ("hf:a/b:m-F16.gguf", TYPES, "m-F16.gguf"),
        ("hf:a/b:M-f16", TYPES, "m-F16.gguf"),
        ("hf:a/b", (*TYPES, "m.edgeq"), "m.edgeq"),
        ("hf:a/b:Q4_0", (*TYPES, "m.edgeq"), "m-Q4_0.gguf"),
        ("hf:a/b:i4", (*TYPES, "m-i4.edgeq", "m-i3.edgeq"), "m-i4.edgeq"),
        ("hf:a/b:Q4_K_XL", ("m-UD-Q4_K_XL.gguf", "m-Q8_0.gguf"), "m-UD-Q4_K_XL.gguf"),
        ("hf:a/b:UD-Q4_0", ("m-UD-Q4_0.gguf", "m-Q4_0.gguf"), "m-UD-Q4_0.gguf"),
        ("hf:a/b:Q4_0", ("m-UD-Q4_0.gguf", "m-Q4_0.gguf"), "m-Q4_0.gguf"),
        ("hf:a/b", ("README.md",), None),
    ],
)
def test_the_model_that_is_meant(name: str, paths: tuple[str, ...], expected: str | None) -> None:
    assert path(name, *paths) == expected


@pytest.mark.parametrize(
    ("name", "paths", "words"),
    [
        ("hf:a/b:Q3_K", TYPES, ["'Q3_K'", "Q8_0 (1 MB)", "Q4_K_M (1 MB)"]),
        ("hf:a/b", ("m-F16.gguf", "m-BF16.gguf"), ["hf:a/b:QUANT", "F16", "BF16"]),
        ("hf:a/b", ("a.edgeq", "b.edgeq", "m-Q4_K_M.gguf"), ["more than one", "a.edgeq", "b.edgeq"]),
        ("hf:a/b:Q4_0", ("x-Q4_0.gguf", "y-Q4_0.gguf"), ["more than one", "x-Q4_0.gguf", "y-Q4_0.gguf"]),
        ("hf:a/b", ("x-Q4_K_M.gguf", "y-Q4_K_M.gguf"), ["more than one", "x-Q4_K_M.gguf"]),
    ],
)
def test_a_name_that_says_too_little_is_answered_with_what_there_is(
    name: str, paths: tuple[str, ...], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as error:
        path(name, *paths)
    assert all(word in str(error.value) for word in words), error.value


def test_a_long_list_is_cut() -> None:
    with pytest.raises(CheckpointError, match="and 26 more"):
        path("hf:a/b:none", *(f"m{i}.gguf" for i in range(50)))
