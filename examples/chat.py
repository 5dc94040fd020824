"""Talk with a model, one line at a time:  python examples/chat.py MODEL.edgeq [TEMPLATE.jinja]

The session keeps keys and values of the conversation, so every turn runs only what is new.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edgeq import Model


def main(path: str, template: str | None = None) -> None:
    model = Model.load(path, chat_template=Path(template).read_text(encoding="utf-8") if template else None)
    session, messages = model.session(), [{"role": "system", "content": "Answer in one sentence."}]
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.strip()})
        answer = ""
        for text in model.chat(messages, session=session, max_tokens=48):
            print(text, end="", flush=True)
            answer += text
        messages.append({"role": "assistant", "content": answer})
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
