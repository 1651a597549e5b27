"""The Docker engine of the sandbox tests."""

from ..sandbox.conftest import docker_engine

__all__ = ["docker_engine"]
