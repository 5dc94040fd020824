"""The command line: its groups, options, types of arguments, help and progress."""
