"""Attacks on sandboxes and on graders, and the rates at which they succeed."""
