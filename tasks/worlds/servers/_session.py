"""The Python session behind ``code_interpreter``: started by ``interpreter.py``, which outlives it.

Reads requests (one JSON line: code and the call's number) from a pipe, runs them in one namespace, and writes one byte
string per request to another: what is left on stdout and stderr is all the output there is.
"""

import ast
import builtins
import json
import linecache
import os
import resource
import signal
import sys
import traceback


def main(requests, replies, memory):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # taken only while code runs: a late one belongs to nobody
    for handle in (requests, replies):
        os.set_inheritable(handle, False)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # of all in the box, the session is what can be spared
    except OSError:
        pass
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    me = os.getpid()
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv = [""]
    sys.path[0] = ""
    stdin = os.fdopen(requests, "rb")
    while True:
        line = stdin.readline()
        if not line:
            os._exit(0)
        request = json.loads(line)
        note = ""
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            note = run(request["code"], f"<call {request['number']}>", module.__dict__)
            for stream in (sys.stdout, sys.stderr):
                flush(stream)
        except KeyboardInterrupt:
            pass
        calm()
        if os.getpid() != me:
            os._exit(0)  # a child that the code forked and that came out at the end of it
        os.write(replies, json.dumps({"number": request["number"], "note": note}).encode() + b"\n")


def calm():
    while True:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return
        except KeyboardInterrupt:
            pass


def flush(stream):
    try:
        stream.flush()
    except KeyboardInterrupt:
        raise
    except BaseException:  # whatever the code made of the stream
        pass


def run(code, name, namespace):
    """Run ``code`` exactly as typed, show the value of a last expression; returns a note, or an empty text."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        tree: ast.Module = compile(code, name, "exec", ast.PyCF_ONLY_AST)  # type: ignore[assignment]
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                namespace["_"] = value
                print(repr(value))
        return ""
    except SystemExit as error:
        shown = "" if error.code is None else ascii(error.code)[:100]
        return f"sys.exit({shown}) was called: the session goes on"
    except BaseException as error:
        show(error, name)
        return ""


def show(error, name):
    """Print a traceback that begins in the code, not here."""
    try:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.stdout.flush()
        traceback.print_exception(type(error), error, trace)
    except BaseException as second:
        os.write(2, (f"{type(error)} (and its traceback cannot be shown: {type(second)})\n").encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
