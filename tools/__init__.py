"""The command line, and the measurements that its commands make.  People who work on edgeq find theirs in `tools/lab`."""
