"""A profile as tables, as an HTML page, and as a trace."""
