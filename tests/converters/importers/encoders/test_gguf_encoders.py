"""GGUF files of encoders and rerankers: the same network, vectors and scores as of the checkpoint, and their tokenizers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file
from tokenizers import normalizers
from transformers import AutoTokenizer

from edgeq.converters.convert import carry_out
from edgeq.converters.importers.gguf_texts import write_texts
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.running.readback import stored_tensors
from edgeq.errors import CheckpointError, EdgeqError, UnsupportedError
from edgeq.network.pooling import Pooling
from edgeq.runtime import Model
from edgeq.runtime.network.embedding import sigmoid
from edgeq.text.tokenizer import Tokenizer
from edgeq.tools.cli.main import main
from tests.checkpoints.encoders import (
    bert,
    bert_reranker,
    modernbert,
    modernbert_reranker,
    nomic_bert,
    write_word_pieces,
    xlm_reranker,
    xlm_roberta,
)
from tests.converters.importers.conversions import plan_of, silent
from tests.converters.importers.gguf_files import in_type, write_gguf

SPACE = "\u2581"
EVERY_THIRD: dict[str, Any] = {"layer_types": None, "global_attn_every_n_layers": 3}
"""Layers without a window as a file says them."""
MAKERS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "bert": (bert, {"hidden_act": "gelu"}),
    "xlm_roberta": (xlm_roberta, {}),
    "nomic_bert": (nomic_bert, {}),
    "bert_reranker": (bert_reranker, {}),
    "xlm_reranker": (xlm_reranker, {}),
    "modernbert": (modernbert, {**EVERY_THIRD, "hidden_activation": "silu"}),
    "modernbert_reranker": (modernbert_reranker, {**EVERY_THIRD, "classifier_bias": False, "classifier_pooling": "cls"}),
}
"""Checkpoints with the activation that published models have, which only files of ModernBERT name."""
POOLINGS = {"bert": ("cls", 2), "xlm_roberta": ("mean", 1), "nomic_bert": ("mean", 1), "modernbert": ("mean", 1)}
ARCHITECTURES = {"nomic_bert": "nomic-bert", "modernbert": "modern-bert", "modernbert_reranker": "modern-bert"}
"""llama.cpp's name of a family that is not of its "bert"."""
QUERY, DOCUMENTS = "What is the capital?", ["Paris", "the cat?", "x" * 40, "Père Noël, 7"]
TEXTS = [
    "a",
    "The Paris-ing of 12.5, isn't it?",
    "PÈRE noël\u0301 \u4e2d\u6587 b\tc\u00a0d",
    "z" * 99,
    "z" * 101,
    "[SEP] a ##a",
]


def floats(name: str, values: Any) -> Type:
    return Type.F32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in made:
            maker, changes = MAKERS[family]
            made[family] = maker(tmp_path_factory.mktemp(family), **changes)
        return made[family]

    return find


