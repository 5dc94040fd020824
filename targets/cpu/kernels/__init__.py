"""The kernels: Python that Numba compiles to machine code, written once over the instruction sets."""
