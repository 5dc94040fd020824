"""Everything that is refused before a weight is read, each by what is wrong, and what is found in sound checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from edgeq.converters.budget.budget import Budget
from edgeq.converters.convert import ConvertOptions, convert, preflight
from edgeq.converters.families import recognise
from edgeq.converters.methods import chosen
from edgeq.converters.planning import preflight as preflight_module
from edgeq.errors import CheckpointError, EdgeqError, FormatError, InputError, ResourceError, UnsupportedError
from edgeq.network.generation import SAMPLING, check_generation
from edgeq.network.rope import Rope
from edgeq.runtime.sampling import Sampling

RTN = ConvertOptions(group_size=32)


@pytest.fixture
def llama(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A sharded Llama checkpoint of one's own."""
    folder = tmp_path / "llama"
    shutil.copytree(checkpoint("llama_gqa", max_shard_size="200KB"), folder)
    return folder


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps({key: value for key, value in data.items() if value != "remove"}))


# key, value, what the message must say
REFUSED_KEYS = [
    ({"architectures": ["MambaForCausalLM"]}, "architectures.*MambaForCausalLM.*supported: LlamaForCausalLM"),
    ({"architectures": "remove"}, "architectures"),
    ({"architectures": [["x"]]}, "architectures"),
    ({"hidden_act": "swish"}, "hidden_act 'swish'.*supported: silu"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope kind 'dynamic'.*supported: default, linear, llama3"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope kind 'dynamic'"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks high_freq_factor"),
    ({"attention_bias": True}, "attention_bias"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"logits_scaling": 8.0}, "logits_scaling"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"quantization_config": {"quant_method": "gptq"}}, "already quantized.*gptq"),
    ({"hidden_size": "remove"}, "hidden_size"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_key_value_heads": 3}, "key/value heads"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"hidden_size": 64, "head_dim": 32}, "has the shape"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED_KEYS, ids=lambda x: str(x)[:40])
def test_a_config_key_that_is_not_supported_is_refused_by_name(llama: Path, changes: dict[str, Any], says: str) -> None:
    edit(llama / "config.json", **changes)
    with pytest.raises((UnsupportedError, CheckpointError), match=says):
        preflight(str(llama), RTN)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("mistral", {"sliding_window": -3}, "sliding_window is -3"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention.*supported: full_attention"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types is not a list of 2"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
    ],
)
def test_family_keys_are_checked(checkpoint: Callable[..., Path], family: str, changes: dict[str, Any], says: str) -> None:
    config = json.loads((checkpoint(family) / "config.json").read_text()) | changes
    with pytest.raises((UnsupportedError, CheckpointError), match=says):
        recognise(config)


def test_both_spellings_of_rope_are_the_same(checkpoint: Callable[..., Path]) -> None:
    config = json.loads((checkpoint("llama3_rope") / "config.json").read_text())
    rope = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 64)
    assert recognise(config)[1].rope == rope
    settings = config.pop("rope_parameters")
    assert recognise({**config, "rope_theta": settings.pop("rope_theta"), "rope_scaling": settings})[1].rope == rope


def test_windows_follow_each_familys_rules(checkpoint: Callable[..., Path]) -> None:
    mistral = json.loads((checkpoint("mistral") / "config.json").read_text())
    assert recognise(mistral)[1].sliding_windows == (24, 24)
    assert recognise({**mistral, "sliding_window": None})[1].sliding_windows == ()
    qwen = json.loads((checkpoint("qwen2") / "config.json").read_text()) | {"sliding_window": 16, "layer_types": None}
    assert recognise({**qwen, "use_sliding_window": True, "max_window_layers": 1})[1].sliding_windows == (0, 16)
    assert recognise({**qwen, "use_sliding_window": False, "max_window_layers": 1})[1].sliding_windows == ()


def test_a_tokenizer_without_tokenizer_json_is_refused_with_its_class(llama: Path) -> None:
    (llama / "tokenizer.json").unlink()
    edit(llama / "tokenizer_config.json", tokenizer_class="LegacySentencePieceTokenizer")
    with pytest.raises(UnsupportedError, match="LegacySentencePieceTokenizer"):
        preflight(str(llama), RTN)


def test_a_damaged_tokenizer_is_refused(llama: Path) -> None:
    (llama / "tokenizer.json").write_text('{"model": {"type": "Unigrammatic"}}')
    with pytest.raises(UnsupportedError, match="tokenizers library cannot load"):
        preflight(str(llama), RTN)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(llama: Path) -> None:
    edit(llama / "config.json", vocab_size=2000)
    with pytest.raises(CheckpointError, match="2048 tokens, the model 2000"):
        preflight(str(llama), RTN)


