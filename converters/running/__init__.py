"""One run of a plan: its steps, its journal, and what is said of each layer."""
