"""`edgeq embed` and `edgeq rerank`, and what other commands say of their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgeq.runtime import Model
from tests.checkpoints.embeddings import PROMPTS, embedding_checkpoint
from tests.checkpoints.encoders import bert_reranker, qwen3_reranker
from tests.cli.refusal import refused
from tests.cli.running import Run, objects

QUERY = "What is the capital of France?"
DOCUMENTS = ["Bananas are yellow.", "Paris is the capital.", "tab\there"]


@pytest.fixture(scope="module")
def source(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embeds") / "source"
    return embedding_checkpoint(checkpoint("qwen3"), folder, "last", ends=True, prompts=PROMPTS)


@pytest.fixture(scope="module")
def embeds(source: Path, edgeq: Run) -> Path:
    path = source.parent / "embeds.edgeq"
    result = edgeq("convert", source, "-o", path, "--bits", 8, "--group-size", 32)
    assert result.exit_code == 0, result.stderr
    return path


def test_a_line_for_every_text(edgeq: Run, embeds: Path, tmp_path: Path) -> None:
    with Model.load(embeds) as model:
        wanted = model.embed(["How tall is it?", "b"])
        asked = model.embed(["How tall is it?", "b"], prompt="query", dimensions=16)
    result = edgeq("embed", embeds, "-p", "How tall is it?", "-p", "b")
    assert result.exit_code == 0, result.stderr
    assert np.array_equal(np.array([json.loads(line) for line in result.stdout.splitlines()], np.float32), wanted)
    assert (
        "i8 g32 zero, embedding i8 g128" in result.stderr and "embedded 2 texts" in result.stderr and "tok/s" in result.stderr
    )
    given = ("--prompt", "query", "--dimensions", 16, "--json")
    found = objects(edgeq("embed", embeds, *given, input="How tall is it?\nb\n"))
    assert np.array_equal(np.array(found["embeddings"], np.float32), asked)
    assert (found["texts"], found["model"], found["head_codec"]) == (2, "source", "i8 g128") and found["tokens"] > 2
    lines = tmp_path / "texts.jsonl"
    lines.write_text('"How tall is it?"\n{"text": "b", "id": 5}\n')
    found = objects(edgeq("embed", embeds, "--file", lines, "--json"))
    assert np.array_equal(np.array(found["embeddings"], np.float32), wanted)


def test_a_long_text_gets_a_context(edgeq: Run, embeds: Path) -> None:
    long = "word " * 1300
    refused(edgeq("embed", embeds, "-p", long), "tokens, the context 512 positions")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("there is no text: give -p TEXT",)),
        (("-p", ""), ("an empty text",)),
        (("-p", "a", "--file", "{lines}"), ("both -p and --file",)),
        (("--file", "{lines}"), ("line 2: not JSON", '{"text": "..."}')),
        (("--file", "{numbers}"), ("line 1: expected",)),
        (("--file", "{none}"), ("cannot read it",)),
        (("-p", "a", "--dimensions", "0"), ("expected an integer from 1 to 128",)),
        (("-p", "a", "--prompt", "q"), ("no prompt 'q'; it has document, query",)),
        (("-p", "a", "-c", "5000"), ("5000 is out of range",)),
    ],
)
def test_what_cannot_be_embedded_is_one_line(
    arguments: tuple[str, ...], words: tuple[str, ...], edgeq: Run, embeds: Path, tmp_path: Path
) -> None:
    (tmp_path / "lines").write_text('"a"\nb\n')
    (tmp_path / "numbers").write_text("5\n")
    places = {name: str(tmp_path / name) for name in ("lines", "numbers", "none")}
    given = [argument.format(**places) if argument.startswith("{") else argument for argument in arguments]
    refused(edgeq("embed", embeds, *given, input=""), *words)


def test_a_model_that_continues_texts_does_not_embed(edgeq: Run, demo: Path) -> None:
    refused(edgeq("embed", demo, "-p", "a"), "continues texts", "not trained for them", "convert an embedding model")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "-p", "a"),
        ("chat",),
        ("bench",),
        ("profile",),
        ("fit", "--for", "raspberry-pi-5"),
    ],
)
def test_other_commands_say_what_the_file_is_for(arguments: tuple[str, ...], edgeq: Run, embeds: Path) -> None:
    name, *rest = arguments
    refused(edgeq(name, embeds, *rest, input=""), "embeds texts (last pooling)", "edgeq embed")


def test_compare_has_the_cosine_with_the_source(edgeq: Run, embeds: Path, source: Path, demo: Path, tmp_path: Path) -> None:
    exact, two = tmp_path / "exact.edgeq", tmp_path / "two.edgeq"
    assert edgeq("convert", source, "-o", exact, "--method", "none").exit_code == 0
    assert edgeq("convert", source, "-o", two, "--bits", 2, "--group-size", 32).exit_code == 0
    size = ("--window", 32, "--limit", 512)
    facts = objects(edgeq("compare", exact, embeds, two, "--against", source, *size, "--json"))
    cosines = [file["cosine"]["value"] for file in facts["files"]]
    assert cosines[0] > 0.9999 > cosines[1] > 0.99 > cosines[2]
    assert all(file["cosine_least"] <= file["cosine"]["low"] <= file["cosine"]["high"] < 1.000001 for file in facts["files"])
    assert facts["files"][0]["nearest_agreement"] == 1 and (facts["windows"], facts["window"]) == (16, 32)
    table = edgeq("compare", embeds, "--against", exact, *size)
    assert "cosine with source" in table.stdout and "source exact.edgeq; 16 windows of 32 tokens of code" in table.stdout
    refused(edgeq("compare", embeds, demo, "--against", source), "embeds texts and others continue them")
    refused(edgeq("compare", demo, "--against", embeds), "embeds texts (last pooling)")
    refused(edgeq("compare", demo, "--against", source), "embeds texts and the files continue them")
    mean = tmp_path / "mean.edgeq"
    plain = shutil.copytree(source, tmp_path / "plain")
    (plain / "modules.json").unlink()
    assert edgeq("convert", plain, "-o", mean, "--pooling", "mean").exit_code == 0
    refused(edgeq("compare", mean, embeds, "--against", source), "pool differently (last and mean)")


def test_how_fast_it_reads_is_measured(edgeq: Run, embeds: Path) -> None:
    result = edgeq("bench", embeds, "-p", 32, "-n", 0, "-r", 1)
    assert result.exit_code == 0 and "pp32" in result.stdout, result.stderr


def test_inspect_says_how_it_pools(edgeq: Run, embeds: Path) -> None:
    result = edgeq("inspect", embeds)
    assert "no head: embeds texts, last pooling, normalized" in result.stdout and "head 8" not in result.stdout
    found = objects(edgeq("inspect", embeds, "--json"))
    assert found["config"]["pooling"] == {"kind": "last", "normalize": True} and "head" not in found["bits_per_weight"]


def test_a_checkpoint_without_modules_needs_to_be_told(edgeq: Run, source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "plain")
    (folder / "modules.json").unlink()
    out = tmp_path / "a.edgeq"
    refused(edgeq("convert", folder, "-o", out), "Qwen3Model has no head", "--pooling last or --pooling mean")
    assert edgeq("convert", folder, "-o", out, "--pooling", "mean").exit_code == 0
    assert "mean pooling, normalized" in edgeq("inspect", out).stdout
    refused(edgeq("convert", source, "-o", out, "--pooling", "mean", "--force"), "modules.json says last")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, edgeq: Run) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    result = edgeq("convert", bert_reranker(folder / "source"), "-o", folder / "ranks.edgeq", "--bits", 8, "--group-size", 32)
    assert result.exit_code == 0, result.stderr
    return folder / "ranks.edgeq"


def test_a_line_for_every_document_the_best_first(edgeq: Run, ranks: Path, tmp_path: Path) -> None:
    with Model.load(ranks) as model:
        wanted = model.rerank(QUERY, DOCUMENTS)
    result = edgeq("rerank", ranks, "-q", QUERY, *DOCUMENTS)
    assert result.exit_code == 0, result.stderr
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert [(int(index), json.loads(text)) for _, index, text in lines] == [(i, DOCUMENTS[i]) for i, _ in wanted]
    assert all(abs(float(line[0]) - score) <= 1e-6 for line, (_, score) in zip(lines, wanted, strict=True))
    assert "ranked   3 documents" in result.stderr and "tok/s" in result.stderr
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    found = objects(edgeq("rerank", ranks, "-q", QUERY, "--file", file, "-n", 2, "--json"))
    results = [{"index": i, "relevance_score": score, "document": {"text": DOCUMENTS[i]}} for i, score in wanted[:2]]
    assert found["results"] == results and found["documents"] == 3 and found["tokens"] > 3
    found = objects(edgeq("rerank", ranks, "-q", QUERY, "--json", input="\n".join(DOCUMENTS)))
    assert [each["index"] for each in found["results"]] == [i for i, _ in wanted]


def test_a_decoder_ranks_by_an_instruction(edgeq: Run, ranks: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.edgeq"
    assert edgeq("convert", qwen3_reranker(tmp_path / "source"), "-o", out, "--rerank", "qwen3", "--bits", 8).exit_code == 0
    with Model.load(out) as model:
        wanted = {text: model.rerank(QUERY, DOCUMENTS, instruction=text) for text in (None, "find what is yellow")}
    for text, best in wanted.items():
        given = ("--instruction", text) if text else ()
        shown = edgeq("rerank", out, "-q", QUERY, *given, *DOCUMENTS).stdout.splitlines()
        assert [line.split("\t")[:2] for line in shown] == [[f"{score:.6f}", str(i)] for i, score in best]
    assert wanted[None] != wanted["find what is yellow"]
    refused(edgeq("rerank", ranks, "-q", QUERY, "a", "--instruction", "b"), "reads no instruction")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-q", "a"), ("there is no document: give DOC...",)),
        (("-q", "", "a"), ("`query` has an empty text",)),
        (("-q", "a", "b", "--file", "c"), ("both DOC and --file",)),
        (("-q", "a", "b", "-n", "0"), ("top_n",)),
        (("-q", "a", "b " * 200), ("tokens, the context 192 positions",)),
    ],
)
def test_what_cannot_be_ranked_is_one_line(arguments: tuple[str, ...], words: tuple[str, ...], edgeq: Run, ranks: Path) -> None:
    refused(edgeq("rerank", ranks, *arguments, input=""), *words)


def test_other_models_and_other_commands(edgeq: Run, ranks: Path, demo: Path) -> None:
    refused(edgeq("rerank", demo, "-q", "a", "b"), "continues texts", "convert a reranker")
    refused(edgeq("embed", ranks, "-p", "a"), "gives a score", "edgeq rerank")
    refused(edgeq("run", ranks, "-p", "a"), "ranks documents", "edgeq rerank")
    shown = edgeq("inspect", ranks)
    assert "no head: ranks documents" in shown.stdout
