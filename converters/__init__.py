"""A checkpoint becomes a model file."""

if __name__ != "edgeq.converters":
    raise ImportError("import edgeq.converters, not converters")