def word_pieces(folder: Path, rows: int) -> dict[str, Any]:
    """The metadata that llama.cpp's converter makes of a WordPiece tokenizer for a table of so many rows."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    special = {"[CLS]": "cls", "[SEP]": "seperator", "[UNK]": "unknown", "[PAD]": "padding", "[MASK]": "mask"}
    tokens, kinds = list[str](), list[int]()
    for token in (*vocabulary, *(f"[PAD{i}]" for i in range(len(vocabulary), rows))):
        kinds.append(3 if token in special else 1 if token in vocabulary else 5)
        tokens.append(token if token in special else token[2:] if token.startswith("##") else SPACE + token)
    ids = {f"tokenizer.ggml.{name}_token_id": vocabulary[token] for token, name in special.items()}
    texts = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.pre": "default", "tokenizer.ggml.token_type_count": 2}
    return texts | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds} | ids


def file_of(folder: Path, path: Path, family: str, choose: Callable[[str, Any], Type] = floats, **changes: Any) -> Path:
    """A GGUF file of a checkpoint; `changes` of its metadata, None: without the key."""

    def change(keys: dict[str, Any]) -> None:
        own = ARCHITECTURES.get(family, "bert")
        keys |= {f"{own}.pooling_type": POOLINGS[family][1]} if family in POOLINGS else {}
        keys |= {key.replace("__", "."): value for key, value in changes.items()}
        for key in [key for key, value in keys.items() if value is None]:
            del keys[key]

    write_gguf(folder, path, choose, change)
    return path


def vectors(plan: ConversionPlan, path: Path) -> np.ndarray[Any, Any]:
    """What it gives for some texts: vectors, or the scores of a reranker."""
    file = carry_out(plan, path, silent).file
    with Model.load(file.path, target="reference", threads=1) as model:
        if plan.method.config.pooling.ranks:
            return np.array([each.relevance_score for each in sorted(model.rerank(QUERY, DOCUMENTS))])
        return model.embed([[2, 7, 9, 3], [2, 50, 3], list(range(4, 130))])


@pytest.mark.parametrize("family", MAKERS)
def test_a_file_runs_as_the_checkpoint_that_it_was_made_of(
    family: str, source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, own = source(family), {}
    if family == "bert_reranker":
        own = word_pieces(folder, 2048)
    else:
        # That of an XLM-R is another one; these have that of the demo model, or of BERT.
        monkeypatch.setattr("edgeq.converters.importers.gguf_source.write_texts", tokenizer_of(folder))
    path = file_of(folder, tmp_path / "m.gguf", family, **own)
    wanted, found = (plan_of(place, method="none") for place in (folder, path))
    ours, theirs = found.method.config, wanted.method.config
    assert ours.pooling and theirs.pooling and ours.segments == theirs.segments == 1 + (family == "bert_reranker")
    assert (ours.max_position_embeddings, ours.rms_norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    shapes = wanted.method.family.tensor_shapes()
    assert shapes == found.method.family.tensor_shapes()
    for name, shape in shapes.items():
        values = (plan.checkpoint.rows(name, 0, shape[0]) for plan in (wanted, found))
        assert np.array_equal(*values), name
    expected = vectors(wanted, tmp_path / "wanted.edgeq")
    if family in POOLINGS:
        assert ours.pooling == Pooling(POOLINGS[family][0], normalize=True)
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    else:
        before = "gelu" if family == "modernbert_reranker" else "tanh"
        assert [(layer.width, layer.activation) for layer in ours.pooling.dense] == [(96, before), (1, "sigmoid")]
        assert expected.max() - expected.min() > 0.01
        expected = expected if theirs.pooling.dense[1].activation == "sigmoid" else sigmoid(expected)
    np.testing.assert_allclose(vectors(found, tmp_path / "found.edgeq"), expected, rtol=1e-5, atol=1e-6)


def tokenizer_of(folder: Path) -> Callable[..., None]:
    def write(metadata: Any, place: Path, given: Path | None = None, picture: str = "") -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (place / name).write_bytes((folder / name).read_bytes())

    return write


@pytest.mark.usefixtures("tiny_tokenizer")
def test_integers_are_kept(source: Any, tmp_path: Path) -> None:
    """But those of positions, to which segments are added."""

    def choose(name: str, values: Any) -> Type:
        return Type.F32 if name.startswith(("position", "token_types")) else in_type(Type.Q4_1)(name, values)

    # Rows of whole blocks.
    folder = bert(tmp_path, hidden_act="gelu", intermediate_size=128)
    plan = plan_of(file_of(folder, tmp_path / "m.gguf", "bert", choose))
    file = carry_out(plan, tmp_path / "m.edgeq", silent).file
    assert {weight.codec.name for each in file.metadata.linears.values() for weight in each.weights} == {"i4 g32 offset"}
    read = stored_tensors(file.path, file.segments, [item for step in plan.steps for item in step.items])
    floats = plan_of(folder, method="none").checkpoint
    for name, shape in plan.method.family.tensor_shapes().items():
        values = floats.rows(name, 0, shape[0])
        if values.ndim > 1 and "positions" not in name:
            values = gguf.dequantize(gguf.quantize(values, Type.Q4_1), Type.Q4_1)
        assert np.array_equal(read(name), values), name


@pytest.mark.usefixtures("tiny_tokenizer")
def test_matrices_of_one_row_may_be_vectors(source: Any, tmp_path: Path) -> None:
    """So programs of C write them."""
    folder, names = source("xlm_reranker"), ("roberta.embeddings.token_type_embeddings", "classifier.out_proj")
    stored = load_file(folder / "model.safetensors")
    flat = {f"{name.removeprefix('roberta.')}.weight": stored[f"{name}.weight"][0] for name in names}
    assert [each.shape for each in flat.values()] == [(96,), (96,)]
    write_gguf(folder, tmp_path / "flat.gguf", floats, tensors=flat)
    wanted, found = (plan_of(place, method="none") for place in (folder, tmp_path / "flat.gguf"))
    for name, shape in wanted.method.family.tensor_shapes().items():
        values = (plan.checkpoint.rows(name, 0, shape[0]) for plan in (wanted, found))
        assert np.array_equal(*values), name


@pytest.mark.usefixtures("tiny_tokenizer")
def test_an_older_file_of_a_modernbert_says_neither_activation_nor_pooling(source: Any, tmp_path: Path) -> None:
    older = {f"modern-bert__{key}": None for key in ("hidden_activation", "classifier__pooling_type")}
    config = plan_of(file_of(source("modernbert_reranker"), tmp_path / "m.gguf", "modernbert_reranker", **older)).method.config
    assert config.pooling and (config.pooling.kind, config.hidden_act) == ("mean", "gelu")


REFUSED: list[tuple[str, dict[str, Any], type[EdgeqError], str]] = [
    ("bert", {"bert__attention__causal": True}, CheckpointError, "attention.causal is True; expected false"),
    ("bert", {"bert__pooling_type": 5}, CheckpointError, "pooling_type is 5; expected 0 to 4"),
    ("bert", {"bert__pooling_type": 4}, UnsupportedError, "pooling_type is 4, a reranker, and the file has no head"),
    ("bert", {"bert__pooling_type": 0}, UnsupportedError, "give --pooling mean or --pooling cls"),
    ("nomic_bert", {"nomic-bert__attention__causal": True}, CheckpointError, "attention.causal is True; expected false"),
    ("nomic_bert", {"nomic-bert__rope__scaling__type": "dynamic"}, UnsupportedError, "rope.scaling.type is 'dynamic'"),
    ("modernbert", {"modern-bert__attention__layer_norm_rms_epsilon": 1e-5}, UnsupportedError, "rms_epsilon is 1e-05; supp"),
    ("modernbert", {"modern-bert__attention__sliding_window_pattern": 0}, CheckpointError, "pattern is 0; expected a posit"),
    ("modernbert", {"modern-bert__attention__causal": True}, CheckpointError, "attention.causal is True; expected false"),
    ("modernbert", {"modern-bert__hidden_activation": "relu"}, UnsupportedError, "'relu' is not supported; supported: gelu, s"),
    ("modernbert", {"modern-bert__hidden_activation": [1, 2]}, CheckpointError, "hidden_activation is .*; expected a name"),
    ("modernbert_reranker", {"modern-bert__classifier__pooling_type": 3}, CheckpointError, "type is 3; expected 1 or 2"),
    ("bert", {"bert__moe_every_n_layers": 2}, UnsupportedError, "moe_every_n_layers is 2"),
]


@pytest.mark.usefixtures("tiny_tokenizer")
@pytest.mark.parametrize(("family", "changes", "kind", "message"), REFUSED)
def test_what_edgeq_does_not_run_is_refused_by_key(
    family: str, changes: dict[str, Any], kind: type[EdgeqError], message: str, source: Any, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        plan_of(file_of(source(family), tmp_path / "m.gguf", family, **changes))


@pytest.mark.usefixtures("tiny_tokenizer")
def test_a_reranker_without_its_pooler_is_refused(source: Any, tmp_path: Path) -> None:
    """llama.cpp's converter leaves that of a BERT out, and computes something else."""
    path = file_of(source("bert_reranker"), tmp_path / "m.gguf", "bert_reranker")
    path.write_bytes(path.read_bytes().replace(b"\x0a\0\0\0\0\0\0\0cls.weight", b"\x0a\0\0\0\0\0\0\0cls.weighT"))
    with pytest.raises(UnsupportedError, match=r"a reranker without cls\.weight.*convert the original checkpoint"):
        plan_of(path)


