"""What the gateway costs: added latency, first byte, requests per second, with every token captured.

    python benchmarks/gateway.py                           # about three minutes on two cores
    python benchmarks/gateway.py --litellm PATH/bin/litellm    # LiteLLM's proxy too, from an environment of its own
    python benchmarks/gateway.py --gateways 2                  # two gateways on one pool too, with half of the sessions

Everything runs on this machine, each part in a process of its own: agents (one load generator), the part that is
measured, and a fake model server that streams ``--tokens`` tokens to every request, in OpenAI's chat format and in
vLLM's format with token ids. The parts are the server itself (``direct``), a bare aiohttp pass-through that copies
bytes (``pass-through``), our gateway over its vLLM engine with a SQLite pool (``gateway``), several of them on one
pool, and LiteLLM's proxy.

Agents behave as agents do: a session has ``--turns`` turns, each request carries the whole history with a system
prompt and tools of about 8 kB, and streams. Two kinds of runs:

- paced: the server takes 20 ms for each token, as a model does, so that latency is not queueing; at each number of
  streams the *added* latency is that of a whole request beside ``direct``, and so is the first byte's;
- unpaced: the server answers at once, and requests per second are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector, UnixConnector, web

PACE = 0.02
SYSTEM = "You are a careful assistant that works with files and commands. " * 60
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name}: " + "what it does, when to use it and what it returns. " * 6,
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "string", "description": f"The {key} of the {name} call."}
                    for key in ("path", "command", "content", "timeout")
                },
            },
        },
    }
    for name in ("read", "write", "edit", "exec", "process")
]
WORD = "word "
JSON = {"Content-Type": "application/json"}


# --- the fake model server


def upstream_app(tokens: int, pace: float, word_id: int, end_id: int) -> web.Application:
    """Streams ``tokens`` tokens: chat chunks, or completions with token ids."""

    async def send(request: web.Request, chunks: list[bytes]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if pace:
            for chunk in chunks:
                await asyncio.sleep(pace)
                await response.write(chunk)
        else:
            for start in range(0, len(chunks), 4):
                await response.write(b"".join(chunks[start : start + 4]))
                await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def event(value: Any) -> bytes:
        return b"data: " + json.dumps(value).encode() + b"\n\n"

    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def chat_event(delta: Any, reason: str | None = None) -> bytes:
        return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    chat = [
        chat_event({"role": "assistant", "content": ""}) + chat_event({"content": WORD}),
        *(chat_event({"content": WORD}) for _ in range(tokens - 2)),
        chat_event({}, "stop"),
    ]

    async def chat_completions(request: web.Request) -> web.StreamResponse:
        await request.read()
        return await send(request, chat)

    def ids_event(n: int) -> bytes:
        last = n == tokens - 1
        token = end_id if last else word_id
        choice: dict[str, Any] = {
            "index": 0,
            "text": "" if last else WORD,
            "logprobs": {
                "text_offset": [n],
                "token_logprobs": [-0.25],
                "tokens": [f"token_id:{token}"],
                "top_logprobs": [{f"token_id:{token}": -0.25}],
            },
            "finish_reason": "stop" if last else None,
            "stop_reason": token if last else None,
            "token_ids": [token],
            "prompt_token_ids": None if n else "PROMPT",
        }
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
        return event({**head, "choices": [choice]}).replace(b'"PROMPT"', b"PROMPT")

    ids = [ids_event(n) for n in range(tokens)]

    async def completions(request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        prompt = raw[raw.index(b'"prompt":') + 9 :]
        prompt = prompt[: prompt.index(b"]") + 1]
        if b'"stream":true' not in raw:  # the engine's first look: which log-probs are these?
            top = {f"token_id:{n}": -1.0 - 0.5 * n for n in range(20)}
            logprobs = {"tokens": ["token_id:0"], "token_logprobs": [-1.0], "top_logprobs": [top], "text_offset": [0]}
            choice = {"index": 0, "text": "a", "logprobs": logprobs, "finish_reason": "length", "token_ids": [0]}
            return web.json_response({"choices": [{**choice, "prompt_token_ids": json.loads(prompt)}]})
        return await send(request, [ids[0].replace(b"PROMPT", prompt), *ids[1:]])

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 32768}]})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", models)
    return app


# --- the bare pass-through


def pass_through_app(upstream: str) -> web.Application:
    """Copies bytes, and looks at none of them."""

    async def copy(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        client: ClientSession = request.app["client"]
        async with client.post(upstream + request.path, data=body, headers=JSON) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response

    async def client(app: web.Application) -> AsyncIterator[None]:
        app["client"] = ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None))
        yield
        await app["client"].close()

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/{path:.*}", copy)
    app.cleanup_ctx.append(client)
    return app


async def serve(app: web.Application) -> None:
    """Serve until we are told to stop; the first line of output is where."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await until_told(runner.cleanup)


