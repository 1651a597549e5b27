"""What fuzzing found, each as the attack that it is: nothing that others wrote raises what no caller expects, stops the
loop, or fills the memory. The inputs themselves are in ``tests/fuzz/corpus``."""

from __future__ import annotations

import ast
import asyncio
import bz2
import gzip
import io
import json
import lzma
import struct
import tarfile
import time
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from clawgym.agents.text_protocol import MalformedCall, parse_reply
from clawgym.credentials import texts_of
from clawgym.desktop.actions import parse
from clawgym.engines import GenerateRequest, VLLMEngine
from clawgym.engines.openai import OpenAIEngine
from clawgym.engines.protocol import Delta, Sampling
from clawgym.errors import (
    EngineError,
    GradingError,
    PoolError,
    SandboxDied,
    SandboxError,
    TaskError,
    TraceError,
)
from clawgym.gateway.calls import Refusal
from clawgym.gateway.dialects.chat import ChatDialect
from clawgym.gateway.server import read_object
from clawgym.gateway.stitch import same_reply
from clawgym.pool import Pool
from clawgym.pool.exchange import import_
from clawgym.pool.traces import read_traces
from clawgym.records import Limits, Task, TaskFile, VerifierSpec
from clawgym.redteam.scan import _files_of
from clawgym.registry import dialects
from clawgym.sandbox.extract import filter_tar
from clawgym.sandbox.images import ImageStore
from clawgym.sandbox.link import GuestLink
from clawgym.sandbox.protocol import ExecResult, SandboxSpec
from clawgym.tasks.layers import Wheel, _unpack
from clawgym.tasks.swe.patching import BadPatch
from clawgym.tasks.swe.patching import apply as apply_patch
from clawgym.tools._arguments import check_schema
from clawgym.verifiers.grading import Subject, empty_archive, grade
from clawgym.verifiers.workspace import changed_inputs, submitted

from ..fuzz.source import Posted
from ..tree import modules

DEEP = 100_000
NESTED = "[" * DEEP + "]" * DEEP


def test_a_fence_with_many_blanks_is_read_in_linear_time() -> None:
    """4,000 blanks took 115 s."""
    started = time.process_time()
    assert isinstance(parse_reply("```" + " " * 100_000 + "x`"), MalformedCall)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("inner", ["[", '{"x":'])
def test_arguments_of_any_depth_are_compared(inner: str) -> None:
    def reply(arguments: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }

    close = "]" if inner == "[" else "}"
    sent = '{"a":' + inner * 450 + "1" + close * 450 + "}"
    assert same_reply(reply(sent), reply(sent.replace(":", ": ") + " ")) == {"spacing"}
    assert same_reply(reply(sent), reply(sent.replace("1", "2"))) is None


@pytest.mark.parametrize("name", ["out/.", "out/a\0b", ".", "./."])
def test_names_that_no_file_has_are_left_out_of_an_archive(name: str) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        entry = tarfile.TarInfo("x")
        entry.pax_headers, entry.size = {"path": name}, 1
        tar.addfile(entry, io.BytesIO(b"x"))
    kept = filter_tar(made.getvalue(), "", 1000, 10)
    assert submitted(kept.tar, VerifierSpec("reward_sh", ())) == {}
    assert kept.dropped or name == "./."


def _sparse(size: int) -> bytes:
    """An archive of a file of ``size`` zeros, as GNU tar writes a file of holes."""
    entry = tarfile.TarInfo("a.txt")
    entry.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (size, 0)  # an empty piece at its end
    header[483:495] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as out:
        entry = tarfile.TarInfo("a.txt")
        entry.size = 9
        out.addfile(entry, io.BytesIO(b"some text"))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "hostile",
    [*(pack(_tar()) for pack in (gzip.compress, bz2.compress, lzma.compress)), _sparse(1 << 30)],
    ids=["gzip", "bzip2", "xz", "holes"],
)
@pytest.mark.parametrize(
    "door",
    [
        lambda tar: filter_tar(tar, "", 1 << 20, 9),
        lambda tar: list(texts_of("w.tar.gz", gzip.compress(tar))),
        lambda tar: list(_files_of(gzip.compress(tar))),
        lambda tar: changed_inputs(tar, (TaskFile("a.txt", b"x"),), ()),
    ],
    ids=["a sandbox", "a pushed file", "a stored workspace", "a graded workspace"],
)
def test_an_archive_reads_as_no_more_than_it_has(door: Callable[[bytes], object], hostile: bytes) -> None:
    """A kilobyte may say that it has gigabytes: compressed inside of what was unpacked, or as a file with holes."""
    door(_tar())
    with pytest.raises((tarfile.TarError, SandboxError, ValueError)):
        door(hostile)


