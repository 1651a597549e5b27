"""Rewards: judges of turns, and combining their votes with outcomes. Importing this does not import torch."""
