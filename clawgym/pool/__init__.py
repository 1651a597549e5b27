"""The pool: the one durable store of episodes and turns."""
