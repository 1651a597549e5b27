"""Code that runs inside sandboxes, or on both sides: standard library only, as some of it is sent as source text."""
