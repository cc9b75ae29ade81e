"""OpenAI's JSON for servers and clients of its API.

No sockets: `inference.server`, the agents' proxy and the chat endpoint's client send and receive what is made here.
"""
