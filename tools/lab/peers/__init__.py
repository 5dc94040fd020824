"""The same random model in edgeq and in other runtimes, measured side by side: `python -m edgeq.tools.lab.peers`.

Peers are never dependencies: each is imported in its own process, by a Python that needs only numpy of what edgeq needs.
"""

if __name__ != "edgeq.tools.lab.peers":
    raise ImportError("import edgeq.tools.lab.peers, not peers")
