"""Texts of many callers in one run of the program, and the cache pages that they share."""