def test_every_archive_is_opened_for_what_it_is() -> None:
    """Without a mode, ``tarfile`` unpacks whatever is compressed."""
    opened = 0
    for name, path in modules().items():
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "tarfile.open":
                opened += 1
                assert len(call.args) > 1 or any(word.arg == "mode" for word in call.keywords), f"{name}:{call.lineno}"
    assert opened > 20


@pytest.mark.parametrize("dialect", [made() for _, made in dialects.things()], ids=lambda dialect: dialect.path)
@pytest.mark.parametrize("name", ["messages", "input", "tools", "metadata", "response_format", "tool_choice"])
@pytest.mark.parametrize("depth", [260, 900, DEEP])
async def test_a_body_is_not_read_to_any_depth(dialect: Any, name: str, depth: int) -> None:
    """Each was an error that nobody foresaw: of ``repr``, ``json``, ``orjson``, or a walk of ours."""
    body = b'{"%s":[{"role":%s}]}' % (name.encode(), b"[" * depth + b"]" * depth)
    with pytest.raises(Refusal) as raised:
        dialect.call(await read_object(Posted(body)), None)  # type: ignore[arg-type]
    assert raised.value.status == 413
    assert len(str(raised.value)) < 300


async def test_a_refusal_does_not_repeat_the_request() -> None:
    with pytest.raises(Refusal) as raised:
        ChatDialect().call({"messages": [{"role": "x" * 2**20}]}, None)
    assert len(str(raised.value)) < 2000


async def test_options_of_a_stream_that_are_none() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": "x"}
    dialect = ChatDialect()

    async def deltas() -> AsyncIterator[Delta]:
        yield Delta("hi", finish_reason="stop")

    with pytest.raises(Refusal, match="stream_options"):
        await anext(dialect.events(deltas(), dialect.call(body, None), body))


class _Verifier:
    """A sandbox and its backend, whose verifier leaves ``reward``."""

    def __init__(self, reward: bytes) -> None:
        self.reward = reward

    def tool(self, name: str) -> list[str]:
        return [name]

    async def create(self, spec: SandboxSpec) -> _Verifier:
        return self

    async def exec(self, argv: list[str], **_: Any) -> ExecResult:
        return ExecResult(b"", 0, "/")

    async def get(self, path: str, **_: Any) -> bytes:
        return self.reward

    async def put(self, *_: object) -> None: ...

    put_archive = put

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    "reward",
    [
        NESTED,
        '{"a": 1' + "0" * 400 + "}",
        '{"a": Infinity, "b": -Infinity}',
        "1" + "0" * 400,
        '{"a": 1e308, "b": 1e308}',
    ],
    ids=["deep", "huge", "infinite", "a huge number", "a sum that overflows"],
)
async def test_a_reward_file_never_ends_the_episode(reward: str) -> None:
    task = Task("t", "Do it.", VerifierSpec("harbor", (TaskFile("test.sh", b"true"),)))
    verifier: Any = _Verifier(reward.encode())
    with pytest.raises(GradingError) as raised:  # this one says the same of the untouched workspace
        await grade(task, Subject(empty_archive()), verifier)
    assert raised.value.cause == "control-output"


@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf"), 0, -1])
def test_limits_are_numbers_that_a_machine_can_keep(value: float) -> None:
    with pytest.raises(TaskError, match="positive number"):
        Limits(memory_mb=value)  # type: ignore[arg-type]


def test_a_schema_of_a_tool_is_not_read_to_any_depth() -> None:
    """There were depths that could be written and not be read."""
    schema: Any = {}
    for depth in range(500):
        schema = {"type": "object", "properties": {"x": schema}}
        if depth > 200 and depth % 9 == 0:
            with pytest.raises(ValueError, match=r"deeply|JSON"):
                check_schema(schema)


@pytest.mark.parametrize(
    "patch",
    [b"rename from x", b"diff --git \"", b"diff --git a/x b/x\nnew mode x", b'--- a/x\n+++ "b/\\777"\n@@ -1 +1 @@\n',
     b"--- a/x\n+++ b/x\n@@ -" + b"9" * 5000 + b" +1 @@\n"],
)  # fmt: skip
def test_a_patch_that_is_none(patch: bytes) -> None:
    with pytest.raises(BadPatch):
        apply_patch(patch, {"x": b"a\n"}.get)


def _deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(5000):
        made = [made]
    return made


