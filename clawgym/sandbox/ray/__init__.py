"""The ``ray`` backend: sandboxes on the nodes of a Ray cluster."""
