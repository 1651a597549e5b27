"""Configurations that come with the package: ``clawgym train --config NAME``."""
