"""The version of the package, in one place that nothing else needs to be imported for."""

__version__ = "0.1.0"
