"""A compiled graph on a device, and what a run sends, launches and reads."""
