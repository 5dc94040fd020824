"""Products of stored weights with rows: microkernels, tiles, and the loops around them."""
