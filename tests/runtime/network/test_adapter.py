"""LoRA adapters: the logits of W + scale B A by transformers, each text its own adapter, and refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.errors import CheckpointError, EdgeqError, InputError, UnsupportedError
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.pictures.prompt import Prompt
from edgeq.runtime import Model, Sampling
from edgeq.runtime.batching.job import Job
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.network.adapted import adapted, balanced
from edgeq.runtime.request import Request
from edgeq.runtime.session.requantize import Requantization
from tests.runtime.network import random_vlm
from tests.runtime.session.with_masters import with_masters

TOKENS = [int(t) for t in np.random.default_rng(3).integers(2, 2048, 90)]
WEIGHTS = {"initializer_range": 0.02}
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETED = {
    "llama_gqa": ("q_proj", "v_proj", "down_proj"),
    "qwen3": EVERY,
    "gemma3": EVERY,
    "smollm3": ("k_proj", "gate_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj"),
    "opt": ("q_proj", "out_proj", "fc1", "fc2"),
}
LLAMA = {"q_proj": (128, 128), "v_proj": (64, 128), "down_proj": (128, 256)}
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False}


def write(folder: Path, tensors: dict[str, NDArray[Any]], **config: Any) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def factors(modules: dict[str, tuple[int, int]], rank: int = 4, seed: int = 0, size: float = 0.04) -> dict[str, NDArray[Any]]:
    """Factors of modules by path, with the shapes of their weights."""
    draw, found = np.random.default_rng(seed), {}
    for module, (rows, columns) in modules.items():
        found[f"base_model.model.{module}.lora_A.weight"] = draw.normal(0, size, (rank, columns)).astype(np.float32)
        found[f"base_model.model.{module}.lora_B.weight"] = draw.normal(0, size, (rows, rank)).astype(np.float32)
    return found


def layers(shapes: dict[str, tuple[int, int]], count: int = 2) -> dict[str, tuple[int, int]]:
    def module(name: str) -> str:
        return f"self_attn.{name}" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else f"mlp.{name}"

    return {f"model.layers.{layer}.{module(name)}": shape for layer in range(count) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("adapters") / "one", factors(layers(LLAMA)))


def adapted_logits(folder: Path, adapter: Path, by_root: bool = False) -> NDArray[np.float32]:
    """Logits of transformers, each weight plus the product of its factors."""
    import torch
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." in name:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                scale = 8 / (len(a) ** 0.5 if by_root else len(a))
                b = tensors[name.replace("lora_A", "lora_B")]
                model.get_submodule(module).weight += torch.from_numpy(scale * (b @ a))
        return model(torch.tensor([TOKENS])).logits[0].numpy()  # type: ignore[no-any-return]


def logits(model: Model) -> NDArray[np.float32]:
    return np.concatenate(list(model.session().all_logits(TOKENS)))


def shapes_of(folder: Path, names: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "np") as file:  # type: ignore[no-untyped-call]
        every = {name.removesuffix(".weight"): tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return {name: shape for name, shape in every.items() if name.rpartition(".")[2] in names and ".layers." in name}


@pytest.mark.parametrize(
    "family", ["llama_gqa", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in TARGETED if each != "llama_gqa")]
)
def test_logits_equal_transformers(
    family: str, checkpoint: Callable[..., Path], model_path: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint(family, dtype="float32", **WEIGHTS)
    modules = shapes_of(source, TARGETED[family])
    assert len(modules) >= 2 * len(TARGETED[family])
    adapter = write(tmp_path / "a", factors(modules), use_rslora=family == "qwen3")
    expected, path = adapted_logits(source, adapter, family == "qwen3"), model_path(family, WEIGHTS, method="none", dtype="f32")
    settings: dict[str, Any] = {"mode": "a16", "threads": 1, "threads_prefill": 1, "context": 128, "max_logits": 64}
    for target in ("cpu", "reference"):
        base = Model.load(path, target=target, **settings)
        found = logits(base.with_adapter(adapter))
        assert np.abs(found - expected).max() < 1e-3
        # Fifty times what may differ.
        assert np.abs(logits(base) - expected).max() > 0.05
        assert np.array_equal(found, logits(Model.load(path, target=target, adapter=adapter, **settings)))


@pytest.mark.parametrize("family", ["llama_gqa", pytest.param("phi3", marks=pytest.mark.exhaustive)])
def test_a_merged_adapter_gives_the_same_logits(
    family: str, checkpoint: Callable[..., Path], model_path: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint(family, dtype="float32", **WEIGHTS)
    adapter = write(tmp_path / "a", factors(shapes_of(source, TARGETED[family])))
    path = model_path(family, WEIGHTS, method="none", dtype="f32", merge_lora=adapter)
    model = Model.load(path, mode="a16", threads=1, threads_prefill=1, context=128, max_logits=64)
    assert np.abs(logits(model) - adapted_logits(source, adapter)).max() < 1e-3
    assert model.file.metadata.provenance["adapter"]["name"] == "a"  # type: ignore[index]


@pytest.fixture(scope="module")
def base(model_path: Callable[..., Path]) -> Model:
    return Model.load(
        model_path("llama_gqa", WEIGHTS, method="none", dtype="f32"), mode="a16", threads=1, threads_prefill=1, context=320
    )


def test_texts_with_different_adapters_run_together_and_share_no_pages(base: Model, llama: Path, tmp_path: Path) -> None:
    """The same prompts in turn: what one adapter left in the prefix tree is of no use to another, nor to the model alone."""
    other = base.with_adapter(write(tmp_path / "two", factors(layers(LLAMA), rank=3, seed=5), r=3))
    drawn = Sampling(temperature=1, seed=2)
    models = [None, base.with_adapter(llama), other, None]
    alone = [(model or base).generate(TOKENS, max_tokens=12, ignore_eos=True, sampling=drawn) for model in models]
    expected = [list(each.pieces()) for each in alone]
    assert expected[0] != expected[1] != expected[2] != expected[0]
    scheduler = Scheduler(base, 3, pages=32, shares_prefixes=True)
    for repeated in range(2):
        request = Request(max_tokens=12, ignore_eos=True)
        tickets = [scheduler.submit(Job(Prompt(list(TOKENS)), request, drawn, model=model)) for model in models]
        found: dict[Any, list[Any]] = {ticket: [] for ticket in tickets}
        while scheduler.busy:
            for update in scheduler.step():
                assert update.error is None
                found[update.ticket] += update.pieces
        assert [found[ticket] for ticket in tickets] == expected
        cached = [ticket.cached_tokens for ticket in tickets]
        assert cached == ([64] * 4 if repeated else [0, 0, 0, 64])


def test_clients_of_a_server_choose_an_adapter_by_name(base: Model, llama: Path) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("starlette")
    from tests.runtime.server.serving import serving

    adapted, drawn = base.with_adapter(llama), Sampling(temperature=1, seed=7)
    asked = {"prompt": TOKENS, "max_tokens": 12, "seed": 7, "ignore_eos": True, "temperature": 1}
    with serving(base, adapters={"one": adapted}) as served:
        listed = served.ask("/v1/models")[2]["data"]
        assert [each["id"] for each in listed] == ["edgeq", "edgeq:one"]
        for name, model in {"edgeq": base, "edgeq:one": adapted}.items():
            status, _, found = served.ask("/v1/completions", asked | {"model": name})
            assert status == 200 and found["model"] == name
            expected = model.generate(TOKENS, max_tokens=12, sampling=drawn, ignore_eos=True).text()
            assert found["choices"][0]["text"] == expected
        status, _, found = served.ask("/v1/completions", asked | {"model": "edgeq:two"})
        assert status == 404 and "edgeq:one" in found["error"]["message"]


def test_a_session_belongs_to_its_adapter(base: Model, llama: Path, tmp_path: Path) -> None:
    adapted = base.with_adapter(llama)
    session = adapted.session()
    session.prefill(TOKENS)
    session.save(tmp_path / "s")
    adapted.session().load(tmp_path / "s")
    with pytest.raises(InputError):
        base.session().load(tmp_path / "s")


def test_an_adapter_leaves_the_settings_of_its_model_alone(base: Model, llama: Path, tmp_path: Path) -> None:
    """Weights that one prompt had rounded would be wrong for the others of a server, which asks for none."""
    path = with_masters(base.file.path, tmp_path / "masters.edgeq", Codec("int", 4, 32), Codec("int", 8, 32))
    settings: dict[str, Any] = {"mode": "a16", "threads": 1, "threads_prefill": 1, "context": 128}
    never = Model.load(path, requantization=Requantization(when="never"), **settings)
    assert never.requantization is None and never.with_adapter(llama).requantization is None
    asked = Model.load(path, requantization=Requantization(min_tokens=5), **settings)
    assert asked.requantization == asked.with_adapter(llama).requantization is not None


def test_an_adapted_model_sees_pictures_as_large_as_its_model_does(tmp_path: Path) -> None:
    adapter = write(tmp_path / "a", factors({f"model.layers.{layer}.mlp.down_proj": (64, 96) for layer in range(2)}))
    settings: dict[str, Any] = {"threads": 1, "threads_prefill": 1, "context": 80}
    large = Model.load(random_vlm.write(tmp_path / "x.edgeq"), image_tokens=64, **settings)
    large.file.metadata.provenance["source_channels"] = True
    prompt = large.prompt([3, random_vlm.IMAGE_TOKEN, 5], images=[random_vlm.picture(6, 8, 0)])
    found = [model.session().prefill(prompt) for model in (large, large.with_adapter(adapter))]
    assert np.isfinite(found).all() and not np.array_equal(*found)


def test_balanced_factors_have_the_same_product() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.normal(0, 1e-7, (4, 50)).astype(np.float32), draw.normal(0, 100, (30, 4)).astype(np.float32)
    b[:, 2] = 0
    left, right = balanced(a, b)
    assert np.array_equal(right @ left, b @ a)
    halves = right.astype(np.float16).astype(np.float32) @ left.astype(np.float16).astype(np.float32)
    assert np.abs(halves - b @ a).max() < 1e-3 * np.abs(b @ a).max()
    assert not (a.astype(np.float16) == a).all()


REFUSED: dict[str, tuple[dict[str, Any], dict[str, tuple[int, int]], str]] = {
    "another kind": ({"peft_type": "IA3"}, {}, "peft_type"),
    "DoRA": ({"use_dora": True}, {}, "use_dora"),
    "biases": ({"bias": "all"}, {}, "bias is"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
    "scales of single layers": ({"alpha_pattern": {"q_proj": 4}}, {}, "alpha_pattern"),
    "a changed model": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights"),
    "another rank": ({"r": 8}, {}, "has rank 4"),
    "no rank": ({"r": True}, {}, "r is true"),
    "no scale": ({"lora_alpha": "8"}, {}, "lora_alpha"),
    "rows": ({}, {"model.layers.0.self_attn.q_proj": (64, 128)}, "has a weight of (64, 128), in the model (128, 128)"),
    "columns": ({}, {"model.layers.1.mlp.down_proj": (128, 128)}, "in the model (128, 256)"),
    "a layer that is not there": ({}, {"model.layers.2.self_attn.q_proj": (128, 128)}, "no layer that an adapter can change"),
    "an expert": ({}, {"model.layers.0.mlp.experts.0.up_proj": (256, 128)}, "no layer that an adapter can change"),
    "the embedding": ({}, {"model.embed_tokens": (2048, 128)}, "no layer that an adapter can change"),
    "a tied head": ({}, {"lm_head": (2048, 128)}, "no layer that an adapter can change"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str, base: Model, tmp_path: Path) -> None:
    config, modules, message = REFUSED[case]
    folder = write(tmp_path / "a", factors(modules or layers(LLAMA)), **config)
    with pytest.raises(EdgeqError) as raised:
        base.with_adapter(folder)
    assert message in str(raised.value)


def test_damaged_adapters_are_refused(base: Model, tmp_path: Path) -> None:
    good = factors(layers(LLAMA))
    first = next(iter(good))

    def refused(folder: Path, message: str) -> None:
        with pytest.raises((CheckpointError, InputError, UnsupportedError)) as raised:
            base.with_adapter(folder)
        assert message in str(raised.value)

    refused(tmp_path / "nowhere", "no such folder")
    refused(write(tmp_path / "half", {name: a for name, a in good.items() if name != first}), "has lora_B alone")
    refused(write(tmp_path / "nan", good | {first: np.full_like(good[first], np.nan)}), "NaN")
    refused(write(tmp_path / "ints", good | {first: good[first].astype(np.int32)}), "stored as I32")
    refused(write(tmp_path / "flat", good | {first: good[first].ravel()}), "two sizes above 0")
    refused(write(tmp_path / "wide", factors(layers(LLAMA), rank=130), r=130), "do not fit each other")
    refused(
        write(tmp_path / "more", good | {"base_model.model.model.layers.0.x.lora_embedding_A": good[first]}), "is no lora_A"
    )
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_model.bin").write_bytes(b"\x80\x04")
    refused(pickled, "pickled")
    data = (write(tmp_path / "cut", good) / "adapter_model.safetensors").read_bytes()
    (tmp_path / "cut" / "adapter_model.safetensors").write_bytes(data[:-8])
    refused(tmp_path / "cut", "truncated")
    (write(tmp_path / "text", good) / "adapter_config.json").write_text("[" * 5000)
    refused(tmp_path / "text", "not JSON")


@pytest.mark.exhaustive
def test_mutated_adapters_never_crash(base: Model, llama: Path, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    files = {name: (llama / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    refused = 0
    for _ in range(600):
        for name, data in files.items():
            changed = bytearray(data)
            for _ in range(int(draw.integers(0, 3))):
                changed[int(draw.integers(0, min(len(changed), 4000)))] = int(draw.integers(0, 256))
            (tmp_path / name).write_bytes(changed)
        try:
            base.with_adapter(tmp_path).close()
        except EdgeqError:
            refused += 1
    assert 100 < refused < 600


def test_files_that_do_not_say_what_their_channels_are_are_refused(base: Model, llama: Path) -> None:
    file = ModelFile.open(base.file.path)
    assert file.metadata.provenance.pop("source_channels") is True
    with pytest.raises(UnsupportedError, match="--merge-lora"):
        adapted(file, llama)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["awq", "awq+gptq", "smoothquant", "smoothquant+gptq", "quarot", "resq", "mquant"])
def test_methods_that_change_channels_say_so(method: str, model_path: Callable[..., Path], llama: Path) -> None:
    options = {"activations": "token"} if method == "mquant" else {}
    path = model_path("llama_gqa", WEIGHTS, method=method, **options)
    with pytest.raises(UnsupportedError, match="--merge-lora"):
        Model.load(path, adapter=llama)


@pytest.mark.parametrize("method", ["rtn", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("gptq", "ttq"))])
def test_methods_that_keep_channels_say_so(method: str, model_path: Callable[..., Path], llama: Path) -> None:
    """Their file with the adapter is as near to it as the file is to the model."""
    settings: dict[str, Any] = {"mode": "a16", "threads": 1, "threads_prefill": 1, "context": 128, "max_logits": 64}
    settings["requantization"] = Requantization(when="never")
    path, exact = (
        model_path("llama_gqa", WEIGHTS, method=method, bits=5 if method == "ttq" else 8, head=16),
        model_path("llama_gqa", WEIGHTS, method="none", dtype="f32"),
    )
    found, expected = (logits(Model.load(each, adapter=llama, **settings)) for each in (path, exact))
    effect = np.abs(found - logits(Model.load(path, **settings))).mean()
    assert np.abs(found - expected).mean() < effect / 4


def test_an_adapter_that_was_trained_for_another_checkpoint_is_not_merged(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    import edgeq

    folder = write(tmp_path / "a", factors({"model.layers.0.self_attn.q_proj": (64, 128)}))
    with pytest.raises(CheckpointError, match="give the checkpoint that it was trained for"):
        edgeq.convert(checkpoint("llama_gqa", dtype="float32", **WEIGHTS), tmp_path / "x.edgeq", merge_lora=folder)
