"""Generation by vLLM servers. `plugin/` runs in the server, in vLLM's own environment.
The other modules send requests to the server over HTTP.
"""
