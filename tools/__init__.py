"""Measure and inspect."""

if __name__ != "edgeq.tools":
    raise ImportError("import edgeq.tools, not tools")
