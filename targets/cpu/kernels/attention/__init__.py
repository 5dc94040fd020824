"""Attention over the cache, and the write of keys and values into it."""
