"""The demo model with marks of thinking in its tokenizer, and a chat template that begins the thinking, or skips it."""

from __future__ import annotations

import json

from edgeq.runtime import Model
from edgeq.text.tokenizer import Tokenizer

SAID = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SKIPPED = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
OPENED = SAID + SKIPPED + "{% else %}<think>\n{% endif %}"
MARKS = ("<think>", "</think>")


def with_marks(model: Model, special: bool = False) -> Model:
    """The last two tokens of its vocabulary become the marks; `special`: a decoder leaves them out."""
    blob = model.file.blob("tokenizer.json")
    assert blob is not None
    found = json.loads(blob)
    inner = found["model"]
    for literal, name in zip(MARKS, sorted(inner["vocab"], key=inner["vocab"].__getitem__)[-2:], strict=True):
        inner["merges"] = [parts for parts in inner["merges"] if "".join(parts) != name]
        inner["vocab"][literal] = inner["vocab"].pop(name)
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
        found["added_tokens"].append({"id": inner["vocab"][literal], "content": literal, **flags})
    model.text = Tokenizer(json.dumps(found), model.file.metadata.generation)
    return model
