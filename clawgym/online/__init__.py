"""Learning from live conversations: the statistics that decide which version of a model is served."""
