"""Learning from live conversations: the versions of a served model, and the statistics that decide which one answers."""
