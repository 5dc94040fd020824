"""Models whose tokens see both ways: vectors equal those of transformers, whatever is read beside a text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.converters.convert import convert
from edgeq.converters.families import recognise
from edgeq.converters.planning.options import ConvertOptions
from edgeq.errors import CheckpointError, InputError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.network.pooling import DenseLayer, Pooling
from edgeq.pictures.prompt import Prompt
from edgeq.runtime import Model
from edgeq.runtime.batching.embedding_scheduler import EmbeddingScheduler
from edgeq.runtime.batching.job import Job
from edgeq.runtime.request import Request
from edgeq.runtime.sampling import Sampling
from edgeq.targets.reference import attention as reference_attention
from tests.checkpoints.embeddings import PROMPTS
from tests.checkpoints.encoders import (
    PADDING,
    WINDOW,
    bert,
    embedding_gemma,
    modernbert,
    nomic_bert,
    through_dense,
    write_dense,
    xlm_roberta,
)
from tests.targets.cases import case

Vectors = NDArray[np.float32]
TARGETS = ("reference", "cpu")
RNG = np.random.default_rng(4)
# Around the window, pages and tiles; the last one fills the context.
TOKENS = [[int(t) for t in RNG.integers(2, 2048, length)] for length in (1, 2, 9, 10, 11, 19, 63, 64, 65, 130, 192)]
MAKERS: dict[str, Callable[[Path], Path]] = {
    "embedding_gemma": embedding_gemma,
    "bert": bert,
    "xlm_roberta": xlm_roberta,
    "modernbert": modernbert,
    "nomic_bert": nomic_bert,
}
POOLED = {
    "embedding_gemma": ("mean", True),
    "bert": ("cls", True),
    "xlm_roberta": ("mean", False),
    "modernbert": ("mean", True),
    "nomic_bert": ("mean", True),
}
Sources = Callable[[str], Path]


def pooled(folder: Path, states: list[Vectors], kind: str, normalize: bool) -> Vectors:
    found = np.stack([each.mean(0) if kind == "mean" else each[0] for each in states])
    found = through_dense(folder, found)
    return found / np.linalg.norm(found, axis=1, keepdims=True) if normalize else found


def expected(folder: Path, family: str, **changes: Any) -> Vectors:
    """By transformers, each text alone; `changes` of the configuration show what another reading of it would give."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **changes)
    with torch.no_grad():
        states = [model(torch.tensor([tokens])).last_hidden_state[0].numpy() for tokens in TOKENS]
    return pooled(folder, states, *POOLED[family])


def error(found: Vectors, wanted: Vectors) -> float:
    """The largest distance of a vector, over its length."""
    return float((np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)).max())


