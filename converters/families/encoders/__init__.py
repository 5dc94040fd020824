"""Families of encoders, whose tokens see both ways."""
