"""Continue a prompt:  python examples/generate.py MODEL.edgeq "def read_file(path):" """

from __future__ import annotations

import sys

from edgeq import Model, Sampling


def main(path: str, prompt: str) -> None:
    model = Model.load(path, context=1024)
    generation = model.generate(prompt, max_tokens=64, sampling=Sampling(temperature=0.7, top_p=0.9, seed=1))
    for text in generation:
        print(text, end="", flush=True)
    cost = generation.measurement
    print(
        f"\n[{generation.finish_reason}; first token after {cost.ttft_s:.2f} s, then {cost.decode_rate:.1f} tok/s]",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
