"""Families of decoders whose layers have a state space, in place of attention or beside it."""
