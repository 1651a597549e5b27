"""The gateway: an OpenAI-compatible server between agents and engines that records every token."""
