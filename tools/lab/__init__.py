"""The laboratory: what people who work on edgeq run.  It is not in the wheel."""
