"""How fast models of random weights read prompts and decode: `python -m tests.cuda.first_run.decode SHAPE ...`.

With --plain tokens are decoded and nothing is measured, for a program that counts.
"""

from __future__ import annotations

import sys

import click

from edgeq.runtime import Model
from edgeq.tools.commands import bench
from tests.cuda.first_run.results import write
from tests.cuda.first_run.shapes import random_model

DEPTHS = (0, 2048)
PROMPT = 512


@click.command()
@click.argument("shapes", nargs=-1, required=True)
@click.option("--tokens", default=64, show_default=True)
@click.option("--plain", is_flag=True)
def main(shapes: tuple[str, ...], tokens: int, plain: bool) -> None:
    failed = [name for name in shapes if not decoded(name, tokens, plain)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def decoded(shape: str, tokens: int, plain: bool) -> bool:
    """Measure one shape; whether all of it succeeded.  One that the GPU has no room for does not end the others."""
    try:
        with random_model(shape) as file:
            for mode in ("a16",) if plain else ("a16", "a8"):
                _measured(shape, file.path, mode, tokens, plain)
    except Exception as error:
        write("decode", {"shape": shape, "failed": f"{type(error).__name__}: {error}"})
        return False
    return True


def _measured(shape: str, path: object, mode: str, tokens: int, plain: bool) -> None:
    small = shape == "tiny"
    with Model.load(path, target="cuda", mode=mode, context=256 if small else DEPTHS[-1] + 1024) as model:  # type: ignore[arg-type]
        tests = [bench.Test("tg", tokens, depth) for depth in ((0,) if small or plain else DEPTHS)]
        if plain:
            for _ in bench.run(model, tests[0], tokens):
                pass
            return
        tests.append(bench.Test("pp", 64 if small else PROMPT, 0))
        bytes_per_s = model.program.read_bandwidth()
        for test in tests:
            record = bench.measure(model, test, 1 if small else 5, bytes_per_s, lambda *_: None)
            # Where a decoded token goes is asked of a text, which a file without a tokenizer cannot give.
            row = bench.Row(record, 0.0, bench.where_time_goes(model, test, 1) if test.kind == "pp" else None)
            write("decode", {"shape": shape, "mode": mode, **bench.fields(row)})


if __name__ == "__main__":
    main()
