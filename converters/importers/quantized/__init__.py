"""Folders of weights that somebody else quantized: integers, scales and zero points as published, none rounded again."""