async def until_told(cleanup: Any) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await cleanup()


# --- the agents


class Tally:
    """What the agents saw."""

    def __init__(self) -> None:
        self.whole: list[float] = []
        self.first: list[float] = []


async def agent(client: ClientSession, url: str, key: str, turns: int, until: float, number: int, tally: Tally) -> None:
    """Sessions of ``turns`` turns, one after the other, until the time is over."""
    round_ = 0
    while time.perf_counter() < until:
        round_ += 1
        history = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Task {number} of round {round_}: count the words in notes.md."},
        ]
        for turn in range(turns):
            if time.perf_counter() > until:
                return
            body = {"model": "m", "messages": history, "tools": TOOLS, "stream": True, "max_completion_tokens": 8192}
            started = time.perf_counter()
            first = None
            headers = {"Authorization": f"Bearer {key}", **JSON}
            async with client.post(f"{url}/chat/completions", data=json.dumps(body), headers=headers) as response:
                assert response.status == 200, await response.text()
                raw = b""
                async for data in response.content.iter_any():
                    if first is None and b'"content":' in data:
                        first = time.perf_counter() - started
                    raw += data
            tally.whole.append(time.perf_counter() - started)
            tally.first.append(first or 0.0)
            text = "".join(
                json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                for line in raw.split(b"\n\n")
                if line.startswith(b"data: {") and b'"choices":[]' not in line
            )
            following = {"role": "user", "content": f"Turn {turn}: go on."}
            history = [*history, {"role": "assistant", "content": text}, following]


async def load(doors: list[tuple[str, str]], streams: int, turns: int, seconds: float) -> tuple[Tally, float]:
    """What the agents saw, and the seconds of CPU time that the part used for it; after a warm-up."""
    tally, before = Tally(), 0.0
    async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None)) as client:
        for agents, duration, into in ((min(streams, 8), min(2.0, seconds / 2), Tally()), (streams, seconds, tally)):
            until, before = time.perf_counter() + duration, cpu_seconds()
            first = 0 if into is tally else 10**6  # no request of the warm-up comes again
            await asyncio.gather(
                *(agent(client, *doors[n % len(doors)], turns, until, first + n, into) for n in range(agents))
            )
    return tally, cpu_seconds() - before


# --- the run


MEASURED: list[subprocess.Popen[str]] = []
"""The processes of the part that is measured now; none if nothing stands in between."""


