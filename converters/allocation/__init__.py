"""Bits where they pay: which codec every part of a model gets under a budget, by the divergence that was measured for each."""
