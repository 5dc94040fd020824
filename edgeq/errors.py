"""The errors a user can meet.  Each message says what was found, what is supported and what to do."""

from __future__ import annotations

MAX_MESSAGE = 2000
"""Characters of a message; of a longer one the middle is left out."""


def printable(text: str) -> str:
    """`text` in one line with nothing but printable characters: others are escaped, as in a Python string.

    A file's text can hold sequences that a terminal obeys (ESC), and characters that reverse the order of what follows.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class EdgeqError(Exception):
    """Base of all errors whose message is meant for the user: shown as one line, exit code 1.

    Messages quote what strangers wrote, so every message is made printable and cut here.
    """

    def __init__(self, message: str) -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[: MAX_MESSAGE - 505]} ... {message[-500:]}"
        super().__init__(printable(message))


class FormatError(EdgeqError):
    """A file that is not a sound `.edgeq` file: wrong magic, truncated, flipped bits, counts out of bounds."""


class UnsupportedError(EdgeqError):
    """A sound input that asks for something this version does not have: architecture, codec, part, option."""


class CheckpointError(EdgeqError):
    """A source checkpoint that cannot be converted as it is: missing file, truncated shard, NaN in a weight."""


class ResourceError(EdgeqError):
    """Not enough disk or memory for what was asked; the message names the largest that fits."""


class InputError(EdgeqError):
    """An argument or a prompt that cannot be used: too long, out of range, not readable."""


class DeviceError(EdgeqError):
    """A device that failed while it ran: it was lost, or a kernel failed.

    The model that ran on it is unusable, the process is not: close the model and load it again.
    """
