"""Products of several rows whose weights are unpacked first, once for all of a panel."""
