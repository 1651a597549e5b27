"""Training on live conversations: the versions of a served model, serving them, and deciding which one is served."""
