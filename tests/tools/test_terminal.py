"""What reaches a terminal: text of models cannot move its cursor, set its title or clipboard, or reorder its lines."""

from __future__ import annotations

import io
import sys
import unicodedata

import pytest

from edgeq.runtime import Piece
from edgeq.tools.cli.terminal import harmless, write
from edgeq.tools.commands.run import Screen

HOSTILE = {
    "clear the screen": "\x1b[2J",
    "C1 control sequence introducer": "\x9b2J",
    "set the clipboard (OSC 52)": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "OSC of C1, ended by ST of C1": "\x9d0;title\x9c",
    "write over the line": "safe\rrm",
    "backspaces": "safe\b\b\b\b",
    "reverse a line": "\u202egnp.exe",
    "isolate": "\u2067abc\u2069",
    "invisible tags": "\U000e0041\U000e007f",
    "nothing": "\0\x7f\ufeff",
    "other line ends": "a\u2028b\u2029c\x0bd\x0ce\x85f",
}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_nothing_that_a_terminal_obeys_is_written_to_one(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        monkeypatch.setattr(sys, "stdout", stream)
        for c in text:  # as a model streams it
            write(c)
    assert pipe.getvalue() == text
    shown = terminal.getvalue()
    assert shown == harmless(text) and shown != text
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")], ascii(shown)


def test_every_control_character_but_line_ends_and_tabs_is_replaced() -> None:
    for code in (*range(0x20), *range(0x7F, 0xA0)):
        c = chr(code)
        assert harmless(f"a{c}b") == (f"a{c}b" if c in "\n\t" else "ab" if c == "\r" else "a\ufffdb")


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n\treturn 1\n",
        "naïve\u00a0café\u202f!",
        "日本\u3000語",
        "\u0646\u0645\u06cc\u200c\u062e",
        "👩\u200d🔬 ❤\ufe0f",
        "\ue0b0\U0001fae9",
    ],
)
def test_text_of_any_language_stays_as_it_is(text: str) -> None:
    assert harmless(text) == text


def test_what_is_thought_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    for piece in (Piece("Hm", 5, True), Piece("", 6, True), Piece("yes", 7), Piece("", 8)):
        screen.show(piece)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("yes", "Hm\n\n")
