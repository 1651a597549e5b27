"""How fast the transformers engine samples, beside ``model.generate`` on the same model and the same prompts.

    python benchmarks/engine.py                          # a tiny random model: about three minutes on two cores
    python benchmarks/engine.py --hidden 512 --layers 8 --tokens 64     # a larger one, where arithmetic decides
    python benchmarks/engine.py --model FOLDER           # your own
    python benchmarks/engine.py --model FOLDER --only kernels --kernels bfloat16 int8
    python benchmarks/engine.py --model FOLDER --only threads --kernels bfloat16 --threads 2
    python benchmarks/engine.py --model FOLDER --only llama --llama PYTHON FILE.gguf --threads 2

- even: every sequence samples the same number of tokens: the best case of ``generate``.
- mixed: lengths as agents have them (most are short, some are long); ``generate`` waits for the longest of its batch.
- group: 8 samples of each of 8 long prompts, as GRPO asks for.
- kernels: 64 of the mixed prompts at once, with linear layers in lower precision. Mismatch is the mean difference of
  the probability that the engine gives to its tokens from the one that the model in float32 gives them.
- threads: the mixed prompts, 64 at a time, where parts of a step are divided among ``--threads``, beside each operation
  divided among them; in float32, and with each of ``--kernels``.
- llama: the same prompts, beside the server of llama.cpp with as many places, in a Python of its own that has
  xllamacpp.
- turns: conversations that grow turn by turn, with the earlier turns kept and, beside it, computed again each time.

Every figure is useful tokens per second (sampled, and asked for) of one process; the two are measured in turns, and
the ratio is that of their medians. Both sample at temperature 1 over the whole vocabulary; only the engine also gives
log-probs, and what it gives passes through asyncio.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import torch
import transformers

from clawgym.engines import _crew
from clawgym.engines.protocol import GenerateRequest, Sampling
from clawgym.engines.tiny import make_tiny_model
from clawgym.engines.transformers import TransformersEngine

Work = list[tuple[list[int], int]]
"""Prompts, and how many tokens are sampled after each."""
KINDS = ("even", "mixed", "kernels", "threads", "llama", "group", "turns")
LLAMA = """
import sys
import xllamacpp
about = xllamacpp.CommonParams()
about.model.path, about.n_parallel, about.n_ctx = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
about.cpuparams.n_threads = about.cpuparams_batch.n_threads = int(sys.argv[4])
about.port = 0
server = xllamacpp.Server(about)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


