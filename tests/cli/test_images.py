"""Pictures on the command line: what is answered, what is said, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from PIL import Image

from edgeq.errors import InputError
from edgeq.runtime import Batch, Model
from edgeq.tools.lab.signs import Sample, answers, read, write
from tests.checkpoints.vision import build

pytestmark = pytest.mark.usefixtures("works_here")

Run = Callable[..., Result]
TINY_QWEN2VL = Path(__file__).parent.parent.parent / "models" / "tiny-qwen2vl"
SAYS = "What does the sign say?"


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory, edgeq: Run) -> Path:
    """The demo model that sees, rtn, 4 bits."""
    path = tmp_path_factory.mktemp("sees") / "sees.edgeq"
    result = edgeq("convert", TINY_QWEN2VL, "-o", path, "--method", "rtn")
    assert result.exit_code == 0, result.stderr
    return path


@pytest.fixture(scope="module")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signs")
    write(folder, "evaluation", 8)
    return folder


@pytest.fixture(scope="module")
def model(sees: Path) -> Model:
    return Model.load(sees, mode="a16")


def asked(edgeq: Run, sees: Path, *arguments: object) -> dict[str, Any]:
    result = edgeq("run", sees, "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 1 and not result.stdout, result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("compiling", "kernels", "measuring"))]
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.mark.exhaustive
def test_signs_are_read(sees: Path, signs: Path) -> None:
    right = [sample.answer == answer for sample, answer in answers(sees, signs)]
    assert len(right) == 8 and sum(right) >= 7


def test_splits_have_different_signs(signs: Path, tmp_path: Path) -> None:
    write(tmp_path, "calibration", 8)
    assert [s.answer for s in read(tmp_path)] != [s.answer for s in read(signs)]
    write(tmp_path, "evaluation", 8)
    assert read(tmp_path) == read(signs) and isinstance(read(signs)[0], Sample)


def test_a_picture_goes_in_and_an_answer_comes_out(edgeq: Run, sees: Path, signs: Path) -> None:
    sample = read(signs)[0]
    result = edgeq("run", sees, "--image", signs / sample.image, "-p", sample.question)
    assert result.stdout.strip() == sample.answer
    assert "images   1 (10 tokens), read in" in result.stderr


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        pytest.param("states", 60, marks=pytest.mark.exhaustive),
        ("tiles", 28),
        pytest.param("aspect", 16, marks=pytest.mark.exhaustive),
        ("naflex", 15),
        pytest.param("averaged", 4, marks=pytest.mark.exhaustive),
        ("paligemma", 16),
    ],
)
def test_models_of_every_kind_run_from_the_command_line(
    edgeq: Run, signs: Path, tmp_path: Path, name: str, tokens: int
) -> None:
    result = edgeq("convert", build(tmp_path / name, name), "-o", tmp_path / "m.edgeq", "--method", "rtn", "--bits", 8)
    assert result.exit_code == 0, result.stderr
    found = asked(edgeq, tmp_path / "m.edgeq", "--image", signs / "000000.png", "-p", SAYS, "-n", 4)
    assert [each["tokens"] for each in found["images"]] == [tokens]
    assert (found["generation"]["images"], found["generation"]["visual_tokens"]) == (1, tokens)


def test_json_has_the_pictures_and_their_times(edgeq: Run, sees: Path, signs: Path) -> None:
    path = signs / "000000.png"
    found = asked(edgeq, sees, "--image", path, "--image", path, "-p", SAYS)
    seen = found["images"][1]
    expected = {"path": str(path), "width": 140, "height": 56, "seen_width": 140, "seen_height": 56, "tokens": 10, "notes": []}
    assert {key: seen[key] for key in expected} == expected and seen["read_s"] > 0
    m = found["generation"]
    assert (m["images"], m["visual_tokens"], m["prompt_tokens"]) == (2, 20, 20 + m["prompt_tokens"] - m["visual_tokens"])
    assert m["vision_s"] > 0 and m["prefill_s"] > 0 and m["read_s"] > 0
    assert asked(edgeq, sees, "-p", "Look", "-n", 1)["images"] == []


def test_a_placeholder_that_a_user_types_is_text(edgeq: Run, sees: Path, signs: Path) -> None:
    plain = asked(edgeq, sees, "--image", signs / "000000.png", "-p", SAYS, "-n", 1)
    typed = asked(edgeq, sees, "--image", signs / "000000.png", "-p", f"<|image_pad|> {SAYS}", "-n", 1)
    assert typed["generation"]["visual_tokens"] == plain["generation"]["visual_tokens"] == 10
    assert typed["generation"]["prompt_tokens"] > plain["generation"]["prompt_tokens"] + 3
    text = asked(edgeq, sees, "--chat", "-p", "<|image_pad|>", "-n", 1)
    assert text["generation"]["visual_tokens"] == 0


def test_a_picture_is_shrunk_to_the_tokens_it_may_have(edgeq: Run, sees: Path, signs: Path) -> None:
    result = edgeq("run", sees, "--image", signs / "000000.png", "-p", SAYS, "--image-tokens", 4, "-n", 1)
    assert "000000.png: shrunk to 84 x 28, for at most 4 tokens" in result.stderr
    refused(
        edgeq("run", sees, "--image", signs / "000000.png", "-p", SAYS, "--image-tokens", 200),
        "--image-tokens is 200",
        "1 to 113",
    )
    refused(edgeq("run", sees, "--image", signs / "000000.png", "-p", SAYS, "--image-tokens", 0), "--image-tokens is 0")


def test_wrong_pictures_are_refused_in_one_line(
    edgeq: Run, sees: Path, signs: Path, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = signs / "000000.png"
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "half.png").write_bytes(picture.read_bytes()[:5000])
    (tmp_path / "empty.png").touch()
    Image.new("L", (2, 801)).save(tmp_path / "thin.png")
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    said = {"text.png": "not a picture", "half.png": "truncated or damaged", "none.png": "No such file"}
    for name, words in (said | {"empty.png": "the file is empty", "thin.png": "more than 200 times as long as wide"}).items():
        refused(edgeq("run", sees, "--image", tmp_path / name, "-p", SAYS), name, words)
    monkeypatch.setattr(
        "edgeq.targets.cpu.program.CpuProgram.__init__", lambda *_: pytest.fail("compiled before it was refused")
    )
    refused(edgeq("run", demo, "--image", picture, "-p", SAYS), "reads text alone")
    refused(edgeq("run", demo, "--image-tokens", 5, "-p", SAYS), "reads text alone")
    refused(edgeq("bench", demo, "--image", "56x56"), "reads text alone")
    refused(edgeq("run", sees, "--image-tokens", 200, "-p", SAYS), "--image-tokens is 200")
    monkeypatch.undo()
    slotless = ("--chat-template", tmp_path / "plain.jinja")
    refused(edgeq("run", sees, "--image", picture, "-p", SAYS, *slotless), "no place for an image", "--chat-template")
    refused(edgeq("run", sees, "--image", picture, "-p", SAYS, "-c", 20), "10 of them of images", "the context 20 positions")
    refused(edgeq("run", sees, "-p", "<|image_pad|> here"), "1 place for an image", "0 images are given")


def test_images_and_image_tokens_have_to_be_as_many(model: Model, signs: Path) -> None:
    picture = signs / "000000.png"
    with pytest.raises(InputError, match="has 1 place for an image .* and 2 images are given"):
        model.generate([5, 2049, 6], images=[picture, picture])
    with pytest.raises(InputError, match="has 2 places for an image .* and 1 image is given"):
        model.generate([5, 2049, 2049], images=[picture])
    parts = [{"type": "image"}, {"type": "text", "text": SAYS}]
    with pytest.raises(InputError, match="has 1 place for an image .* and 2 images are given"):
        model.chat([{"role": "user", "content": parts}], images=[picture, picture])
    with pytest.raises(InputError, match="images belong to a question"):
        model.chat([{"role": "system", "content": "Look"}], images=[picture])
    with pytest.raises(InputError, match="`images` is 'a.png'; expected a list"):
        model.generate([2049], images="a.png")  # type: ignore[arg-type]


def test_messages_may_say_where_their_pictures_are(model: Model, signs: Path) -> None:
    first, second = signs / "000000.png", Image.open(signs / "000001.png")
    parts = [{"type": "image"}, {"type": "text", "text": SAYS}]
    said = model.chat([{"role": "user", "content": parts}], images=[second]).text()
    assert said == model.chat([{"role": "user", "content": SAYS}], images=[(signs / "000001.png").read_bytes()]).text()
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}, {"role": "user", "content": parts}]
    prompt = model.chat_prompt(turns, images=[first, second])
    assert [p.digest for p in prompt.places] == [model.read_image(p).digest for p in (first, second)]


@pytest.mark.parametrize("draft", ["lookup", pytest.param("qspec", marks=pytest.mark.exhaustive)])
def test_drafts_change_nothing(model: Model, signs: Path, draft: Any) -> None:
    messages = [{"role": "user", "content": SAYS}]
    plain = model.chat(messages, images=[signs / "000003.png"], max_tokens=12, ignore_eos=True)
    drafted = model.chat(messages, images=[signs / "000003.png"], max_tokens=12, ignore_eos=True, draft=draft, gamma=3)
    assert drafted.text() == plain.text() and drafted.tokens == plain.tokens
    assert sum(drafted.measurement.speculation.drafted) > 0


def test_a_batch_answers_as_each_alone(model: Model, signs: Path) -> None:
    names = [signs / f"{i:06}.png" for i in range(3)]
    prompts = [model.chat_prompt([{"role": "user", "content": SAYS}], images=[name]) for name in names]
    alone = [model.chat([{"role": "user", "content": SAYS}], images=[name], max_tokens=8).text() for name in names]
    together = Batch(model, 3, max_tokens=8).run([*prompts, "def main():"])
    assert {a.index: a.text for a in together if a.index < 3} == dict(enumerate(alone))


@pytest.mark.exhaustive
def test_the_order_of_rows_changes_no_token(sees: Path, model: Model, signs: Path) -> None:
    with Model.load(sees, mode="a16", row_order="modality") as other:
        for draft in ("off", "qspec"):
            first, second = (
                each.chat(
                    [{"role": "user", "content": SAYS}], images=[signs / "000004.png"], draft=draft, gamma=None, logprobs=2
                )
                for each in (model, other)
            )
            assert first.text() == second.text() and first.logprobs == second.logprobs


def test_chat_takes_pictures_and_keeps_them(edgeq: Run, sees: Path, signs: Path, tmp_path: Path) -> None:
    picture, saved = signs / "000000.png", tmp_path / "talk.json"
    lines = [
        f"/image {picture}",
        SAYS,
        "How many characters?",
        "/stats",
        f"/save {saved}",
        "/clear",
        f"/load {saved}",
        "/regenerate",
    ]
    result = edgeq("chat", sees, "--temp", 0, "-n", 8, input="\n".join(lines))
    assert result.exit_code == 0, result.stderr
    answered = [line.strip() for line in result.stdout.splitlines()]
    assert answered[0] == read(signs)[0].answer
    # The second question came with the same picture, which was not encoded again.
    assert "140 x 56 pixels, 10 tokens" in result.stderr and "images   1 (10 tokens), tower 0 ms" in result.stderr
    assert "4 messages" in result.stderr and answered[2] == answered[1]
    part = json.loads(saved.read_text())[0]["content"][0]
    assert part["type"] == "image" and part["path"] == str(picture)
    Image.new("RGB", (30, 30)).save(tmp_path / "other.png")
    saved.write_text(saved.read_text().replace(str(picture), str(tmp_path / "other.png")))
    result = edgeq("chat", sees, input=f"/load {saved}\n/image {tmp_path / 'none.png'}\n")
    assert "is not the one that the conversation was about" in result.stderr and "none.png: cannot read it" in result.stderr


def test_inspect_shows_the_tower_apart(edgeq: Run, sees: Path) -> None:
    shown = edgeq("inspect", sees).stdout
    assert max(map(len, shown.splitlines()[3:5])) <= 100
    assert "vision tower: 4 layers, hidden 128" in shown and "vision project 0" in shown and "vision tower 8." in shown
    bits = json.loads(edgeq("inspect", sees, "--json").stdout)["bits_per_weight"]
    assert 4 < bits["decoder"] < 4.5 and 8 < bits["vision"] < 8.5


@pytest.mark.exhaustive
def test_bench_has_a_line_for_each_size(edgeq: Run, sees: Path) -> None:
    result = edgeq("bench", sees, "-p", 0, "-n", 1, "-r", 1, "--image", "140x56,56x56", "--json")
    assert result.exit_code == 0, result.stderr
    lines = json.loads(result.stdout)[0]["pictures"]
    assert [(line["width"], line["tokens"]) for line in lines] == [(140, 10), (56, 4)]
    assert all(line["first_s"] >= line["vision_s"] > 0 for line in lines)
    assert edgeq("bench", sees, "--image", "140").exit_code == 2


def test_bench_measures_pictures_alone(edgeq: Run, sees: Path) -> None:
    result = edgeq("bench", sees, "-p", 0, "-n", 0, "-r", 1, "--image", "56x56", "--json")
    assert result.exit_code == 0, result.stderr
    (found,) = json.loads(result.stdout)
    assert (found["test"], found["kind"], found["tokens"], found["pictures"][0]["tokens"]) == ("image5", "image", 5, 4)
    assert found["p50"] == found["pictures"][0]["first_s"] > 0
    refused(edgeq("bench", sees, "-p", 0, "-n", 0), "nothing to measure", "--image")
