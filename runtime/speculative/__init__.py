"""Speculative decoding: draft tokens, verify them in one run, accept what agrees."""
