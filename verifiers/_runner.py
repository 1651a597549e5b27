"""Runs a checker and proves that it ran to its end. Sent into the grading sandbox as text (``python3 -I -c``).

A checker that imports the agent's code shares its process with it, and that code could print a perfect result and exit.
Therefore stdin has a secret mark. It is written to stderr only after the checker's last line has run, or the checker
itself has called ``sys.exit``, and only if ``print``, ``json`` and ``sys.stdout`` are unchanged. Agent code in another
process cannot read, write or trace this process (``PR_SET_DUMPABLE``).

Code in the same process that knows this mechanism can still forge a result; see docs/concepts/grading.md.
"""

import os
import sys


def main() -> None:
    mark = os.read(0, 64)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    out = os.dup(2)
    try:
        import _ctypes  # the C module; importing ctypes takes ten times as long

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # pyright: ignore[reportArgumentType] None: this program
        _ctypes.call_function(prctl, (4, 0, 0, 0, 0))  # PR_SET_DUMPABLE
    except (ImportError, OSError, AttributeError):
        pass
    path, workspace = sys.argv[1:3]
    sys.argv = sys.argv[1:]
    # Modules beside the checker are importable, as for a plain script; nothing else on the path is writable.
    folder = path.rpartition("/")[0]
    sys.path.insert(0, folder)

    library = os.path.dirname(os.__file__)
    trusted = (folder + "/", workspace + "/reward/", library + "/", sys.prefix + "/", "<frozen ")

    before = _speakers()
    try:
        exec(*_program(path))
    except SystemExit as error:
        if _by_itself(error, trusted) and _speakers() == before:
            _say(out, mark)
        raise
    if _speakers() == before:
        _say(out, mark)


def _program(path):
    """The checker as Python's main program. Like runpy, whose imports take as long as a short checker."""
    program = type(sys)("__main__")
    program.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = program
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec", dont_inherit=True), program.__dict__


def _speakers():
    """The objects with which a result is made and printed."""
    import builtins
    import json

    stdout = sys.stdout
    try:
        number = stdout.fileno()
    except Exception:
        number = None
    encoder = json.JSONEncoder
    return (
        (builtins.print, json.dump, json.dumps, encoder, encoder.encode, encoder.iterencode, encoder.default),
        (type(stdout), number, sys.exit, os._exit, sys.getprofile(), sys.gettrace()),
    )


def _by_itself(error, trusted):
    """Whether only code of the checker and of Python is in the traceback of the exit. ``exec``ed text is neither."""
    frame = error.__traceback__.tb_next  # the first is here
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(trusted):
            return False
        frame = frame.tb_next
    return True


def _say(out, mark):
    sys.stdout.flush()
    os.write(out, mark)


main()