def test_text_settings_come_from_the_checkpoint(llama: Path) -> None:
    edit(
        llama / "tokenizer_config.json",
        chat_template=[{"name": "tool", "template": "x"}, {"name": "default", "template": "{{ a }}"}],
    )
    edit(llama / "generation_config.json", eos_token_id=[1, 7], temperature=0.6, top_k=20)
    text = preflight(str(llama), RTN).text
    assert text.blobs == {"tokenizer.json": (llama / "tokenizer.json").read_bytes(), "chat_template": b"{{ a }}"}
    assert text.generation["eos_token_ids"] == [1, 7] and text.generation["bos_token_id"] == 0
    assert text.generation["temperature"] == 0.6 and text.generation["top_k"] == 20 and "top_p" not in text.generation
    assert text.generation["add_bos"] is False
    assert text.generation["special_tokens"] == {
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "unk_token": None,
        "pad_token": None,
    }
    (llama / "chat_template.jinja").write_text("{{ b }}")
    assert preflight(str(llama), RTN).text.blobs["chat_template"] == b"{{ b }}"


# file, key, a value that no run could use, the nearest values that are taken
UNUSABLE = [
    ("generation_config.json", "temperature", float("nan"), [0, 0.0, 1e-6, 100]),
    ("generation_config.json", "temperature", float("inf"), []),
    ("generation_config.json", "temperature", 100.1, []),
    ("generation_config.json", "temperature", -1, []),
    ("generation_config.json", "temperature", 9e-7, []),
    ("generation_config.json", "top_k", 50.0, [0, 50]),
    ("generation_config.json", "top_k", -1, []),
    ("generation_config.json", "top_p", 0, [1, 1.0, 1e-9]),
    ("generation_config.json", "top_p", 1.01, []),
    ("generation_config.json", "min_p", -0.1, [0, 1]),
    ("generation_config.json", "repetition_penalty", 10.1, [0.1, 10]),
    ("generation_config.json", "eos_token_id", -1, [0, [0, 7]]),
    ("generation_config.json", "eos_token_id", [1, -1], []),
    ("generation_config.json", "bos_token_id", -1, [0]),
    ("tokenizer_config.json", "chat_template", "{% for m in messages %}", ["{% for m in messages %}{% endfor %}"]),
    ("tokenizer_config.json", "chat_template", "{{ 'a' }", ["{% generation %}{{ a }}{% endgeneration %}"]),
]


@pytest.mark.parametrize(("file", "key", "refused", "taken"), UNUSABLE, ids=lambda x: str(x)[:24])
def test_settings_that_could_not_be_run_are_refused_and_those_at_the_limit_are_not(
    llama: Path, file: str, key: str, refused: Any, taken: list[Any]
) -> None:
    for value in taken:
        edit(llama / file, **{key: value})
        preflight(str(llama), RTN)
    edit(llama / file, **{key: refused})
    with pytest.raises(CheckpointError, match=key.replace("chat_template", "chat template") + "|not JSON"):
        preflight(str(llama), RTN)


@pytest.mark.parametrize("key", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
def test_a_file_recommends_what_the_runtime_takes(key: str) -> None:
    generation: dict[str, Any] = {"bos_token_id": None, "eos_token_ids": []}
    least, most, _ = SAMPLING[key]
    field = "repeat_penalty" if key == "repetition_penalty" else key
    for value in (least, most, 0, 1, 0.5, 2, -1, 200, most + 0.5, least * 0.9, float("nan"), float("inf")):
        outcomes = []
        for use in (lambda: check_generation({**generation, key: value}), lambda: Sampling(**{field: value})):  # noqa: B023
            try:
                use()
            except (FormatError, InputError):
                outcomes.append("refused")
            else:
                outcomes.append("taken")
        assert outcomes[0] == outcomes[1], (key, value)


def test_rope_bounds_in_the_wrong_order_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("llama3_rope"), tmp_path / "model")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    edit(folder / "config.json", rope_parameters={**rope, "low_freq_factor": 3.999})
    preflight(str(folder), RTN)
    edit(folder / "config.json", rope_parameters={**rope, "low_freq_factor": 4.0})
    with pytest.raises(FormatError, match="low_freq_factor"):
        preflight(str(folder), RTN)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        preflight(str(tmp_path), RTN)


def test_a_path_that_is_neither_folder_nor_hub_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        preflight(str(tmp_path / "nothing"), RTN)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="a file"):
        preflight(str(tmp_path / "file"), RTN)


def test_a_hub_id_that_is_not_cached_is_refused_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no-one/nothing: .*not in the local hub cache"):
        preflight("no-one/nothing", ConvertOptions(offline=True))


def test_a_missing_shard_is_named(llama: Path) -> None:
    shard = sorted(llama.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"shard {shard.name} is missing"):
        preflight(str(llama), RTN)


def test_a_truncated_shard_is_named(llama: Path) -> None:
    shard = sorted(llama.glob("model-*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{shard.name}: truncated"):
        preflight(str(llama), RTN)


@pytest.mark.parametrize("name", ["../../secret.safetensors", "f" * 300 + ".safetensors", "\ud800" * 300 + ".safetensors"])
def test_an_index_cannot_name_files_elsewhere(name: str, llama: Path) -> None:
    index = llama / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="not a .safetensors file beside it"):
        preflight(str(llama), RTN)


