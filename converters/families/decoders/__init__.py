"""Decoders: one file for each line of families."""
