"""An NVIDIA GPU: how it is found, its memory, its launches, what it reads in a second."""
