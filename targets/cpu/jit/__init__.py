"""Python as machine code: compilation, vectors, threads, memory with addresses, and the table that threads walk."""
