"""How a command refuses bad input: one line, what to do, no traceback."""

from __future__ import annotations

import json
import subprocess

from click.testing import Result


def refused(result: Result | subprocess.CompletedProcess[str], *words: str, code: int = 1, begun: bool = False) -> None:
    """One line on standard error that holds all of `words`; nothing on standard output but, with --json, the same as JSON.

    begun: of a conversion that had begun, after the lines about what it will make and about its layers.
    """
    found = result.exit_code if isinstance(result, Result) else result.returncode
    assert found == code, (found, result.stderr)
    lines = result.stderr.splitlines()
    while begun and lines[0].startswith(("rtn: a file of", "without --method ", "layer ")):
        del lines[0]
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert not result.stdout or json.loads(result.stdout) == {"error": lines[0].removeprefix("error: "), "exit_code": code}
    for word in words:
        assert word in lines[0], (word, lines[0])
