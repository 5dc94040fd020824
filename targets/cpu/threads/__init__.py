"""Threads that walk a table of operations together, and the clocks that they note."""
