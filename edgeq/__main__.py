"""`python -m edgeq`: the command line where no `edgeq` command is on the path."""

from edgeq.tools.cli import main

main()
