"""The Python API on the trained tiny model: text, what ends it, what it cost, what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgeq.errors import FormatError, InputError, UnsupportedError
from edgeq.network import rope
from edgeq.network.rope import Rope
from edgeq.runtime import Measurement, Model, Sampling

PROMPT = "def main():"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def model(tiny_path: Path) -> Model:
    return Model.load(tiny_path, target="reference", context=256, chat_template=TEMPLATE)


def test_greedy_text_equals_transformers(model: Model) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(__file__).parent.parent.parent / "models" / "tiny-llama"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = model.text.encode(PROMPT)
    ids = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=40, do_sample=False)
    generation = model.generate(PROMPT, max_tokens=40)
    assert "".join(generation) == model.text.decode(ids[0, len(prompt) :].tolist())
    assert generation.tokens == ids[0, len(prompt) :].tolist()


def test_text_comes_piece_by_piece(model: Model) -> None:
    pieces = list(model.generate(PROMPT, max_tokens=20))
    assert len(pieces) > 5 and all(pieces)
    assert [p.text for p in model.generate(PROMPT, max_tokens=20).pieces() if p.text] == pieces


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model: Model) -> None:
    def text(seed: int) -> str:
        return "".join(model.generate(PROMPT, max_tokens=30, sampling=Sampling(temperature=1.0, top_p=0.95, seed=seed)))

    assert text(1) == text(1)
    assert len({text(s) for s in range(4)}) == 4


def test_max_tokens_ends_with_length(model: Model) -> None:
    generation = model.generate(PROMPT, max_tokens=7)
    assert generation.finish_reason is None
    "".join(generation)
    assert generation.finish_reason == "length" and len(generation.tokens) == 7


def test_a_stop_string_ends_with_stop_and_is_not_shown(model: Model) -> None:
    whole = "".join(model.generate(PROMPT, max_tokens=40))
    stop = whole[20:27]
    generation = model.generate(PROMPT, max_tokens=40, stop=[stop])
    assert "".join(generation) == whole[: whole.index(stop)]
    assert generation.finish_reason == "stop" and len(generation.tokens) < 40


def test_a_held_back_part_of_a_stop_string_comes_at_the_end(model: Model) -> None:
    whole = "".join(model.generate(PROMPT, max_tokens=9))
    assert "".join(model.generate(PROMPT, max_tokens=9, stop=[whole[-2:] + "\x00"])) == whole


def test_a_stop_token_ends_with_stop_and_has_no_text(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model.generate(PROMPT, max_tokens=10)
    "".join(first)
    end = first.tokens[5]
    at = first.tokens.index(end)
    monkeypatch.setattr(model.text, "eos", frozenset([end]))
    generation = model.generate(PROMPT, max_tokens=10)
    assert "".join(generation) == model.text.decode(first.tokens[:at])
    assert generation.finish_reason == "stop" and generation.tokens == first.tokens[: at + 1]


def test_a_full_context_ends_with_context(tiny_path: Path) -> None:
    small = Model.load(tiny_path, target="reference", context=10)
    generation = small.generate([3] * 8, max_tokens=100)
    "".join(generation)
    # Two more tokens are run, a third is drawn behind the last position.
    assert generation.finish_reason == "context" and len(generation.tokens) == 3


def test_a_prompt_as_long_as_the_context_gives_one_token(tiny_path: Path) -> None:
    generation = Model.load(tiny_path, target="reference", context=8).generate([3] * 8)
    "".join(generation)
    assert generation.finish_reason == "context" and len(generation.tokens) == 1


def test_a_longer_prompt_is_refused_before_it_runs(model: Model) -> None:
    with pytest.raises(InputError, match="300 tokens.*256 positions.*`context`"):
        model.generate([3] * 300)


def test_going_on_with_a_session_gives_the_text_of_a_fresh_one(model: Model) -> None:
    session = model.session()
    chat = [{"role": "user", "content": "What is a list?"}]
    first = "".join(model.chat(chat, max_tokens=12, session=session))
    chat += [{"role": "assistant", "content": first}, {"role": "user", "content": "And a tuple?"}]
    again = model.chat(chat, max_tokens=12, session=session)
    assert "".join(again) == "".join(model.chat(chat, max_tokens=12))
    assert 0 < again.measurement.cached_tokens < again.measurement.prompt_tokens


def test_a_text_whose_session_ran_another_one_does_not_go_on(model: Model) -> None:
    session = model.session()
    first = model.generate("def main():", max_tokens=20, session=session)
    begun = next(first)
    other = "".join(model.generate("class Point:", max_tokens=8, session=session))
    assert begun and other == "".join(model.generate("class Point:", max_tokens=8))
    with pytest.raises(InputError, match="session has run another text"):
        list(first)


def test_the_measurement_counts_tokens_steps_and_bytes(model: Model) -> None:
    session = model.session()
    prompt = model.text.encode(PROMPT)
    "".join(model.generate(prompt, max_tokens=1, session=session))
    generation = model.generate(prompt, max_tokens=5, session=session)
    "".join(generation)
    m, sizes = generation.measurement, model.file.metadata.bytes_per_token()
    assert (m.prompt_tokens, m.cached_tokens, m.generated_tokens, m.decode_steps) == (len(prompt), len(prompt) - 1, 5, 4)
    positions = sum(len(prompt) + i for i in (1, 2, 3, 4))
    assert m.decode_bytes == 4 * (sizes["weights"] + sizes["head"]) + positions * sizes["kv_per_position"]
    assert m.ttft_s >= m.prefill_s > 0 and m.load_s > 0
    assert m.decode_rate == 4 / m.decode_s and m.prefill_rate == 1 / m.prefill_s
    assert m.as_dict()["decode_bytes_per_s"] == m.decode_bytes / m.decode_s


def test_rates_of_nothing_are_zero() -> None:
    m = Measurement(0.0, 1, 1)
    assert (m.prefill_rate, m.decode_rate, m.decode_bytes_per_s) == (0, 0, 0)


def test_a_file_without_chat_template_says_what_to_pass(tiny_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="chat_template=FILE"):
        Model.load(tiny_path, target="reference").chat([{"role": "user", "content": "x"}])


def test_a_template_that_cannot_be_read_leaves_the_rest_usable(tiny_path: Path) -> None:
    model = Model.load(tiny_path, target="reference", chat_template="{% for %}")
    assert "".join(model.generate(PROMPT, max_tokens=3))
    with pytest.raises(UnsupportedError, match="cannot be read"):
        model.chat([{"role": "user", "content": "x"}])


def test_arguments_out_of_range_are_refused(model: Model, tiny_path: Path) -> None:
    with pytest.raises(InputError, match="max_tokens"):
        model.generate(PROMPT, max_tokens=0)
    with pytest.raises(InputError, match="empty"):
        model.generate("")
    with pytest.raises(InputError, match="stop"):
        model.generate(PROMPT, stop=[""])
    for name in ("threads", "threads_prefill", "max_rows", "max_logits"):
        with pytest.raises(InputError, match=name):
            Model.load(tiny_path, target="reference", **{name: -1})
    with pytest.raises(InputError, match="mode"):
        Model.load(tiny_path, target="reference", mode="a3")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="kv"):
        Model.load(tiny_path, target="reference", kv="int3")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="'tpu'"):
        Model.load(tiny_path, target="tpu")
    with pytest.raises(InputError, match="no such file"):
        Model.load(tiny_path.with_name("none.edgeq"), target="reference")


def test_the_description_names_target_and_mode(model: Model) -> None:
    assert "reference" in model.description and "a16" in model.description


def test_importing_the_runtime_loads_neither_torch_nor_numba() -> None:
    code = "import sys, edgeq.runtime; print(sorted({'torch', 'transformers', 'numba', 'llvmlite', 'tvm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


GENERATE = """
from edgeq.runtime import Model, Sampling
with Model.load(path, target="cpu", mode="a16", threads=1, isa="portable", max_rows=16) as model:
    model.generate([1, 2, 3], max_tokens=2, sampling=Sampling(), ignore_eos=True).text()
"""


def test_where_all_kernels_are_kept_numba_is_not_imported(tiny_path: Path) -> None:
    """It takes a second and 14 MB."""
    exec(GENERATE, {"path": tiny_path})
    code = f"path = {str(tiny_path)!r}\n{GENERATE}\nimport sys; print('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("kind", "settings"),
    (
        ("default", {}),
        ("linear", {"factor": 4.0}),
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
        ("llama3", {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
    ),
)
def test_frequencies_equal_transformers(kind: str, settings: dict[str, float]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": kind, "rope_theta": 500000.0, **settings}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=parameters)
    functions = {**ROPE_INIT_FUNCTIONS, "default": LlamaRotaryEmbedding.compute_default_rope_parameters}
    wanted = functions[kind](config, device="cpu")[0]
    ours = rope.frequencies(Rope(theta=500000.0, kind=kind, **settings), 64)  # type: ignore[arg-type]
    assert ours == pytest.approx(wanted.tolist(), rel=1e-5)


def test_llama3_factors_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(FormatError, match="low_freq_factor"):
        rope.frequencies(Rope(theta=1e4, kind="llama3", low_freq_factor=4.0, high_freq_factor=4.0), 64)
