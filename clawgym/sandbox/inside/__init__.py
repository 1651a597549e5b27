"""What runs inside sandboxes, or on both sides: standard library only, sent as text where ClawGym is not installed."""
