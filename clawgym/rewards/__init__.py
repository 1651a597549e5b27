"""Rewards: what a judge says of a turn, and what is made of that and the outcome. Nothing here imports torch."""
