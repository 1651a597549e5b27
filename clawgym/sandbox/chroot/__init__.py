"""The ``chroot`` backend, for containers that may neither make namespaces nor mount."""
