"""The trainer ``verl``: the same tasks, agents, rewards and formulas on a Ray cluster (docs/how-to/verl.md)."""