@pytest.mark.usefixtures("tiny_tokenizer")
def test_a_decoder_whose_file_names_a_pooling_embeds(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    write_gguf(checkpoint("qwen3"), tmp_path / "m.gguf", change=lambda keys: keys.update({"qwen3.pooling_type": 3}))
    plan = plan_of(tmp_path / "m.gguf", method="none")
    assert plan.method.config.pooling == Pooling("last", normalize=True)
    with pytest.raises(EdgeqError, match="--pooling mean: .* says last; leave it out"):
        plan_of(tmp_path / "m.gguf", method="none", pooling="mean")


@pytest.mark.parametrize("capitals", [False, True])
def test_words_are_cut_into_the_pieces_of_transformers(capitals: bool, tmp_path: Path) -> None:
    """In lower case and without accents, if no token has a capital letter."""
    write_word_pieces(tmp_path)
    own = json.loads((tmp_path / "tokenizer.json").read_text())
    if capitals:
        own["normalizer"]["lowercase"] = False
        own["model"]["vocab"] |= {each: len(own["model"]["vocab"]) + i for i, each in enumerate(("The", "##P", "P", "È"))}
        (tmp_path / "tokenizer.json").write_text(json.dumps(own))
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"do_lower_case": False}))
    made = tmp_path / "made"
    made.mkdir()
    write_texts(word_pieces(tmp_path, 2048), made)
    ours, theirs = Tokenizer((made / "tokenizer.json").read_bytes(), {}), AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(theirs.backend_tokenizer.normalizer, normalizers.BertNormalizer)
    rng = random.Random(3)
    frequent = [ord(each) for each in " 'as19\n\r,é\u0301\u0661PThe[]#"]
    noise = ["".join(chr(rng.choice((*frequent, rng.randrange(1, 0xD800)))) for _ in range(24)) for _ in range(1000)]
    for text in [*TEXTS, *noise]:
        assert ours.encode(text) == list(theirs(text)["input_ids"]), text
    for first, second in zip(TEXTS, TEXTS[::-1], strict=True):
        wanted, ((tokens, segment),) = theirs(first, second), ours.encode_pairs([(first, second)])
        assert tokens == list(wanted["input_ids"]) and segment == list(wanted["token_type_ids"]).index(1)
    again = AutoTokenizer.from_pretrained(made)
    names = ("cls_token", "sep_token", "pad_token", "unk_token", "mask_token")
    assert [getattr(again, name) for name in names] == ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": ["[CLS]", "\u2581a", "a", "##a"], "token_type": [3, 1, 3, 3]}, "tokens has 'a' twice, as 1 and 2"),
        (
            {"tokens": ["\u2581a", "b"], "token_type": [1, 1]},
            r"unknown_token_id is missing, and tokenizer\.ggml\.tokens has no",
        ),
        ({"tokens": ["[UNK]", "b"], "token_type": [3, 1]}, r"cls_token_id is missing, and tokenizer\.ggml\.tokens has no"),
        (
            {"tokens": ["[CLS]", "[UNK]"], "token_type": [3, 3]},
            r"seperator_token_id is missing, and tokenizer\.ggml\.tokens has",
        ),
        ({"cls_token_id": 4, "tokens": ["[CLS]", "[SEP]"], "token_type": [3, 3]}, "cls_token_id is 4; the file has 2 tokens"),
    ],
)
def test_word_pieces_of_strangers_are_refused_by_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.model": "bert", **{f"tokenizer.ggml.{key}": value for key, value in change.items()}}
    with pytest.raises(CheckpointError, match=rf"^tokenizer\.ggml\.{message}"):
        write_texts(metadata, tmp_path)


