"""Quantization methods, one file each.

`rtn` rounds the rows it is given.  `awq` changes a decoder layer so that rounding it loses less; `rtn` rounds the result.
"""

METHODS = ("none", "rtn", "awq")
"""none: the weights stay floating point."""
