"""Container images as read-only layers, for sandboxes without a container engine.

An image comes from an archive or a folder (:mod:`~clawgym.sandbox.images.oci`). Its layers are unpacked once
(:mod:`~clawgym.sandbox.images.layers`) and shared by all images and sandboxes (:mod:`~clawgym.sandbox.images.store`).
"""

from clawgym.sandbox.images.store import ImageStore, StoredImage

__all__ = ["StoredImage", "ImageStore"]
