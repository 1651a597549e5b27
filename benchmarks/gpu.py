"""Every path of the library that a GPU takes, once, with figures.

    make gpu                                                     # a tiny random model
    make gpu ARGS='--model Qwen/Qwen3-0.6B --out gpu.json'       # a real one
    python benchmarks/gpu.py --device cpu                        # tries the program itself, without a GPU

- engine: the ``transformers`` engine in bfloat16 beside a forward pass in float32 over the ids that it sampled.
- turns: conversations of four turns in float32, whose prompts continue each other: the largest difference, which shows
  a single wrong token.
- decode: tokens a second of 64 prompts and replies of mixed lengths, in float32 and bfloat16, beside the same engine
  without CUDA graphs, and without them but with cuDNN's attention (on less work); log-probs beside a plain forward pass
  of the same precision.
- learner: two updates with all weights and with LoRA, with gradient checkpointing: seconds, peak memory beside the
  estimate of ``--dry-run``.
- publish: seconds until the engine samples with the new weights, and how far its log-probs are from the trainer's.
- vllm: the same through a vLLM server, where vLLM is installed (``--vllm PYTHON``: in that Python).
- verl: one step of ``trainer: verl``, where verl is installed.

A path that fails is printed with its error, and the others go on; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import platform
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from clawgym.engines.protocol import GenerateRequest, Sampling
from clawgym.engines.tiny import make_tiny_model
from clawgym.engines.transformers import TransformersEngine
from clawgym.engines.vllm import VLLMEngine
from clawgym.trainers.batching import MaskedSequence, micro_batches, pack
from clawgym.trainers.common.memory import ModelShape, estimate
from clawgym.trainers.common.policy import Policy, load_policy, token_logprobs
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learner import Learner

Figures = dict[str, Any]
ADVICE = (
    "No GPU was found: torch.cuda.is_available() is False. Run this on a machine with an NVIDIA GPU and a torch for "
    "CUDA (constraints-gpu.txt), or try the program itself with: python benchmarks/gpu.py --device cpu"
)


def machine(device: str) -> Figures:
    """What the figures were measured on."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
    return {
        "device": gpu or f"CPU ({platform.machine()})",
        "gpu_bytes": memory,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def peak(device: str) -> int | None:
    """Most bytes of tensors since the last call; None without a GPU."""
    if device != "cuda":
        return None
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


async def replies(engine: Any, work: list[tuple[list[int], int]], adapter: str | None = None) -> list[Any]:
    """(ids, log-probs) sampled after each prompt, all at once."""

    async def one(prompt: list[int], most: int, seed: int) -> tuple[list[int], list[float]]:
        request = GenerateRequest(prompt, Sampling(max_tokens=most, seed=seed), adapter=adapter)
        parts = [part async for part in engine.generate(request)]
        return [i for p in parts for i in p.ids], [v for p in parts for v in p.logprobs]

    return list(await asyncio.gather(*(one(*each, seed) for seed, each in enumerate(work))))


async def _speed(engine: Any, work: list[tuple[list[int], int]]) -> tuple[float, list[Any]]:
    """Tokens a second, and what was sampled."""
    started = time.perf_counter()
    given = await replies(engine, work)
    return sum(len(ids) for ids, _ in given) / (time.perf_counter() - started), given


def prompts(vocab: int, count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(9, vocab) for _ in range(rng.randint(4, longest))] for _ in range(count)]


