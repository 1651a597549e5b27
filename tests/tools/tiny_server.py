"""A tool server with the standard library only, which can misbehave as tests ask for."""

import json
import os
import sys
import time

TOOLS = {
    "echo": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "note": {"type": "object", "properties": {"line": {"type": "string"}}, "required": ["line"]},
    "sleep": {"type": "object", "properties": {"seconds": {"type": "number"}}, "required": ["seconds"]},
    "do": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
}


def send(message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def text(value, error=False):
    return {"content": [{"type": "text", "text": value}], "isError": error}


def do(what):
    """Whatever a server must not do."""
    if what == "die":
        print("I am dying", file=sys.stderr, flush=True)
        os._exit(3)
    if what == "long line":
        sys.stdout.write("x" * (5 * 2**20) + "\n")
        sys.stdout.flush()
    if what == "flood":
        while True:
            send({"jsonrpc": "2.0", "method": "notifications/nothing"})
    if what == "rubbish":
        sys.stdout.write("no json\n[1]\n{}\n" + "[" * 100_000 + "\n\udcff\n".encode("utf-8", "replace").decode())
        return text("after the rubbish")
    if what == "nonsense":
        return {"content": 7}
    if what == "image":
        return {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}], "isError": False}
    if what == "structure":
        return {"content": [], "structuredContent": {"n": 1}, "isError": False}
    if what == "big":
        return text("a" + "x" * 300_000 + "z")
    if what == "surrogate":
        return text("a\udcffb")
    if what == "ask back":
        send(
            {"jsonrpc": "2.0", "id": 99, "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}}
        )
        return text(sys.stdin.readline())
    if what == "stderr":
        sys.stderr.write("y" * 1_000_000)
        return text("written")
    if what == "fail":
        return text("it went wrong", error=True)
    if what == "eat memory":
        kept = []
        while True:
            kept.append(bytearray(2**24))
    return text(repr(what))


def call(name, arguments):
    if name == "echo":
        return text(arguments["text"])
    if name == "add":
        return text(str(arguments["a"] + arguments["b"]))
    if name == "note":
        with open("notes.txt", "a") as file:
            file.write(arguments["line"] + "\n")
        return text("noted")
    if name == "sleep":
        time.sleep(arguments["seconds"])
        return text("slept")
    return do(arguments["what"])


def main():
    prefix = sys.argv[1] if len(sys.argv) > 1 else ""
    extra = json.loads(os.environ.get("EXTRA_TOOLS", "{}"))
    tools = {prefix + name: schema for name, schema in {**TOOLS, **extra}.items()}
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message or "method" not in message:
            continue
        method, params = message["method"], message.get("params", {})
        answer = {"jsonrpc": "2.0", "id": message["id"]}
        if method == "initialize":
            about = {"name": "tiny", "version": "1"}
            version = params["protocolVersion"]
            answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        elif method == "tools/list":
            listed = [{"name": n, "description": f"It can {n}.", "inputSchema": s} for n, s in tools.items()]
            half = len(listed) // 2
            first = not params.get("cursor")
            answer["result"] = {"tools": listed[:half], "nextCursor": "2"} if first else {"tools": listed[half:]}
        elif method == "tools/call" and params["name"] in tools:
            answer["result"] = call(params["name"].removeprefix(prefix), params.get("arguments") or {})
        else:
            answer["error"] = {"code": -32601, "message": f"there is no {method}"}
        send(answer)
    with open("ended.txt", "w") as file:
        file.write("at rest")


main()
