"""`edgeq profile` and `edgeq fit`: how long a file takes on this machine, where the time goes, what it is bounded by."""
