"""Simulated people with a taste of their own, and what a policy is told by talking to them."""
