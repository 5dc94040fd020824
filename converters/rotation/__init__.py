"""Orthogonal changes of basis that keep a network's function: Hadamard, random, principal axes, and their fusing."""
