"""What a call of a tool server in a sandbox costs, beside the same server as a plain process.

    python benchmarks/tools.py            # half a minute; chrt -f 5 on a busy machine

The server is tests/tools/tiny_server.py, and the tool gives back five characters. The baselines are a line written to
its pipe and one read, by hand, and the official SDK with its own stdio client. Memory is PSS of the server in its
sandbox, and of this process for each server that it is connected to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from clawgym.records import Limits, Task, TaskFile, ToolCall, ToolServer, VerifierSpec
from clawgym.sandbox import backend
from clawgym.tools import open_tools, sandbox_spec

SERVER = Path(__file__).parent.parent / "tests" / "tools" / "tiny_server.py"
ECHO = {"name": "echo", "arguments": {"text": "hello"}}
TASK = Task(
    "tools",
    "Call.",
    VerifierSpec("reward_sh", ()),
    limits=Limits(memory_mb=256, disk_mb=64),
    tools=(ToolServer("one", ("python3", "/tools/one/server.py"), (TaskFile("server.py", SERVER.read_bytes()),)),),
)


def line(what: str, value: str) -> None:
    print(f"{what:<48}{value:>12}", flush=True)


def by_hand(times: int, folder: str) -> float:
    """Milliseconds of one round trip over pipes."""
    process = subprocess.Popen([sys.executable, SERVER], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    request = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": ECHO}).encode() + b"\n"
    began = 0.0
    for n in range(times + 20):
        if n == 20:
            began = time.perf_counter()
        process.stdin.write(request)
        process.stdin.flush()
        process.stdout.readline()
    spent = time.perf_counter() - began
    process.stdin.close()
    process.wait()
    return spent * 1000 / times


async def by_sdk(times: int, folder: str) -> float:
    """The same with the SDK's client, on a plain process."""
    from mcp import ClientSession, StdioServerParameters, stdio_client

    async with stdio_client(StdioServerParameters(command=sys.executable, args=[str(SERVER)], cwd=folder)) as streams:
        async with ClientSession(*streams) as session:
            await session.initialize()
            await session.list_tools()
            began = time.perf_counter()
            for _ in range(times):
                await session.call_tool(ECHO["name"], ECHO["arguments"])  # type: ignore[arg-type]
            return (time.perf_counter() - began) * 1000 / times


def pss(process: psutil.Process) -> float:
    """MiB of a process."""
    return process.memory_full_info().pss / 2**20


async def in_sandboxes(count: int, times: int) -> None:
    sandboxes = backend("namespace")
    await sandboxes.probe()

    async def one() -> tuple:
        sandbox = await sandboxes.create(sandbox_spec(TASK))
        return sandbox, await open_tools(TASK, sandbox, sandboxes)

    await (first := await one())[1].aclose()  # the SDK is imported
    await first[0].close()
    own, began = pss(psutil.Process()), time.perf_counter()
    made = await asyncio.gather(*(one() for _ in range(count)))
    line(f"{count} sandboxes with a server, ready", f"{time.perf_counter() - began:.2f} s")
    servers = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.cmdline()[-1:] == ["/tools/one/server.py"]
    ]
    line("memory of a server", f"{sum(map(pss, servers)) / count:.1f} MiB")
    line("  and of this process for each", f"{(pss(psutil.Process()) - own) / count:.2f} MiB")
    call = ToolCall("1", **ECHO)  # type: ignore[arg-type]
    tools = made[0][1]
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(times):
        await tools.call_all([call])
    line("a call in a sandbox, one after another", f"{(time.perf_counter() - began) * 1000 / times:.2f} ms")
    line("  CPU of this process", f"{(time.process_time() - cpu) * 1000 / times:.2f} ms")
    began = time.perf_counter()

    async def many(tools) -> None:
        for _ in range(times // 10):
            await tools.call_all([call])

    await asyncio.gather(*(many(tools) for _, tools in made))
    line(f"calls, {count} at once", f"{count * (times // 10) / (time.perf_counter() - began):.0f} /s")
    began = time.perf_counter()
    await asyncio.gather(*(tools.aclose() for _, tools in made))
    await asyncio.gather(*(sandbox.close() for sandbox, _ in made))
    line(f"{count} servers and sandboxes closed", f"{time.perf_counter() - began:.2f} s")
    await sandboxes.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--times", type=int, default=1000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        line("a plain process, by hand", f"{by_hand(given.times, folder):.2f} ms")
        line("a plain process, the SDK's own client", f"{asyncio.run(by_sdk(given.times, folder)):.2f} ms")
    asyncio.run(in_sandboxes(given.count, given.times))


if __name__ == "__main__":
    main()
