"""What an embedding checkpoint says of itself, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgeq.converters.calibration.head import beginnings
from edgeq.converters.checkpoint.sentence_transformers import embedding_settings
from edgeq.converters.checkpoint.tokenizer import read_text
from edgeq.converters.convert import convert
from edgeq.converters.families import recognise
from edgeq.converters.importers.safetensors_folder import SafetensorsFolder
from edgeq.converters.methods import METHODS
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import preflight
from edgeq.errors import CheckpointError, EdgeqError, InputError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.network.pooling import DenseLayer, Pooling
from edgeq.text.tokenizer import Tokenizer
from tests.checkpoints.embeddings import PROMPTS, embedding_checkpoint, write_settings

Change = Callable[[Path], Any]
CONFIG = {
    "architectures": ["LlamaModel"],
    **{"vocab_size": 64, "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
}


def opened(folder: Path) -> SafetensorsFolder:
    return SafetensorsFolder(folder, "any", CONFIG)


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_checkpoint(checkpoint("qwen3"), tmp_path_factory.mktemp("qwen3"), "last", ends=True, prompts=PROMPTS)


def rewrite(name: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        found = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**found, **values}))

    return change


def modules(change: Callable[[list[dict[str, Any]]], Any]) -> Change:
    def apply(folder: Path) -> None:
        found = json.loads((folder / "modules.json").read_text())
        change(found)
        (folder / "modules.json").write_text(json.dumps(found))

    return apply


DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}


def dense(**settings: Any) -> Change:
    """A Dense module of these settings after the pooling."""

    def change(folder: Path) -> None:
        modules(lambda m: m.insert(2, DENSE))(folder)
        (folder / "2_Dense").mkdir()
        sound = {"in_features": 128, "out_features": 64, "bias": False}
        sound["activation_function"] = "torch.nn.modules.linear.Identity"
        (folder / "2_Dense" / "config.json").write_text(json.dumps(sound | settings))

    return change


def test_dense_modules(tmp_path: Path) -> None:
    write_settings(tmp_path, "cls")
    dense()(tmp_path)
    found = embedding_settings(opened(tmp_path), None)
    assert found and found.pooling == Pooling("cls", True, (DenseLayer(64),))
    # Without a word about it sentence-transformers has a bias and a tanh.
    settings = {"in_features": 128, "out_features": 64}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(settings))
    found = embedding_settings(opened(tmp_path), None)
    assert found and found.pooling.dense == (DenseLayer(64, True, "tanh"),)


def test_both_ways_of_sentence_transformers_to_say_it(tmp_path: Path) -> None:
    write_settings(tmp_path, "mean", normalize=False, prompts=PROMPTS)
    found = embedding_settings(opened(tmp_path), None)
    assert found and found.pooling == Pooling("mean", False) and found.prompts == {"prompts": PROMPTS}
    types = ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling")

    def rename(entries: list[dict[str, Any]]) -> None:
        for entry, name in zip(entries, types, strict=True):
            entry["type"] = f"sentence_transformers.{name}"

    modules(rename)(tmp_path)
    path = tmp_path / "1_Pooling" / "config.json"
    path.write_text(json.dumps({"embedding_dimension": 128, "pooling_mode": "lasttoken", "include_prompt": True}))
    rewrite("config_sentence_transformers.json", default_prompt_name="query")(tmp_path)
    found = embedding_settings(opened(tmp_path), "last")
    assert found and found.pooling == Pooling("last", False) and found.prompts["default_prompt"] == "query"


def test_a_checkpoint_without_modules_embeds_where_it_is_asked_to(tmp_path: Path) -> None:
    assert embedding_settings(opened(tmp_path), None) is None
    found = embedding_settings(opened(tmp_path), "mean")
    assert found and found.pooling == Pooling("mean", True) and found.prompts == {"prompts": {}}
    with pytest.raises(UnsupportedError, match="LlamaModel has no head.*--pooling last or --pooling mean"):
        recognise(CONFIG)
    config = recognise({**CONFIG, "tie_word_embeddings": True}, pooling=found.pooling)[1]
    assert config.pooling == found.pooling and not config.tie_word_embeddings


REFUSED: dict[str, tuple[Change, type[EdgeqError], str]] = {
    "max": (
        rewrite("1_Pooling/config.json", pooling_mode_lasttoken=False, pooling_mode_max_tokens=True),
        UnsupportedError,
        "pooling max_tokens is not supported; supported: lasttoken, mean, or cls",
    ),
    "two at once": (rewrite("1_Pooling/config.json", pooling_mode_cls_token=True), UnsupportedError, "lasttoken and cls_token"),
    "none": (rewrite("1_Pooling/config.json", pooling_mode_lasttoken=False), UnsupportedError, "of no kind"),
    "weighted": (rewrite("1_Pooling/config.json", pooling_mode="weightedmean"), UnsupportedError, "pooling weightedmean"),
    "a list": (rewrite("1_Pooling/config.json", pooling_mode=["mean", "max"]), UnsupportedError, "mean and max"),
    "another width": (rewrite("1_Pooling/config.json", word_embedding_dimension=64), CheckpointError, "pools 64 channels"),
    "a mean of a part": (
        rewrite("1_Pooling/config.json", pooling_mode="mean", include_prompt=False),
        UnsupportedError,
        "include_prompt is False",
    ),
    "a convolution": (
        modules(lambda m: m.append({"type": "sentence_transformers.models.CNN", "path": "3_CNN"})),
        UnsupportedError,
        "sentence_transformers.models.CNN is not supported; supported: Transformer, Pooling, Dense, Normalize",
    ),
    "a dense layer after the norm": (
        modules(lambda m: m.append(DENSE)),
        UnsupportedError,
        "Normalize, Dense are not supported",
    ),
    "nine dense layers": (modules(lambda m: m.__setitem__(slice(2, 3), [DENSE] * 9)), UnsupportedError, "at most 8 Dense"),
    "a dense layer elsewhere": (
        modules(lambda m: m.insert(2, {**DENSE, "path": "../2_Dense"})),
        CheckpointError,
        "'../2_Dense', which is not a folder beside it",
    ),
    "a dense layer in the folder above": (modules(lambda m: m.insert(2, {**DENSE, "path": ".."})), CheckpointError, "'..'"),
    "a dense layer without settings": (modules(lambda m: m.insert(2, DENSE)), CheckpointError, "no config.json"),
    "a dense layer of another width": (dense(in_features=64), CheckpointError, "in_features is 64; what it reads has 128"),
    "a dense layer of no width": (dense(out_features=0), CheckpointError, "out_features.*dense width is 0"),
    "a dense layer of every width": (dense(out_features=1 << 30), CheckpointError, "expected an integer from 1 to 131072"),
    "a dense layer with a GELU": (
        dense(activation_function="torch.nn.modules.activation.GELU"),
        UnsupportedError,
        "activation_function is 'torch.nn.modules.activation.GELU'; supported: Identity and Tanh",
    ),
    "a dense layer with its own code": (dense(activation_function="os.Identity"), UnsupportedError, "is 'os.Identity'"),
    "a dense layer of something else": (dense(module_input_name="token_embeddings"), UnsupportedError, "module_input_name"),
    "own code": (modules(lambda m: m[1].update(type="custom_st.Pooling")), UnsupportedError, "module custom_st.Pooling"),
    "another order": (modules(lambda m: m.reverse()), UnsupportedError, "Normalize, Pooling, Transformer"),
    "no module": (modules(lambda m: m.clear()), UnsupportedError, "supported: Transformer, Pooling, at most 8 Dense"),
    "a folder elsewhere": (modules(lambda m: m[1].update(path="../1_Pooling")), CheckpointError, "not a folder beside it"),
    "a nested transformer": (modules(lambda m: m[0].update(path="0_T")), UnsupportedError, "in a folder '0_T'"),
    "no list": (lambda folder: (folder / "modules.json").write_text("{}"), CheckpointError, "not a list of modules"),
    "no JSON": (lambda folder: (folder / "modules.json").write_text("[" * 100_000), CheckpointError, "modules.json: not JSON"),
    "no settings": (lambda folder: shutil.rmtree(folder / "1_Pooling"), CheckpointError, "no config.json"),
    "sparse": (rewrite("config_sentence_transformers.json", model_type="SparseEncoder"), UnsupportedError, "'SparseEncoder'"),
    "lower case": (rewrite("sentence_bert_config.json", do_lower_case=True), UnsupportedError, "do_lower_case is True"),
    "prompts of another kind": (rewrite("config_sentence_transformers.json", prompts=[1]), CheckpointError, "not an object"),
    "a prompt that is no text": (rewrite("config_sentence_transformers.json", prompts={"q": 5}), CheckpointError, "prompt 'q'"),
    "a default that is not there": (
        rewrite("config_sentence_transformers.json", default_prompt_name="q"),
        CheckpointError,
        "default prompt is 'q'; there are none",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, error, message = REFUSED[case]
    write_settings(tmp_path, "last")
    assert embedding_settings(opened(tmp_path), None)
    change(tmp_path)
    with pytest.raises(error, match=message):
        embedding_settings(opened(tmp_path), None)


def test_another_pooling_than_the_checkpoint_says_is_refused(tmp_path: Path) -> None:
    write_settings(tmp_path, "last")
    with pytest.raises(InputError, match=r"--pooling mean: .*modules.json says last"):
        embedding_settings(opened(tmp_path), "mean")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_causal": False}, "is_causal is False: tokens see those after them"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}, "AutoModel is 'modeling_qwen.Qwen2Model'"),
        ({"architectures": ["MPNetModel"]}, "MPNetModel"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {}}, "config.json"),
    ],
)
def test_what_is_no_decoder_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedError, CheckpointError), match=message):
        recognise({**CONFIG, **changes}, pooling=Pooling("last", True))


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_change_what_the_last_norm_gives_are_refused(method: str, qwen3: Path) -> None:
    pools = method not in ("ttq", "quarot", "resq", "mquant")
    assert METHODS[method].pools == pools
    if not pools:
        with pytest.raises(UnsupportedError, match=f"--method {method}: this model embeds texts.*supported: none, rtn, awq"):
            preflight(str(qwen3), ConvertOptions(method=method))


def test_a_plan_by_divergence_is_refused(qwen3: Path) -> None:
    with pytest.raises(UnsupportedError, match="--plan goes by the divergence at the logits"):
        preflight(str(qwen3), ConvertOptions(allocation={}))


def test_the_file_has_a_pooling_record_instructions_and_no_head(qwen3: Path, tmp_path: Path) -> None:
    file = convert(str(qwen3), tmp_path / "a.edgeq", ConvertOptions(bits=4), lambda *_: None)
    metadata = file.metadata
    assert metadata.config.pooling == Pooling("last", True) and metadata.generation["prompts"] == PROMPTS
    assert "head" not in metadata.linears and metadata.linears["embedding"].weights[0].codec.name == "i8 g128"
    assert metadata.bytes_per_token()["head"] == 0
    again = ModelFile.open(tmp_path / "a.edgeq")
    assert again.metadata == metadata
    plain = convert(str(qwen3), tmp_path / "b.edgeq", ConvertOptions(bits=4, head=16), lambda *_: None).metadata
    assert plain.arrays["embedding"].dtype == "bf16" and "embedding" not in plain.linears
    # The same command again finds the file; another pooling does not.
    convert(str(qwen3), tmp_path / "a.edgeq", ConvertOptions(bits=4), lambda *_: None)
    other = shutil.copytree(qwen3, tmp_path / qwen3.name)
    write_settings(other, "mean")
    with pytest.raises(InputError, match="made of other settings"):
        convert(str(other), tmp_path / "a.edgeq", ConvertOptions(bits=4), lambda *_: None)


def test_the_mode_is_measured_on_the_vectors(qwen3: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def read_file(path):\n    return open(path).read()\n" * 200)
    options = ConvertOptions(
        method="awq+gptq", bits=4, group_size=32, calibration=text, calibration_rows=4, calibration_length=64
    )
    metadata = convert(str(qwen3), tmp_path / "a.edgeq", options, lambda *_: None).metadata
    measured = metadata.provenance["measured"]
    assert isinstance(measured, dict) and set(measured) == {"tokens", "a8_cosine_distance"}
    assert 0 < measured["a8_cosine_distance"] < 0.1
    assert metadata.default_mode == ("a8" if measured["a8_cosine_distance"] <= 0.001 else "a16")


def test_the_vectors_of_all_beginnings() -> None:
    states = torch.randn(2, 5, 3)
    assert torch.equal(beginnings(states, "last"), states)
    means = torch.stack([states[:, : n + 1].mean(1) for n in range(5)], 1)
    assert torch.allclose(beginnings(states, "mean"), means, atol=1e-6)


def test_an_end_that_only_transformers_puts_is_recorded(qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    folder = shutil.copytree(qwen3, tmp_path / "ends")
    shutil.copy(Path(__file__).parents[3] / "models" / "tiny-llama" / "tokenizer.json", folder / "tokenizer.json")
    plain = transformers.AutoTokenizer.from_pretrained(folder)

    class Ends:
        """A tokenizer that ends texts."""

        def __init__(self) -> None:
            self.bos_token_id, self.eos_token_id, self.eos_token = plain.bos_token_id, 1, "<|end|>"

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [*plain(text)["input_ids"], 1]}

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Ends())
    source = replace(opened(folder), config=json.loads((folder / "config.json").read_text()))
    with pytest.raises(UnsupportedError, match="tokenizer.json alone gives"):
        read_text(source, 2048)
    found = read_text(source, 2048, {"prompts": {}})
    assert found.generation["end_token_id"] == 1
    text = Tokenizer(found.blobs["tokenizer.json"], found.generation)
    assert text.encode("a b") == [*text.encode_part("a b"), 1]
