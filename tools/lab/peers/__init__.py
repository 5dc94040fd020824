"""The same random model in edgeq and in other runtimes, measured side by side: `python -m edgeq.tools.lab.peers`.

Peers are never dependencies: each is imported in a process of its own, of a Python that may have nothing of edgeq's but numpy.
"""

if __name__ != "edgeq.tools.lab.peers":
    raise ImportError("import edgeq.tools.lab.peers, not peers")
