"""The Docker engine of the sandbox tests, and a layer with pytest."""

from ..sandbox.conftest import docker_engine
from ..tasks.swe.conftest import site_layer

__all__ = ["docker_engine", "site_layer"]
