"""Decoders whose scores have slopes in place of rotary positions (Press et al. 2022, arXiv 2108.12409)."""
