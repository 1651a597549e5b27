"""Simulated users with style preferences, and conversations between them and a policy."""
