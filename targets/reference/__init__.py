"""The reference target: every operation in plain numpy, complete and slow; the oracle that other targets are tested against."""
