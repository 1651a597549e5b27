"""OpenClaw, unmodified, as an agent."""
