"""Door for agents: an OpenAI-compatible server that records every token that a policy samples."""
