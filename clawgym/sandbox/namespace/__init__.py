"""The ``namespace`` backend: private Linux namespaces."""
