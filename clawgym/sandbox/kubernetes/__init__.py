"""The ``kubernetes`` backend: pods."""
