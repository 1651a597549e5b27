"""Learning from live conversations: versions of a served model, and the statistics that decide which one answers."""
