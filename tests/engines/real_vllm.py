"""A real vLLM server on a CPU, where ``CLAWGYM_VLLM`` is the python of an environment with vLLM (docs/engines.md)."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["needs_vllm", "serving"]

needs_vllm = pytest.mark.skipif(not os.environ.get("CLAWGYM_VLLM"), reason="CLAWGYM_VLLM names no python with vLLM")


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[str]:
    """The address of a server of ``folder``, which may still be starting. What it said is printed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ["CLAWGYM_VLLM"], "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port), *words]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "16"]
    command += ["--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details"]
    command += ["--enable-lora", "--max-lora-rank", "8"]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log.seek(0)
            print(log.read().decode(errors="replace")[-5000:])
