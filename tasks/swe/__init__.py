"""Tasks in real repositories: made out of source packages, or read from rows of published sets."""
