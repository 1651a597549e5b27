"""A real vLLM server on a CPU. ``CLAWGYM_VLLM`` is the python of an environment with vLLM (docs/how-to/engines.md)."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

__all__ = ["Server", "needs_vllm", "serving", "untied"]

needs_vllm = pytest.mark.skipif(not os.environ.get("CLAWGYM_VLLM"), reason="CLAWGYM_VLLM names no python with vLLM")


@dataclass
class Server:
    """It may still be starting."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def kill(self) -> None:
        """And the processes that it has begun, which would outlive it."""
        try:
            found = psutil.Process(self.process.pid)
            all_of_it = [found, *found.children(recursive=True)]
        except psutil.NoSuchProcess:
            all_of_it = []
        for one in all_of_it:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait()


def untied(folder: Path) -> Path:
    """``folder``, with an output layer of its own. vLLM 0.31 on a CPU never updates one that is tied to the
    embeddings."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextmanager
def serving(folder: Path, *words: str, port: int = 0) -> Iterator[Server]:
    """A server of ``folder``. What it said is printed at the end."""
    port = port or free_port()
    command = [os.environ["CLAWGYM_VLLM"], "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port), *words]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "16"]
    command += ["--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details"]
    command += ["--enable-lora", "--max-lora-rank", "8"]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with tempfile.TemporaryFile() as log:
        server = Server(port, subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log))
        try:
            yield server
        finally:
            server.process.terminate()
            try:
                server.process.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
            log.seek(0)
            print(log.read().decode(errors="replace")[-5000:])
