"""Continue every line of standard input, four at a time:  python examples/batch.py MODEL.edgeq < prompts.txt

One reading of the weights serves all texts of a step; an answer comes as soon as it is finished.
"""

from __future__ import annotations

import sys

from edgeq import Batch, Model


def main(path: str) -> None:
    prompts = [line.rstrip("\n") for line in sys.stdin]
    with Model.load(path, context=512) as model:
        batch = Batch(model, 4, max_tokens=24)
        for answer in batch.run(prompts):
            print(f"{answer.index}: {prompts[answer.index]!r} -> {answer.text!r} ({answer.finish_reason})")
    print(f"[{batch.measurement.decode_rate:.1f} tok/s in all]", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
