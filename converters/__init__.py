"""Converts a Hugging Face checkpoint into a model file; `convert.convert` is the entry."""

if __name__ != "edgeq.converters":
    raise ImportError("import edgeq.converters, not converters")
