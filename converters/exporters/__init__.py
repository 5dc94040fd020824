"""The way back: a model file becomes files that other programs run, its integers as they are."""
