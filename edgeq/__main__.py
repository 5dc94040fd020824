"""`python -m edgeq`: the command line where no `edgeq` command is on the path."""

from edgeq.tools.cli.main import main

main()
