"""From a Graph to the op table: one module per group of operations."""
