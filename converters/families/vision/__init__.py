"""Decoders with a vision tower, and their towers."""
