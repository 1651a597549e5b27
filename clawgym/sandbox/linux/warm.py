"""An interpreter that has been started before: short Python programs run in a fork of process 1.

To start Python and import what a checker uses takes longer than most checkers run. So sandboxes that ask for it
(``SandboxSpec.warm_python``) are cloned from a second zygote, which has imported these modules, and whose interpreter
is the sandbox's own ``python3``. The program runs in a new process of the new sandbox, as always: no process runs two
programs. What differs from ``python3 -I -S -B -c TEXT``: some standard modules are imported already, and all programs
of a backend have the same string hashes.

A program in such a process could find in its memory what process 1 knew: the plan of its own sandbox. Therefore
:mod:`clawgym.verifiers` asks for it only for checkers that do not execute the agent's code in their own process.
Standard library only; nothing but the preloaded modules can be imported from outside once the root has changed.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["MODULES", "interpret", "preload"]

MODULES = (
    *("collections", "contextlib", "csv", "datetime", "functools", "hashlib", "io", "itertools", "json", "math"),
    *("operator", "pathlib", "re", "stat", "string", "time", "traceback", "typing"),
)
"""What most checkers import."""
_OWN = "clawgym"
_INTERRUPTED = 130
_kept: list[object] = []


def preload() -> None:
    """Import the modules that most checkers use."""
    for name in MODULES:
        __import__(name)


def interpret(argv: list[str], env: dict[str, str]) -> NoReturn:
    """In a forked child whose descriptors are in place: run ``argv``, which begins like ``guest.PYTHON``, and exit."""
    code = 1
    try:
        text = _as_started(argv, env)
        exec(compile(text, "<string>", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
        code = 0
    except SystemExit as leaving:
        code = _status(leaving.code)
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    finally:
        code = _end(code)
        if code == _INTERRUPTED:  # Python ends itself by the signal
            import _signal  # pyright: ignore[reportMissingImports]

            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
            os.kill(os.getpid(), _signal.SIGINT)
        os._exit(code)


def _as_started(argv: list[str], env: dict[str, str]) -> str:
    """Make the interpreter look newly started. Returns the program's text."""
    import _signal  # pyright: ignore[reportMissingImports]
    import builtins
    import gc

    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(env)
    text, *arguments = argv[argv.index("-c") + 1 :]
    sys.argv = ["-c", *arguments]
    sys.orig_argv = argv
    sys.dont_write_bytecode = True
    sys.path_importer_cache.clear()
    _open_streams()
    # Kept alive: their objects hold descriptor numbers that are the program's now.
    _kept.append({name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == _OWN})
    _kept.append(sys.modules["__main__"])
    main = sys.modules["__main__"] = type(sys)("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(sys.getrecursionlimit() + depth)
    gc.enable()
    return text


def _open_streams() -> None:
    """stdin, stdout and stderr as in a new interpreter with a UTF-8 locale."""
    import io

    for name, fd, mode in (("stdin", 0, "rb"), ("stdout", 1, "wb"), ("stderr", 2, "wb")):
        _kept.append((getattr(sys, name), getattr(sys, f"__{name}__")))
        raw = io.FileIO(fd, mode, closefd=False)
        raw.name = f"<{name}>"  # pyright: ignore[reportAttributeAccessIssue]
        buffer = io.BufferedReader(raw) if fd == 0 else io.BufferedWriter(raw)
        errors = "backslashreplace" if fd == 2 else "surrogateescape"
        stream = io.TextIOWrapper(buffer, encoding="utf-8", errors=errors, line_buffering=fd == 2 or raw.isatty())
        stream.mode = mode[0]  # pyright: ignore[reportAttributeAccessIssue]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _status(code: object) -> int:
    """The exit status of ``sys.exit(code)``."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _end(code: int) -> int:
    """What Python does at its end: wait for threads, run the exit functions, write out what is buffered."""
    import atexit

    threading = sys.modules.get("threading")
    try:
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError, AttributeError) as error:
            if stream is sys.stdout:
                print(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}", file=sys.stderr)
            code = code or 120  # as Python does
    return code
