"""A model for clients of OpenAI's and Anthropic's interfaces over HTTP: `edgeq serve`, and `serve` of serve.py.

It needs the packages of `pip install "edgeq[server]"`; nothing else of edgeq imports it.
"""
