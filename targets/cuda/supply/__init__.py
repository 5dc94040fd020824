"""Where machine code of kernels comes from: generated, compiled, packed, kept."""
