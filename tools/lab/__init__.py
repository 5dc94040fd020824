"""The laboratory: what people who work on edgeq run, as `python -m edgeq.tools.lab.NAME` from a clone.

It is not in the wheel, and no command of `edgeq` imports it.
"""
