"""The scripted servers."""

from .fake_openai import fake_openai
from .fake_sglang import fake_sglang
from .fake_vllm import fake_vllm

__all__ = ["fake_openai", "fake_sglang", "fake_vllm"]
