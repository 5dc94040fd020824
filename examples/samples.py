"""Several texts of one prompt, best first:  python examples/samples.py MODEL.edgeq "def read_file(path):" 4

The prompt is run once; the texts share its keys and values.  They are sorted by the mean log-probability of their tokens.
"""

from __future__ import annotations

import sys

from edgeq import Batch, Model, Sampling


def main(path: str, prompt: str, count: str) -> None:
    with Model.load(path, context=512) as model:
        sampling = Sampling(temperature=0.9, top_p=0.95, seed=1)
        batch = Batch(model, int(count), max_tokens=24, sampling=sampling, logprobs=0)
        answers = {}
        for answer in batch.run([prompt], n=int(count)):
            answers[answer.sample] = sum(found.logprob for found in answer.logprobs) / len(answer.tokens), answer.text
    for sample, (mean, text) in sorted(answers.items(), key=lambda item: -item[1][0]):
        print(f"{sample}: {mean:.2f} {text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
