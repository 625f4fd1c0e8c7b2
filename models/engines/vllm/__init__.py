"""Generation by a vLLM server. `plugin/` runs in the server, in vLLM's own environment; the rest asks it over HTTP."""
