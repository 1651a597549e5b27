"""The version of the library. pyproject.toml reads it from here without importing anything."""

__version__ = "0.1.0"