def test_pickled_weights_are_refused_with_what_to_do(llama: Path) -> None:
    for path in llama.glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="neither"):
        preflight(str(llama), RTN)
    (llama / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pickled \(pytorch_model.bin\).*save_pretrained"):
        preflight(str(llama), RTN)


def test_a_missing_or_extra_tensor_is_named(checkpoint: Callable[..., Path], llama: Path) -> None:
    edit(llama / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        preflight(str(llama), RTN)
    edit(llama / "config.json", tie_word_embeddings=True, num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1\.\S+ has no place"):
        preflight(str(llama), RTN)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bits": 9}, "9 bits"),
        ({"bits": 1}, "1 bits"),
        ({"group_size": 48}, "group size 48"),
        ({"method": "magic"}, "supported: none, rtn, awq"),
        ({"head": 5}, "head of 5 bits"),
        ({"dtype": "f16"}, "--method none"),
        ({"method": "none", "head": 8}, "--head"),
        ({"method": "none", "calibration": Path("x")}, "--calibration"),
    ],
)
def test_options_out_of_range_or_without_effect_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        chosen(ConvertOptions(**options))


def test_calibration_text_that_cannot_be_read_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing.txt"):
        preflight(str(llama), ConvertOptions(method="awq", group_size=32, calibration=tmp_path / "missing.txt"))


def test_too_short_calibration_text_is_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("few words")
    options = ConvertOptions(method="awq", group_size=32, calibration=tmp_path / "short.txt")
    with pytest.raises(InputError, match="at least 512 are needed"):
        preflight(str(llama), options)


def test_too_little_disk_is_refused_before_writing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 100_000))
    with pytest.raises(ResourceError, match="MB free"):
        convert(str(llama), tmp_path / "out.edgeq", RTN, lambda *_: None)
    assert not list(tmp_path.glob("out*"))


def test_too_little_memory_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_module, "available_bytes", lambda: 10**8)
    with pytest.raises(ResourceError, match="GB of memory"):
        preflight(str(llama), RTN)


def test_an_output_folder_that_does_not_exist_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        convert(str(llama), tmp_path / "nowhere" / "out.edgeq", RTN, lambda *_: None)


def test_the_predicted_size_is_the_size(llama: Path, tmp_path: Path) -> None:
    file = convert(str(llama), tmp_path / "out.edgeq", RTN, lambda *_: None)
    plan = preflight(str(llama), RTN)
    assert file.header.data_length == plan.contents.nbytes
    assert file.size <= plan.output_bytes


def test_every_refusal_is_a_one_line_error_of_edgeq(llama: Path) -> None:
    edit(llama / "config.json", hidden_act="relu\n2")
    with pytest.raises(EdgeqError) as caught:
        preflight(str(llama), RTN)
    assert "\n" not in str(caught.value)


def test_a_beginning_token_that_only_transformers_adds_is_recorded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = AutoTokenizer.from_pretrained(llama)

    class AddsBos:
        bos_token_id, bos_token = 0, "<|begin|>"

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [0, *real(text)["input_ids"]]}

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: AddsBos())
    assert preflight(str(llama), RTN).text.generation["add_bos"] is True


def test_a_tokenizer_that_transformers_runs_differently_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "qwen"
    shutil.copytree(checkpoint("qwen2"), folder)
    # The pre-tokenizer of another family: transformers replaces it by its own.
    shutil.copy(Path(__file__).parents[3] / "models/tiny-llama/tokenizer.json", folder / "tokenizer.json")
    with pytest.raises(UnsupportedError, match="tokenizer class Qwen2Tokenizer gives"):
        preflight(str(folder), RTN)


def test_a_hub_id_is_checked_before_its_weights_are_fetched(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[dict[str, Any]] = []

    def download(repository: str, **arguments: Any) -> str:
        fetched.append({"repository": repository, **arguments})
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    options = ConvertOptions(group_size=32, token="hf_x", revision="main", offline=True)
    assert preflight("owner/model", options).checkpoint.name == "owner/model"
    weights = ["model*.safetensors", "gptq_model*.safetensors", "*_Dense/model.safetensors"]
    assert [f["allow_patterns"] for f in fetched] == [["*.json", "*.jinja"], ["*.json", "*.jinja", *weights]]
    assert all((f["token"], f["revision"], f["local_files_only"]) == ("hf_x", "main", True) for f in fetched)
    edit(llama / "config.json", hidden_act="swish")
    with pytest.raises(UnsupportedError, match="hidden_act"):
        preflight("owner/model", options)
    assert len(fetched) == 3


@pytest.mark.parametrize("family", ["llama_gqa", "lfm2", "qwen3_5", "granite_hybrid"])
def test_a_budget_takes_the_best_method(checkpoint: Callable[..., Path], family: str) -> None:
    few = {"budget": Budget("bits", 4.0), "calibration_rows": 2, "calibration_length": 64}
    assert preflight(str(checkpoint(family)), ConvertOptions(**few)).method.name == "gptq"
