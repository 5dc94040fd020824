"""A model file and a target become tokens.

    from edgeq import Model, Sampling

    model = Model.load("tiny-llama.edgeq")
    for text in model.generate("def main():", max_tokens=64, sampling=Sampling(temperature=0.7, seed=1)):
        print(text, end="", flush=True)

A `Generation` is an iterator over text, with `.text()`, `.tokens`, `.finish_reason` and `.measurement`.  `model.chat(messages)`
goes through the chat template of the file, and `session=model.session()` keeps what two calls have in common in the cache.
"""

import sys

from edgeq.system.machine import NOT_WINDOWS

if sys.platform == "win32":
    raise ImportError(NOT_WINDOWS)

from edgeq.pictures.prompt import Prompt
from edgeq.runtime.answers.stopping import Piece
from edgeq.runtime.batching.batch import Answer, Batch
from edgeq.runtime.generation import Generation
from edgeq.runtime.model import Model
from edgeq.runtime.sampling import Logprobs, Sampling
from edgeq.runtime.session.requantize import Requantization
from edgeq.runtime.session.session import Session
from edgeq.runtime.stats import Measurement

__all__ = [
    "Answer",
    "Batch",
    "Generation",
    "Logprobs",
    "Measurement",
    "Model",
    "Piece",
    "Prompt",
    "Requantization",
    "Sampling",
    "Session",
]
