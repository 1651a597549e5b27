"""The scripted endpoint, for every test of this room."""

from .fake_openai import fake_openai

__all__ = ["fake_openai"]