def loaded(path: Path, target: str = "cpu", **options: Any) -> Model:
    return Model.load(path, target=target, threads=1, threads_prefill=1, **options)


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference keeps keys and values as they are, not in f16."""
    monkeypatch.setattr(reference_attention, "cached", lambda x, kv, keys: x)


@pytest.mark.parametrize("family", MAKERS)
def test_vectors_are_those_of_transformers_to_the_last_digits(family: str, source: Any, path: Any, unrounded: None) -> None:
    with loaded(path(family, method="none"), "reference") as model:
        assert error(model.embed(TOKENS), expected(source(family), family)) <= 1e-5


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", MAKERS)
def test_vectors_with_keys_and_values_in_f16_and_weights_in_few_bits(family: str, target: str, source: Any, path: Any) -> None:
    wanted = expected(source(family), family)
    for options, most in (
        ({"method": "none"}, 1e-3),
        ({"bits": 8, "group_size": 32}, 0.04),
        ({"bits": 4, "group_size": 32}, 0.5),
    ):
        with loaded(path(family, **options), target) as model:
            assert error(model.embed(TOKENS), wanted) <= most


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", MAKERS)
def test_a_text_has_the_same_vector_alone_and_beside_others(family: str, target: str, path: Any) -> None:
    with loaded(path(family, method="none"), target) as model:
        alone = np.concatenate([model.embed([tokens]) for tokens in TOKENS])
        assert np.array_equal(model.embed(TOKENS), alone) and np.array_equal(model.embed(TOKENS[::-1]), alone[::-1])
        scheduler = EmbeddingScheduler(model)
        tickets = [scheduler.submit(Job(Prompt(tokens), Request(), Sampling())) for tokens in TOKENS]
        found = dict[int, Vectors]()
        while scheduler.busy:
            found |= {tickets.index(each.ticket): each.vector for each in scheduler.step() if each.vector is not None}
        assert np.array_equal(np.stack([model.embedder.head.vector(found[i]) for i in range(len(TOKENS))]), alone)


@pytest.mark.parametrize("family", MAKERS)
def test_a_text_is_one_run_and_its_cache_that_of_one_layer(family: str, path: Any) -> None:
    with loaded(path(family, method="none")) as model:
        assert len(model.graph.cache) == 1
        runs: list[int] = []
        run = model.program.run
        model.program.run = lambda rows, mode=None: runs.append(len(rows)) or run(rows, mode)  # type: ignore[method-assign]
        model.embed([TOKENS[-1]])
        assert runs == [len(TOKENS[-1])]
        with model.session() as session:
            session.prefill(TOKENS[-1])
            assert runs[1:] == [len(TOKENS[-1])]
            session.rewind(5)
            with pytest.raises(InputError, match="sees a text in both directions"):
                session.prefill([5])
            session.rewind(0)
            session.prefill([5])
        with pytest.raises(InputError, match="193 tokens, the context 192"):
            model.embed([[5] * 193])
    with loaded(path(family, method="none"), context=40, max_rows=8) as model:
        assert model.program.options.max_rows >= 40 and len(model.embed([[5] * 40])) == 1
        with pytest.raises(InputError, match="the context 40 positions"):
            model.embed([[5] * 41])
    with pytest.raises(InputError, match="context 500 is out of range; this model takes 1 to 192"):
        loaded(path(family, method="none"), context=500)


def test_the_last_token_changes_the_first(path: Any) -> None:
    """What a causal mask would not let it."""
    states = []
    for tokens in (TOKENS[4], [*TOKENS[4][:-1], 7]):
        with loaded(path("embedding_gemma", method="none"), "reference") as model, model.session() as session:
            states.append(next(iter(session.all_logits(tokens)))[0])
    assert np.abs(states[0] - states[1]).max() > 1e-2


@pytest.mark.parametrize("window", [WINDOW - 2, WINDOW + 2, 2 * WINDOW])
def test_half_of_a_window_is_before_a_token_and_half_after_it(window: int, source: Any, path: Any) -> None:
    config = ModelFile.open(path("embedding_gemma", method="none")).metadata.config
    assert config.sliding_windows == (WINDOW // 2 + 1, 0) * 2 and config.ranges == (0, WINDOW // 2 + 1)
    with loaded(path("embedding_gemma", method="none"), "reference") as model:
        # transformers takes this window as it is: it was halved already.
        other = expected(source("embedding_gemma"), "embedding_gemma", sliding_window=window)
        assert error(model.embed(TOKENS), other) > 1e-2


def test_the_same_model_may_be_causal(tmp_path: Path) -> None:
    folder = embedding_gemma(tmp_path / "causal", use_bidirectional_attention=False)
    file = convert(str(folder), tmp_path / "a.edgeq", ConvertOptions(method="none"), lambda *_: None)
    config = file.metadata.config
    assert not config.bidirectional and config.sliding_windows == (WINDOW, 0) * 2 and config.ranges == ()
    with loaded(tmp_path / "a.edgeq") as model:
        assert error(model.embed(TOKENS), expected(folder, "embedding_gemma")) <= 1e-3


def test_dense_layers_are_kept_in_floats_and_cut_vectors_are_theirs(path: Any) -> None:
    file = ModelFile.open(path("embedding_gemma", bits=4, group_size=32))
    assert file.metadata.config.pooling == Pooling("mean", True, (DenseLayer(144), DenseLayer(72)))
    assert file.metadata.arrays["dense.0"].shape == (144, 96) and file.metadata.arrays["dense.1"].shape == (72, 144)
    with loaded(path("embedding_gemma", method="none")) as model:
        whole, cut = model.embed(TOKENS), model.embed(TOKENS, dimensions=16)
        assert whole.shape == (len(TOKENS), 72)
        assert np.allclose(cut, whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True), atol=1e-6)
        with pytest.raises(InputError, match="from 1 to 72"):
            model.embed("a", dimensions=73)


def test_a_bias_and_a_tanh_of_dense_layers(source: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(source("embedding_gemma"), tmp_path / "dense")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules[:2], modules[-1]]))
    write_dense(folder, [(96, 144), (144, 72)], "activation.Tanh", bias=True)
    convert(str(folder), tmp_path / "a.edgeq", ConvertOptions(method="none"), lambda *_: None)
    with loaded(tmp_path / "a.edgeq") as model:
        assert error(model.embed(TOKENS), expected(folder, "embedding_gemma")) <= 1e-3


def test_the_network_of_bert(source: Any, path: Any) -> None:
    config = ModelFile.open(path("bert", method="none")).metadata.config
    assert config.normed_residual == "all" and config.layer_norm and config.rms_norm_eps == 3e-4
    assert (config.hidden_act, config.gated) == ("gelu_pytorch_tanh", False)
    assert config.max_position_embeddings == 192 and config.segments == 1
    # Of XLM-R's table the rows up to that of the padding are not positions.
    assert ModelFile.open(path("xlm_roberta", method="none")).metadata.config.max_position_embeddings == 192


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bert", {"layer_norm_eps": 1e-12}),
        ("bert", {"hidden_act": "gelu"}),
        ("xlm_roberta", {"hidden_act": "gelu_new"}),
        ("modernbert", {"norm_eps": 1e-5}),
        ("nomic_bert", {"layer_norm_eps": 1e-12}),
        ("nomic_bert", {"hidden_act": "gelu"}),
        ("nomic_bert", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
        ("modernbert", {"local_attention": WINDOW - 2}),
        ("modernbert", {"local_attention": WINDOW + 2}),
    ],
)
def test_another_reading_of_the_keys_gives_other_vectors(
    family: str, changes: Any, source: Any, path: Any, unrounded: None
) -> None:
    with loaded(path(family, method="none"), "reference") as model:
        assert error(model.embed(TOKENS), expected(source(family), family, **changes)) > 5e-5


def test_the_network_of_modernbert(source: Any, path: Any) -> None:
    config = ModelFile.open(path("modernbert", method="none")).metadata.config
    assert config.sliding_windows == (WINDOW // 2 + 1, 0) * 2 and (config.normed_residual, config.gated) == ("first", True)
    assert config.local_rope is not None and (config.rope.theta, config.local_rope.theta) == (9000.0, 700.0)
    published = {
        "architectures": ["ModernBertModel"],
        "global_rope_theta": 5e4,
        "local_rope_theta": 2e3,
        "num_hidden_layers": 7,
    }
    config = recognise(published, pooling=Pooling("cls", True))[1]
    assert config.sliding_windows == (0, 65, 65, 0, 65, 65, 0) and config.hidden_act == "gelu"
    assert recognise({**published, "hidden_activation": "silu"}, pooling=Pooling("cls", True))[1].hidden_act == "silu"
    assert config.local_rope is not None and (config.rope.theta, config.local_rope.theta) == (5e4, 2e3)


def test_nomic_bert_with_the_keys_that_it_is_published_with(source: Any, path: Any, tmp_path: Path) -> None:
    """Keys of GPT-2's names beside code of its own: the same network, tensor by tensor."""
    folder = shutil.copytree(source("nomic_bert"), tmp_path / "published")
    config = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert",
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        "activation_function": "swiglu", "causal": False, "layer_norm_epsilon": 3e-4, "mlp_fc1_bias": False,
        "mlp_fc2_bias": False, "n_embd": 96, "n_head": 6, "n_inner": 80, "n_layer": 3, "n_positions": 192,
        "parallel_block": False, "prenorm": False, "qkv_proj_bias": False, "rotary_emb_base": 700, "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "type_vocab_size": 3,
        "use_rms_norm": False, "vocab_size": 2048,
    }  # fmt: skip
    family, found = recognise(config, pooling=Pooling("mean", True))
    file = ModelFile.open(path("nomic_bert", method="none"))
    assert found == file.metadata.config and found.rope.theta == 700
    sources = recognise(json.loads((folder / "config.json").read_text()), pooling=Pooling("mean", True))[0].sources()
    assert family.sources() == sources
    del config["activation_function"], config["layer_norm_epsilon"], config["rotary_emb_base"], config["n_positions"]
    found = recognise(config, pooling=Pooling("mean", True))[1]
    assert (found.hidden_act, found.rope.theta, found.rms_norm_eps, found.max_position_embeddings) == ("silu", 1e3, 1e-12, 8192)
    for changes, message in NOT_NOMIC:
        with pytest.raises((UnsupportedError, CheckpointError), match=message):
            recognise({**config, **changes}, pooling=Pooling("mean", True))


