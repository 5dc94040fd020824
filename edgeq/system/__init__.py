"""The machine: facts, devices by name, kept measurements, confined processes, files written whole."""
