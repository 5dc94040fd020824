"""Sessions over every codec of the cache: chunks, windows, trimming, neighbours, sizes, and what quality they cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from edgeq.format.container import ModelFile
from edgeq.format.records import KvCodec
from edgeq.runtime import Model
from edgeq.targets import host, pick
from edgeq.targets.target import Options
from edgeq.tools.cli.main import main
from edgeq.tools.measure.statistics import log_sum_exp
from edgeq.tools.quality import corpus

TOKENS = [int(t) for t in np.random.default_rng(5).integers(2, 2048, 150)]
CODECS = (KvCodec("f16"), KvCodec("int8"), KvCodec("int4"), KvCodec("int4", 4))
WEIGHTS = {"initializer_range": 0.05}


def model_of(path: Path, target: str, kv: KvCodec, context: int = 192) -> Model:
    options = Options("a16", threads=1 if target == "cpu" else 0, max_rows=64, max_logits=64, kv=kv)
    return Model(ModelFile.open(path), pick(target), options, context=context)


@pytest.fixture(params=CODECS, ids=lambda kv: kv.name)
def kv(request: pytest.FixtureRequest) -> KvCodec:
    codec: KvCodec = request.param
    return codec


@pytest.fixture(params=("mistral", "qwen3"))  # a window of 24; norms of heads, heads of 64
def path(request: pytest.FixtureRequest, model_path: Callable[..., Path]) -> Path:
    return model_path(request.param, WEIGHTS, method="none", dtype="f32")


def test_targets_agree_over_a_whole_model(path: Path, kv: KvCodec) -> None:
    reference, cpu = (
        np.concatenate(list(model_of(path, target, kv).session().all_logits(TOKENS))) for target in ("reference", "cpu")
    )
    # here and there a number lies between two codes and its last bit decides
    difference = np.abs(reference - cpu)
    assert np.median(difference) < 1e-4 and difference.mean() < 2e-3


def test_a_prompt_gives_the_same_bits_however_it_is_run(path: Path, kv: KvCodec) -> None:
    model = model_of(path, "cpu", kv)
    wanted = model.session().prefill(TOKENS)
    session = model.session()
    session.prefill(TOKENS[:100])
    other = model.session()
    other.prefill(TOKENS[50:])
    for token in TOKENS[100:]:
        logits = session.decode(token)
        if other.left:
            other.decode(token)
    assert np.array_equal(wanted, logits)
    session.rewind(67)
    assert np.array_equal(wanted, session.prefill(TOKENS[67:]))
    changed = [*TOKENS[:80], 7, 8, 9]
    assert session.keep_prefix(changed) == 80
    assert np.array_equal(session.prefill(changed[80:]), model.session().prefill(changed))


def test_a_smaller_cache_holds_a_longer_context_in_the_same_memory(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeq.runtime.session import context_size

    monkeypatch.setattr(context_size, "DEFAULT_CONTEXT", 1 << 20)
    file = ModelFile.open(tiny_path)
    config = replace(file.metadata.config, max_position_embeddings=1 << 20)
    file.metadata = replace(file.metadata, config=config)
    monkeypatch.setattr(host, "available_bytes", lambda: 64 << 20)
    lengths = []
    for codec in (KvCodec("f16"), KvCodec("int8"), KvCodec("int4", 4), KvCodec("int4")):
        options = Options("a16", max_rows=16, kv=codec)
        lengths.append(Model(file, pick("reference"), options).context)
    assert lengths == sorted(lengths) and lengths[-1] > 2.5 * lengths[0]


def test_the_cache_that_a_file_was_made_for_is_the_default(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModelFile.open(tiny_path)
    file.metadata = replace(file.metadata, kv=KvCodec("int4", 4))
    monkeypatch.setattr(ModelFile, "open", lambda _: file)
    for wish, name in ((None, "int4+4"), ("file", "int4+4"), ("int8", "int8"), ("int4", "int4")):
        model = Model.load(tiny_path, target="reference", kv=wish)  # type: ignore[arg-type]
        assert model.program.options.kv.name == name
        per_head = model.program.options.kv.head_bytes(model.config.head_dim)
        assert model.position_bytes == 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * per_head
    assert file.metadata.bytes_per_token()["kv_per_position"] == Model.load(tiny_path, target="reference").position_bytes


def test_the_command_line_says_which_cache_is_used(tiny_path: Path) -> None:
    def run(*words: str) -> Any:
        result = CliRunner().invoke(main, ["run", str(tiny_path), "-p", "def f", "-n", "3", "-c", "64", *words])
        assert result.exit_code == 0, result.output
        return result

    told = json.loads(run("--kv", "int4", "--json", "--target", "cpu").stdout)
    assert told["kv"] == "int4" and told["kv_bytes_per_position"] == told["generation"]["position_bytes"]
    assert "cache    f16, " in run("--target", "cpu").stderr
    shown = CliRunner().invoke(main, ["inspect", str(tiny_path)])
    assert "bytes of f16 cache per position" in shown.output
    refused = CliRunner().invoke(main, ["run", str(tiny_path), "-p", "a", "--kv", "int3"])
    assert refused.exit_code == 2 and "supported: file, f16, int8, int4" in refused.output


def test_int8_costs_nothing_and_int4_little(tiny_path: Path) -> None:
    """The held-out code of the trained model: mean NLL of 1024 tokens in windows of 256."""
    nll = {}
    for codec in CODECS:
        model = model_of(tiny_path, "cpu", codec, 256)
        tokens = model.text.encode(corpus.evaluation_code()[0])[: 4 * 256]
        total = 0.0
        for start in range(0, len(tokens), 256):
            window = tokens[start : start + 256]
            logits = np.concatenate(list(model.session().all_logits(window)))[:-1]
            total += (log_sum_exp(logits) - logits[np.arange(len(window) - 1), window[1:]]).mean()
        nll[codec.name] = total / 4
    assert abs(nll["int8"] - nll["f16"]) < 2e-3
    assert max(abs(nll["int4"] - nll["f16"]), abs(nll["int4+4"] - nll["f16"])) < 0.02