class Paths:
    """Each method that does not begin with ``_`` is a path."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options, self._scratch = options, scratch
        self._device: str = options.device
        self._folder = Path(options.model) if options.model else make_tiny_model(scratch / "model", spread=0.05)

    def _config(self, lora: bool, **compute: Any) -> TrainConfig:
        longest = self._options.tokens
        return TrainConfig.model_validate(
            {
                "model": {"path": str(self._folder), "dtype": "bfloat16", "lora": {"rank": 16} if lora else None},
                "compute": {
                    **{"device": self._device, "micro_tokens": 8 * longest, "row_tokens": longest},
                    **{"checkpointing": True, **compute},
                },
                "sft": {"lr": 1e-3, "warmup": 1},
            }
        )

    def _policy(self, config: TrainConfig) -> Policy:
        return load_policy(config.model, self._folder, config.compute)

    def _apart(self, policy: Policy, prompt: list[int], ids: list[int], logprobs: list[float]) -> float:
        """Mean difference of probabilities between an engine and the trainer's forward pass."""
        row = MaskedSequence((*prompt, *ids), (0,) * len(prompt) + (1,) * len(ids))
        (batch,) = micro_batches(pack([row], row_tokens=len(row.ids)), tokens=len(row.ids))
        with torch.no_grad():
            own, _ = token_logprobs(policy.module, policy.ready(batch))
        return float((own.cpu().exp() - torch.tensor(logprobs).exp()).abs().mean())

    async def engine(self) -> Figures:
        engine = TransformersEngine(self._folder, device=self._device, dtype=torch.bfloat16)
        work = [(prompt, 64) for prompt in prompts(engine.vocab_size, 8, 64)]
        found = await replies(engine, work)
        await engine.aclose()
        return {"mean_difference": self._from_plain(torch.float32, work, found)}

    async def turns(self) -> Figures:
        engine = TransformersEngine(self._folder, device=self._device, dtype=torch.float32)
        rng = random.Random(2)
        talks = prompts(engine.vocab_size, 24, 64)
        work, given = [], []
        for turn in range(1, 5):
            asked = [(talk, rng.randint(1, 24)) for talk in talks]
            said = await replies(engine, asked)
            work, given = work + asked, given + said
            more = prompts(engine.vocab_size, len(talks), 70, seed=turn)
            talks = [talk + ids + new for talk, (ids, _), new in zip(talks, said, more, strict=True)]
        await engine.aclose()
        apart = self._apart_from_plain(torch.float32, work, given)
        return {"tokens": len(apart), "largest_difference": float(apart.max())}

    async def decode(self) -> Figures:
        found: Figures = {}
        for dtype in (torch.float32, torch.bfloat16):
            kind = str(dtype).removeprefix("torch.")
            engine = TransformersEngine(self._folder, device=self._device, dtype=dtype)
            rng = random.Random(1)
            work = [(p, rng.randint(1, 120)) for p in prompts(engine.vocab_size, self._options.sequences, 120)]
            await replies(engine, work)
            speed, given = await _speed(engine, work)
            found[f"{kind} tokens_a_second"] = speed
            found[f"{kind} mean_difference"] = self._from_plain(dtype, work[:12], given)
            if engine._batch._graphs:
                engine._batch._graphs = None
                found[f"{kind} without graphs"] = (await _speed(engine, work))[0]
                if dtype == torch.bfloat16:
                    torch.backends.cuda.enable_cudnn_sdp(True)
                    less = [(p, min(most, 40)) for p, most in work[:16]]
                    found[f"{kind} with cuDNN"] = (await _speed(engine, less))[0]
                    torch.backends.cuda.enable_cudnn_sdp(False)
            await engine.aclose()
        return {**found, "peak_bytes": peak(self._device)}

    def _from_plain(self, dtype: torch.dtype, work: list[tuple[list[int], int]], given: list[Any]) -> float:
        """Mean difference of probabilities between an engine and a plain forward pass in ``dtype``."""
        return float(self._apart_from_plain(dtype, work, given).mean())

    def _apart_from_plain(
        self, dtype: torch.dtype, work: list[tuple[list[int], int]], given: list[Any]
    ) -> torch.Tensor:
        """The difference for each sampled token."""
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype)
        model.to(self._device)
        apart = []
        for (prompt, _), (ids, logprobs) in zip(work, given, strict=False):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids], device=self._device)).logits[0].float().log_softmax(-1)
            own = logits[len(prompt) - 1 : -1].cpu().gather(1, torch.tensor(ids)[:, None])[:, 0]
            apart.append((own.exp() - torch.tensor(logprobs).exp()).abs())
        return torch.cat(apart)

    def _update(self, lora: bool) -> Figures:
        config = self._config(lora)
        learner = Learner(self._policy(config), config, lr=config.sft.lr)
        rng, longest = random.Random(0), self._options.tokens
        rows = [
            MaskedSequence(tuple(rng.randrange(9, 600) for _ in range(longest)), (0,) * 8 + (1,) * (longest - 8))
            for _ in range(8)
        ]
        first = learner.imitate(rows, step=0, steps=2)
        peak(self._device)
        started = time.perf_counter()
        last = learner.imitate(rows, step=1, steps=2)
        seconds = time.perf_counter() - started
        about = estimate(ModelShape.of(config.model, self._folder), config)
        return {
            "tokens_a_second": 8 * longest / seconds,
            "loss": [first["sft/loss"], last["sft/loss"]],
            "peak_bytes": peak(self._device),
            "estimated_bytes": about.update - about.items["weights of the engine"],
        }

    async def learner_full(self) -> Figures:
        return self._update(lora=False)

    async def learner_lora(self) -> Figures:
        return self._update(lora=True)

    async def _published(self, policy: Policy, config: TrainConfig, engine: Any) -> Figures:
        learner = Learner(policy, config, lr=1e-3)
        prompt = prompts(600, 1, 32)[0]
        await policy.publish(engine, 0)
        learner.imitate([MaskedSequence(tuple(prompt), (0, *(1,) * (len(prompt) - 1)))], step=1, steps=2)
        started = time.perf_counter()
        await policy.publish(engine, 1)
        seconds = time.perf_counter() - started
        ((ids, logprobs),) = await replies(engine, [(prompt, 32)], policy.adapter)
        return {"seconds": seconds, "mean_difference": self._apart(policy, prompt, ids, logprobs)}

    async def publish(self) -> Figures:
        found = {}
        for name, lora in (("full", False), ("lora", True)):
            config = self._config(lora)
            policy = self._policy(config)
            engine = policy.engine()
            found[name] = await self._published(policy, config, engine)
            await engine.aclose()
        return found

    async def vllm(self) -> Figures:
        python = self._options.vllm or (sys.executable if importlib.util.find_spec("vllm") else None)
        if python is None:
            return {"not run": "vLLM is not installed"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = f"--model {self._folder} --host 127.0.0.1 --port {port} --dtype bfloat16 --max-model-len 2048"
        words += " --logprobs-mode processed_logprobs --enforce-eager"
        words += " --gpu-memory-utilization 0.3 --enable-sleep-mode" if self._device == "cuda" else ""
        argv = [python, "-m", "vllm.entrypoints.openai.api_server", *words.split()]
        env = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        config = self._config(lora=False, vllm=f"http://127.0.0.1:{port}/v1")
        with (self._scratch / "vllm.log").open("wb") as log:
            server = subprocess.Popen(["env", *(f"{k}={v}" for k, v in env.items()), *argv], stdout=log, stderr=log)
        try:
            policy = self._policy(config)
            engine = await policy.served(config.compute, self._scratch / "shared", context_window=2048)
            found = await self._published(policy, config, engine)
            if self._device == "cuda":
                assert isinstance(engine, VLLMEngine)
                await engine.sleep()
                found["free_asleep_bytes"] = torch.cuda.mem_get_info()[0]
                await engine.wake()
            await engine.aclose()
            return found
        finally:
            server.terminate()
            server.wait(60)

    async def verl(self) -> Figures:
        if not importlib.util.find_spec("verl"):
            return {"not run": "verl is not installed"}
        out = self._scratch / "verl"
        kind = "vllm" if self._device == "cuda" else "transformers"
        settings = ["trainer=verl", f"verl.engine={kind}", "rollout.staleness=0", "rollout.groups=2"]
        settings += ["rollout.group_size=2", "budget.steps=1", "evaluation.canary=0", f"model.path={self._folder}"]
        settings += ["model.context_window=2048", "tasks.validation.count=1", "tasks.heldout.count=1"]
        words = [word for setting in settings for word in ("--set", setting)]
        argv = ["train", "rl", "--config", "tiny-cpu", "--out", str(out), *words]
        started = time.perf_counter()
        run = [sys.executable, "-c", "from clawgym.cli import main; main()", *argv]
        done = await asyncio.to_thread(subprocess.run, run, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"clawgym train ended with {done.returncode}: {done.stderr[-2000:]}")
        (row,) = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
        diff = row.get("training/rollout_probs_diff")
        return {"seconds_with_start": time.perf_counter() - started, "rollout_probs_diff": diff}


def names() -> list[str]:
    return [name for name in vars(Paths) if not name.startswith("_")]


def run(options: argparse.Namespace) -> Figures:
    """Figures of all paths, by name; ``error`` for one that failed."""
    found: Figures = {}
    with tempfile.TemporaryDirectory() as scratch:
        paths = Paths(options, Path(scratch))
        for name in options.paths or names():
            path: Callable[[], Any] = getattr(paths, name)
            try:
                found[name] = asyncio.run(path())
            except Exception as error:  # the other paths go on
                found[name] = {"error": f"{type(error).__name__}: {error}"}
            if options.device == "cuda":
                torch.cuda.empty_cache()
            show(name, found[name])
    return found


def show(name: str, figures: Mapping[str, Any]) -> None:
    for key, value in figures.items():
        shown = f"{value / 2**20:,.0f} MiB" if key.endswith("bytes") and value is not None else value
        print(f"{name:14}{key:28}{f'{shown:.4g}' if isinstance(shown, float) else shown}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"all, unless named: {', '.join(names())}")
    parser.add_argument("--model", help="a folder (default: a tiny random model)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tokens", type=int, default=512, help="of a training sequence (default: 512)")
    parser.add_argument("--sequences", type=int, default=64, help="of 'decode' (default: 64)")
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the file of the figures")
    options = parser.parse_args(argv)
    if unknown := set(options.paths) - set(names()):
        parser.error(f"no path {', '.join(sorted(unknown))}: choose from {', '.join(names())}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print(ADVICE, file=sys.stderr)
        return 2
    transformers.utils.logging.disable_progress_bar()
    about = machine(options.device)
    print(", ".join(f"{name} {value}" for name, value in about.items() if value))
    found = run(options)
    options.out.write_text(json.dumps({"machine": about, "model": options.model or "tiny", "paths": found}, indent=2))
    failed = [name for name, figures in found.items() if "error" in figures]
    print(f"{options.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