class Bench:
    def __init__(self, folder: Path, threads: int, rounds: int) -> None:
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model.to(self.device)
        self.engine = TransformersEngine(folder, dtype=torch.float32)
        self.folder = folder
        self.vocab = self.engine.vocab_size
        self.rounds = rounds

    def prompt(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(self.vocab) for _ in range(length)]

    async def ours(self, work: Work, batch: int) -> int:
        places = asyncio.Semaphore(batch)

        async def one(prompt: Sequence[int], most: int) -> int:
            async with places:
                return sum(
                    [len(t.ids) async for t in self.engine.generate(GenerateRequest(prompt, Sampling(max_tokens=most)))]
                )

        return sum(await asyncio.gather(*(one(prompt, most) for prompt, most in work)))

    @torch.inference_mode()
    def generate(self, work: Work, batch: int) -> int:
        """``model.generate`` on left-padded batches; each runs to its longest, as it would to its last stop token."""
        for start in range(0, len(work), batch):
            part = work[start : start + batch]
            longest = max(len(p) for p, _ in part)
            ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in part], device=self.device)
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in part], device=self.device)
            most = max(n for _, n in part)
            self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                min_new_tokens=most,
                max_new_tokens=most,
                eos_token_id=None,
                pad_token_id=0,
            )
        return sum(n for _, n in work)

    def rounded(self, kernels: Any, work: Work, batch: int) -> None:
        """Beside the engine in float32, which is measured in turns with it."""
        plain, self.engine = self.engine, TransformersEngine(self.folder, dtype=torch.float32, kernels=kernels)
        engines = {"float32": plain, kernels: self.engine}
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for round_ in range(self.rounds + 1):
            for name, self.engine in engines.items():
                self.forget()
                found = rate(lambda: asyncio.run(self.ours(work, batch)))
                if round_:
                    rates[name].append(found)
        mismatch = asyncio.run(self.mismatch(work[:16]))
        asyncio.run(self.engine.aclose())
        self.engine = plain
        report(f"kernels: {len(work)} prompts, {kernels}", rates[kernels], "float32", rates["float32"])
        print(f"{'':44s} mismatch {mismatch:.2g}", flush=True)

    def divided(self, kernels: Any, work: Work, batch: int) -> None:
        """Beside the engine whose steps are not divided, which is measured in turns with it."""
        plain, self.engine = self.engine, TransformersEngine(self.folder, dtype=torch.float32, kernels=kernels)
        rates: dict[float, list[float]] = {_crew.WORTH: [], math.inf: []}
        for round_ in range(self.rounds + 1):
            for worth, found in rates.items():
                self.forget()
                with mock.patch.object(_crew, "WORTH", worth):
                    one = rate(lambda: asyncio.run(self.ours(work, batch)))
                if round_:
                    found.append(one)
        asyncio.run(self.engine.aclose())
        self.engine = plain
        steps, operations = rates.values()
        report(f"threads: {len(work)} prompts, {kernels}", steps, "operations", operations)

    async def mismatch(self, work: Work) -> float:
        apart: list[float] = []
        for prompt, most in work:
            request = GenerateRequest(prompt, Sampling(max_tokens=most))
            parts = [tokens async for tokens in self.engine.generate(request)]
            ids = [token for part in parts for token in part.ids]
            own = torch.tensor([value for part in parts for value in part.logprobs])
            with torch.inference_mode():
                rows = self.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            given = rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
            apart += (own.exp() - given.exp()).abs().tolist()
        return statistics.fmean(apart)

    def llama(self, python: str, file: str, work: Work, batch: int) -> None:
        """Beside llama.cpp, which is measured in turns with the engine."""
        room = max(len(prompt) + most for prompt, most in work) + 8
        argv = [python, "-c", LLAMA, file, str(batch), str(batch * room), str(torch.get_num_threads())]
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as server:
            assert server.stdout is not None
            try:
                address = server.stdout.readline().strip()
                mine: list[float] = []
                theirs: list[float] = []
                for round_ in range(self.rounds + 1):
                    self.forget()
                    a = rate(lambda: asyncio.run(self.ours(work, batch)))
                    b = rate(lambda: asyncio.run(asked(address, work, batch)))
                    if round_:
                        mine.append(a)
                        theirs.append(b)
            finally:
                server.terminate()
        report(f"llama: {len(work)} prompts, {Path(file).name}", mine, "llama.cpp", theirs)

    def forget(self) -> None:
        """Drop what is kept of prompts, so that each round computes them."""
        asyncio.run(self.engine.update_weights(lambda _: None, 0))

    def compare(self, label: str, work: Work, batch: int) -> None:
        mine: list[float] = []
        theirs: list[float] = []
        for round_ in range(self.rounds + 1):
            self.forget()
            a = rate(lambda: asyncio.run(self.ours(work, batch)))
            b = rate(lambda: self.generate(work, batch))
            if round_:  # the first warms up
                mine.append(a)
                theirs.append(b)
        report(label, mine, "generate", theirs)

    def turns(self, sessions: int, turns: int, start: int, grow: int, sample: int) -> None:
        def run(keep: bool) -> int:
            rng = random.Random(5)
            histories = [self.prompt(rng, start) for _ in range(sessions)]
            total = 0
            for _ in range(turns):
                if not keep:
                    self.forget()
                total += asyncio.run(self.ours([(h, sample) for h in histories], sessions))
                histories = [h + self.prompt(rng, grow) for h in histories]
            return total

        kept: list[float] = []
        again: list[float] = []
        for round_ in range(self.rounds + 1):
            self.forget()
            a, b = rate(lambda: run(True)), rate(lambda: run(False))
            if round_:
                kept.append(a)
                again.append(b)
        report(f"turns: {sessions} x {turns}, {start} ids + {grow} a turn", kept, "computed again", again)