NOT_NOMIC: list[tuple[dict[str, Any], str]] = [
    ({"prenorm": True}, "prenorm is True"),
    ({"qkv_proj_bias": True}, "qkv_proj_bias is True"),
    ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction is 0.5"),
    ({"rotary_scaling_factor": 2}, "rotary_scaling_factor is 2"),
    ({"moe_every_n_layers": 2}, "moe_every_n_layers is 2"),
    ({"activation_function": "geglu"}, "activation_function 'geglu' is not supported"),
    ({"n_head": 5}, "n_embd 96 is not a multiple of n_head 5"),
    ({"n_inner": None}, "n_inner is None"),
    ({"type_vocab_size": 0}, "type_vocab_size is 0"),
    ({"rope_parameters": [5]}, "rope_parameters is"),
]


@pytest.mark.parametrize("name", ["positions", "dense", "segment"])
def test_what_is_added_to_embeddings(name: str, source: Any, tmp_path: Path, unrounded: None) -> None:
    """A file with a row of another position, or of another segment, gives other vectors."""
    from safetensors.numpy import load_file, save_file

    family = "xlm_roberta" if name == "positions" else "bert"
    folder = shutil.copytree(source(family), tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    if name == "positions":
        table = tensors["embeddings.position_embeddings.weight"]
        # A reader that takes row 0 for position 0, or row 2, reads these.
        table[0], table[PADDING + 1] = table[PADDING + 1].copy(), table[0].copy()
    elif name == "segment":
        types = tensors["embeddings.token_type_embeddings.weight"]
        types[[0, 1]] = types[[1, 0]]
    else:
        tensors["pooler.dense.weight"] *= 5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    convert(str(folder), tmp_path / "a.edgeq", ConvertOptions(method="none"), lambda *_: None)
    with loaded(tmp_path / "a.edgeq", "reference") as model:
        found = model.embed(TOKENS)
        assert error(found, expected(folder, family)) <= 1e-5
        # Sentence-transformers takes the state of the first token, not what BERT's pooler makes of it.
        assert (error(found, expected(source(family), family)) > 1e-2) == (name != "dense")


def test_word_pieces(source: Any, path: Any) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(source("bert"))
    text = "The capital of France is PARIS, isn't it?"
    with loaded(path("bert", method="none")) as model:
        tokens = model.text.encode(text)
        assert tokens == theirs(text)["input_ids"] and (tokens[0], tokens[-1]) == (2, 3)
        assert np.array_equal(model.embed(text), model.embed([tokens]))
        assert np.array_equal(model.embed("a", prompt="query"), model.embed(PROMPTS["query"] + "a"))


@pytest.mark.parametrize("family", ["bert", "xlm_roberta"])
def test_an_encoder_without_modules_needs_to_be_told_how_it_pools(family: str, source: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(source(family), tmp_path / "plain")
    (folder / "modules.json").unlink()
    with pytest.raises(UnsupportedError, match="has no head.*--pooling mean or --pooling cls"):
        convert(str(folder), tmp_path / "a.edgeq", ConvertOptions(method="none"), lambda *_: None)
    for kind in ("cls", "mean"):
        out = tmp_path / f"{kind}.edgeq"
        file = convert(str(folder), out, ConvertOptions(method="none", pooling=kind), lambda *_: None)  # type: ignore[arg-type]
        assert file.metadata.config.pooling == Pooling(kind, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
        ({"num_attention_heads": 5}, "hidden_size 96 is not a multiple of num_attention_heads 5"),
        ({"type_vocab_size": 0}, "type_vocab_size is 0"),
        ({"architectures": ["XLMRobertaModel"], "pad_token_id": None}, "pad_token_id is None"),
        ({"architectures": ["XLMRobertaModel"], "max_position_embeddings": 1}, "max_position_embeddings is 1; 1 rows"),
        ({"embedding_size": 64}, "embedding_size is 64"),
    ],
)
def test_what_an_encoder_cannot_have_is_refused_by_key(changes: Any, message: str, source: Any) -> None:
    config = json.loads((source("bert") / "config.json").read_text())
    with pytest.raises((UnsupportedError, CheckpointError), match=message):
        recognise({**config, **changes}, pooling=Pooling("cls", True))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        case(family, method, common=i % 2 == (method == "awq"), id=f"{family}-{method}")
        for i, family in enumerate(MAKERS)
        for method in ("awq", "gptq")
    ],
)
def test_calibrated_methods_see_both_ways_too(family: str, method: str, source: Any, path: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def read_file(path):\n    return open(path).read()\n" * 100)
    options: dict[str, Any] = {
        "calibration": text,
        "calibration_rows": 8,
        "calibration_length": 48,
        "bits": 8,
        "group_size": 32,
    }
    file = convert(str(source(family)), tmp_path / "a.edgeq", ConvertOptions(method=method, **options), lambda *_: None)
    measured = file.metadata.provenance["measured"]
    assert isinstance(measured, dict) and 0 < measured["a8_cosine_distance"] < 0.05
    with loaded(tmp_path / "a.edgeq", mode="a16") as model:
        assert error(model.embed(TOKENS), expected(source(family), family)) <= 0.04
