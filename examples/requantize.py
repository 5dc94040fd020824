"""Round the weights again for a prompt:  python examples/requantize.py MODEL.edgeq "def read_file(path):"

The file must hold masters to round from: `edgeq convert SRC -o MODEL.edgeq --method ttq`.  Activations of the prompt decide
which input channels matter (TTQ); the session then decodes with weights of its own.
"""

from __future__ import annotations

import sys

from edgeq import Model, Requantization


def main(path: str, prompt: str) -> None:
    for when in ("never", "prompt"):
        model = Model.load(path, context=512, requantization=Requantization(when=when, min_tokens=4))
        generation = model.generate(prompt, max_tokens=32)
        print(f"--- {when}: {generation.text()!r}")
        cost = generation.measurement
        print(f"[{cost.requantized_tokens} tokens read, {1000 * cost.requantize_s:.0f} ms]", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
