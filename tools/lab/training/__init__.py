"""Tiny models that are trained here: those of the demos, and a policy."""
