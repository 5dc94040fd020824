"""Everything that is to be known of a GPU on which edgeq runs for the first time, by one command.

    python -m tests.cuda.first_run --out DIR

Steps are processes: each has its own time limit, writes to DIR as it goes, and ends no other by failing.  DIR/summary.json has
how each ended.  A run that was cut off begins at any step again with --from.  What it needs, `make gpu-bundle` carries
(bundle.py): this tree, and the kernels of the tests and of the shapes that are measured.
"""