def test_two_texts_have_between_them_what_the_checkpoints_tokenizer_puts_there(tmp_path: Path) -> None:
    tokens = ["<s>", "<pad>", "</s>", "<unk>", SPACE, "a", "b", f"{SPACE}a"]
    metadata = {"model": "t5", "tokens": tokens, "token_type": [3, 3, 3, 2, 1, 1, 1, 1], "scores": [0.0] * 4 + [-3.0] * 4}
    metadata |= {"bos_token_id": 0, "eos_token_id": 2, "seperator_token_id": 2, "unknown_token_id": 3, "padding_token_id": 1}
    metadata |= {"add_bos_token": True, "add_eos_token": True}
    for architecture, between in (("bert", [2, 2]), ("llama", [2, 0]), ("modern-bert", [2])):
        metadata["add_sep_token"] = architecture != "llama"
        keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()} | {"general.architecture": architecture}
        write_texts(keys, tmp_path)
        ours = Tokenizer((tmp_path / "tokenizer.json").read_bytes(), {})
        assert ours.encode("a") == [0, 7, 2]
        ((found, _),) = ours.encode_pairs([("a", "ab")])
        assert found == [0, 7, *between, 7, 6, 2]


def test_the_commands(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file as it is, converted into the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = source("bert_reranker")
    path = file_of(folder, tmp_path / "m.gguf", "bert_reranker", **word_pieces(folder, 2048))
    done = CliRunner().invoke(main, ["rerank", str(path), "--target", "reference", "-q", QUERY, *DOCUMENTS])
    assert done.exit_code == 0 and "converting it once" in done.stderr, done.output
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert sorted(json.loads(text) for _, _, text in lines) == sorted(DOCUMENTS)
    assert sorted(lines, key=lambda line: -float(line[0])) == lines
