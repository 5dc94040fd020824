"""Requests and answers in the shapes of OpenAI's and Anthropic's interfaces."""
