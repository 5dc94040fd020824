"""Decode speeds of NVIDIA GPUs, predicted."""