@pytest.mark.parametrize(
    "arguments",
    [
        {"action": "left_click", "coordinate": [10**400, 1]},
        {"action": "wait", "seconds": 10**400},
        {"action": _deep()},
        {"action": "left_click", "unit": _deep()},
        {"action": "scroll", "amount": _deep()},
        {"action": "left_click", "coordinate": _deep()},
    ],
)
def test_actions_that_are_none(arguments: dict[str, Any]) -> None:
    with pytest.raises(SandboxError):
        parse(arguments, 640, 480)


def test_an_image_whose_lists_are_deep(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image/index.json").write_text(NESTED)
    with pytest.raises(SandboxError, match="is no image that can be read"):
        ImageStore(tmp_path / "store").add(str(tmp_path / "image"))


def test_a_wheel_with_a_member_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "p.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("aa", b"x")
    path.write_bytes(path.read_bytes().replace(b"aa", b"\0a"))
    with pytest.raises(TaskError, match=r"p-1-py3-none-any\.whl"):
        _unpack(Wheel("p", "1", "p-1-py3-none-any.whl", "0" * 64), path, tmp_path / "to", {})


_ATIF = {"schema_version": "ATIF-v1.2", "session_id": "s", "steps": []}


@pytest.mark.parametrize(
    "row",
    [
        NESTED,
        json.dumps({**_ATIF, "steps": 5}),
        json.dumps({**_ATIF, "steps": ["x"], "extra": {"clawgym": 5}}),
        json.dumps({**_ATIF, "steps": [{"source": "agent", "metrics": 5}]}),
        json.dumps({**_ATIF, "extra": 5}),
        json.dumps({"messages": ["x"]}),
        json.dumps({"messages": [], "turns": 5, "episode": "e"}),
    ],
)
def test_traces_of_another_form_than_they_say(tmp_path: Path, row: str) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(_ATIF) + "\n" + row + "\n")
    with Pool(tmp_path / "pool.sqlite") as pool, pytest.raises(TraceError, match=r"traces\.jsonl"):
        import_(pool, path)
    said = "traces.jsonl:2"
    try:
        list(read_traces(path))
    except TraceError as error:
        said = str(error)
    assert "traces.jsonl:2" in said


def test_an_episode_whose_name_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps({**_ATIF, "session_id": "\udcaf"}))
    with Pool(tmp_path / "pool.sqlite") as pool:
        with pytest.raises(PoolError, match="surrogate"):
            import_(pool, path)
        with pytest.raises(PoolError, match="surrogate"):
            pool.episode("\udcaf")


async def _endpoint(answers: list[bytes]) -> tuple[asyncio.Server, str]:
    """A server that answers one request with each of ``answers``, the last one for ever."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        sent = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        await reader.readexactly(int(sent.partition(b":")[2]))
        body = answers.pop(0) if len(answers) > 1 else answers[0]
        kind = b"text/event-stream" if body.startswith(b"data:") else b"application/json"
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: " + kind)
        writer.write(b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


async def test_a_chunk_of_any_depth_is_an_error_of_the_engine() -> None:
    server, url = await _endpoint([b"data: " + NESTED.encode() + b"\n\n"])
    engine = OpenAIEngine("m", base_url=url, api_key="k", max_retries=0)
    try:
        with pytest.raises(EngineError, match="DEEPEST_JSON"):
            async for _ in engine.stream({"messages": [{"role": "user", "content": "hi"}]}):
                pass
    finally:
        await engine.aclose()
        server.close()


@pytest.mark.parametrize("listed", [{"data": 5}, {"data": [{"id": "m", "max_model_len": 9}], "choices": 5}])
async def test_a_server_whose_lists_are_none(listed: dict[str, Any]) -> None:
    server, url = await _endpoint([json.dumps(listed).encode()])
    engine = VLLMEngine(url, "m", tokenizer="t", patience=0.0)
    try:
        with pytest.raises(EngineError, match=r"another form|no choice"):
            async for _ in engine.generate(GenerateRequest([1], Sampling())):
                pass
    finally:
        await engine.aclose()
        server.close()


class _Silent:
    """A stream to nobody."""

    def start(self, received: Any, ended: Any) -> None:
        self.received = received

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...


async def test_frames_without_output_end_the_sandbox() -> None:
    """A million of them were a million entries of a list, for as long as the command was allowed to take."""

    async def died() -> str:
        return "died"

    stream = _Silent()
    link = GuestLink(stream, SandboxSpec(), died)  # type: ignore[arg-type]
    link.start()
    asked = asyncio.ensure_future(link.exec(["true"]))
    await asyncio.sleep(0)
    stream.received(struct.pack(">IBI", 0, ord("O"), 1))
    with pytest.raises(SandboxDied) as raised:
        await asyncio.wait_for(asked, 5)
    assert raised.value.cause == "protocol"
    await link.end()