def cpu_seconds() -> float:
    """User and system time of the part so far."""
    ticks = 0
    for process in MEASURED:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def part(*argv: str, lines: int = 1, wait_for: str | None = None, env: dict[str, str] | None = None):
    """A process of ours; yields its first ``lines`` of output (or nothing, once ``wait_for`` answers)."""
    process = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL if wait_for else subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    )
    MEASURED.append(process)
    try:
        if wait_for is None:
            assert process.stdout is not None
            line = "".join(process.stdout.readline() for _ in range(lines)).strip()
            if not line:
                raise SystemExit(f"{argv} did not start")
            yield line
        else:
            import urllib.request

            for _ in range(600):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(wait_for, timeout=1).read()
                    break
                if process.poll() is not None:
                    raise SystemExit(f"{argv} ended")
                time.sleep(0.2)
            yield ""
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def open_session(control: str, token: str) -> tuple[str, str]:
    """A session of the gateway, over its control API."""

    async def ask() -> dict[str, str]:
        async with ClientSession(connector=UnixConnector(control)) as client:
            headers = {"Authorization": f"Bearer {token}"}
            async with client.post("http://gateway/sessions", json={}, headers=headers) as answer:
                return await answer.json()

    opened = asyncio.run(ask())
    return opened["base_url"], opened["secret"]


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@contextlib.contextmanager
def door(name: str, upstream: str, folder: Path, model: Path, litellm: str | None, sessions: int):
    """The (url, key) pairs at which agents reach a part."""
    me = (sys.executable, __file__)
    MEASURED.clear()
    if name == "direct":
        yield [(upstream + "/v1", "none")]
    elif name == "pass-through":
        with part(*me, "--serve", "pass-through", "--upstream", upstream) as url:
            yield [(url + "/v1", "none")]
    elif name.startswith("gateway"):
        argv = ("gateway", "--engine", "vllm", "--base-url", upstream, "--model", "m", "--tokenizer", str(model))
        argv += ("--pool", str(folder / f"pool-{time.monotonic_ns()}.db"))
        program = "from clawgym.cli import main; main()"
        with contextlib.ExitStack() as stack:
            controls: list[tuple[str, str]] = []
            for _ in range(int(name.removeprefix("gateway x") if " " in name else 1)):
                printed = stack.enter_context(part(sys.executable, "-u", "-c", program, *argv, lines=5))
                shown = dict(line.split(maxsplit=1) for line in printed.splitlines())
                controls.append((shown["control:"], Path(shown["token:"]).read_text().strip()))
            yield [open_session(*controls[n % len(controls)]) for n in range(sessions)]
    else:
        config = folder / "litellm.yaml"
        entry = {"model": "openai/m", "api_base": upstream + "/v1", "api_key": "none"}
        config.write_text(json.dumps({"model_list": [{"model_name": "m", "litellm_params": entry}]}))
        port = free_port()
        argv = [litellm or "", "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        key = "sk-" + secrets.token_hex(32)
        env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "NO_PROXY": "*"}
        env["LITELLM_MASTER_KEY"] = key
        with part(*argv, wait_for=f"http://127.0.0.1:{port}/health/liveliness", env=env):
            yield [(f"http://127.0.0.1:{port}/v1", key)]


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--litellm", help="LiteLLM's proxy program")
    parser.add_argument("--gateways", type=int, default=1, help="so many gateways on one pool too")
    parser.add_argument("--rounds", type=int, default=1)
    for name in ("--serve", "--upstream"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--pace", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--ids", type=int, nargs=2, default=[0, 0], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve == "upstream":
        asyncio.run(serve(upstream_app(args.tokens, args.pace, *args.ids)))
    elif args.serve == "pass-through":
        asyncio.run(serve(pass_through_app(args.upstream)))
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    from tokenizers import Tokenizer

    from clawgym.engines.tiny import make_tiny_model

    parts = ["direct", "pass-through", "gateway", *([f"gateway x{args.gateways}"] if args.gateways > 1 else [])]
    parts += ["litellm"] if args.litellm else []
    me = (sys.executable, __file__)
    with tempfile.TemporaryDirectory(prefix="clawgym-bench-") as temporary:
        folder = Path(temporary)
        model = make_tiny_model(folder / "model")
        words = Tokenizer.from_file(str(model / "tokenizer.json"))
        ids = [str(words.encode(WORD, add_special_tokens=False).ids[0]), str(words.token_to_id("<|im_end|>"))]
        for kind, pace in (("paced", PACE), ("unpaced", 0.0)):
            argv = ("--serve", "upstream", "--tokens", str(args.tokens), "--pace", str(pace), "--ids", *ids)
            with part(*me, *argv) as upstream:
                for streams in args.streams:
                    report(kind, streams, parts, upstream, folder, model, args)


def report(
    kind: str, streams: int, parts: list[str], upstream: str, folder: Path, model: Path, args: argparse.Namespace
) -> None:
    seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in parts}
    for _ in range(args.rounds):
        for name in parts:
            with door(name, upstream, folder, model, args.litellm, max(streams, 8)) as doors:
                tally, cpu = asyncio.run(load(doors, streams, args.turns, args.seconds))
            rate = len(tally.whole) / args.seconds
            p50, p99 = quantile(tally.whole, 0.5), quantile(tally.whole, 0.99)
            seen[name].append((p50, p99, quantile(tally.first, 0.5), rate, 1e3 * cpu / max(1, len(tally.whole))))
    row = {name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in seen.items()}
    base, through = row["direct"], row["pass-through"]
    print(f"\n{kind}, {streams} streams, {args.tokens} tokens, {args.turns} turns a session")
    for name in parts:
        p50, p99, first, rate, cpu = row[name]
        line = f"  {name:13}"
        if kind == "paced":
            for what, value, bare in (("p50", p50, base[0]), ("p99", p99, base[1]), ("first byte", first, base[2])):
                line += f"{what} {value * 1e3:8.1f} ms (added {(value - bare) * 1e3:+8.2f})  "
        else:
            line += f"{rate:8.1f} requests/s  {rate / through[3]:5.2f} x pass-through  p50 {p50 * 1e3:7.1f} ms"
        print(f"{line}  CPU {cpu:5.2f} ms a request" if name != "direct" else line, flush=True)


if __name__ == "__main__":
    main()
