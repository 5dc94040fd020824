"""Converts a Hugging Face checkpoint into a model file; `convert.convert` is the entry."""

import os

# OpenMP reads it when torch is loaded.  By default its threads spin at the end of each product; where other programs use the
# processor too, each then waits for a thread that is not running: the demo took six times as long beside five busy processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