async def asked(address: str, work: Work, batch: int) -> int:
    """What a server of llama.cpp samples. Its prompts are not kept, as each round computes them."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=batch), timeout=aiohttp.ClientTimeout(total=None)
    ) as client:

        async def one(prompt: Sequence[int], most: int) -> int:
            body: dict[str, Any] = {"prompt": prompt, "n_predict": most, "ignore_eos": True, "cache_prompt": False}
            body |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "samplers": ["temperature"]}
            async with client.post(f"{address}/completion", json=body) as answer:
                return (await answer.json())["tokens_predicted"]

        return sum(await asyncio.gather(*(one(prompt, most) for prompt, most in work)))


def rate(do: Callable[[], int]) -> float:
    start = time.perf_counter()
    return do() / (time.perf_counter() - start)


def report(label: str, mine: list[float], other: str, theirs: list[float]) -> None:
    a, b = statistics.median(mine), statistics.median(theirs)
    print(f"{label:44s} engine {a:8.0f} tok/s   {other} {b:8.0f} tok/s   ratio {a / b:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder; without it a random model of these sizes is made")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="sampled after each prompt of 'even' (default: 128)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", nargs="*", default=[], choices=["bfloat16", "int8"])
    parser.add_argument("--llama", nargs=2, metavar=("PYTHON", "GGUF"), help="the same model for llama.cpp")
    parser.add_argument("--only", choices=KINDS, help="one kind of work (default: all)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        heads = max(2, chosen.hidden // 64)
        folder = chosen.model or make_tiny_model(
            Path(scratch) / "model",
            hidden=chosen.hidden,
            layers=chosen.layers,
            heads=2 * heads,
            kv_heads=heads,
        )
        bench = Bench(folder, chosen.threads, chosen.rounds)
        size = sum(p.numel() for p in bench.model.parameters())
        print(f"{size:,} parameters, float32, {bench.device}, {chosen.threads} threads, torch {torch.__version__}")
        rng = random.Random(0)
        wanted = [chosen.only] if chosen.only else KINDS
        for batch in (1, 8, 64) if "even" in wanted else ():
            work: Work = [(bench.prompt(rng, 64), chosen.tokens) for _ in range(batch)]
            bench.compare(f"even: batch {batch}", work, batch)
        for batch in (8, 64):
            work = []
            for _ in range(3 * batch):
                most = min(4 * chosen.tokens, 1 + int(rng.expovariate(1 / (chosen.tokens / 2))))
                work.append((bench.prompt(rng, rng.choice((16, 64, 200))), most))
            if "mixed" in wanted:
                bench.compare(f"mixed: {3 * batch} prompts, batch {batch}", work, batch)
        for kernels in chosen.kernels if "kernels" in wanted else ():
            bench.rounded(kernels, work[:64], 64)
        for kernels in ("float32", *chosen.kernels) if "threads" in wanted and chosen.threads > 1 else ():
            bench.divided(kernels, work, 64)
        if chosen.llama and "llama" in wanted:
            bench.llama(*chosen.llama, work[:64], 64)
        prompts = [bench.prompt(rng, 600) for _ in range(8)]
        work = [(p, chosen.tokens // 4) for p in prompts for _ in range(8)]
        if "group" in wanted:
            bench.compare("group: 8 prompts of 600 ids, 8 samples each", work, 64)
        if "turns" in wanted:
            bench.turns(sessions=4, turns=6, start=800, grow=60, sample=chosen.tokens // 4)
        asyncio.run(bench.engine.aclose())


if __name__ == "__main__":
    main()
