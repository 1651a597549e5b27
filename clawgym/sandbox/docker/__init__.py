"""The ``docker`` backend: hardened containers."""
