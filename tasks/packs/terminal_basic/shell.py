"""Family ``shell``: tasks on shell scripts and processes.

The checker runs the agent's scripts in a scratch copy of the workspace, and ends all processes that they started.
"""

from __future__ import annotations

import random
from functools import partial

from clawgym.tasks.packs.seeded import WORDS, Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import TABLE_CHECK, TerminalDraft, case, here, program_draft, python, replaced, template

SHELL: dict[str, Generator[TerminalDraft]] = {}
generator = partial(_generator, family="shell", into=SHELL)


@generator("exit-codes", level=3)
def exit_codes(rng: random.Random) -> TerminalDraft:
    """Run every job and record its exit status; one job never ends."""
    jobs, report, *w = rng.sample(WORDS, 16)
    w = w[:7]
    names = sorted(w)
    lines = {name: rng.randint(1, 5) for name in names}
    code = rng.randint(2, 99)

    def say(name: str, extra: str) -> str:
        return f"#!/bin/bash\nfor k in $(seq {lines[name]}); do echo {name} $k; done\n{extra}\n"

    bodies = {
        w[0]: (say(w[0], "echo done >&2"), "0"),
        w[1]: (say(w[1], f"exit {code}"), str(code)),
        w[2]: (say(w[2], "echo slow >&2; sleep 0.2; exit 124"), "124"),
        w[3]: (say(w[3], "kill -9 $$"), "137"),
        w[4]: (say(w[4], "trap '' TERM\nwhile :; do sleep 600; done"), "timeout"),
        w[5]: (say(w[5], f'grep -q "^{w[5]}$" names.txt || exit 3'), "0"),
        w[6]: (say(w[6], "trap 'exit 7' EXIT\nfalse"), "7"),
    }
    solve = python(template("exit-codes/solve.py", jobs=jobs, report=report))
    simple = template("exit-codes/killed-is-timeout.sh", jobs=jobs, report=report)
    return TerminalDraft(
        instruction=(
            f"Run each script of the folder {jobs} once with bash, with {jobs} as the working directory and nothing "
            f"on stdin. Write output/{report}.csv with the header `job,status,lines` and one row per script, sorted "
            "by name: the name without .sh; its exit status as the shell shows it in $? (128 + the signal's number "
            "if a signal ended it), or the word timeout if it had not ended by itself after 2 seconds; and the "
            "number of lines that it wrote to stdout (not stderr) until then. Leave none of them running."
        ),
        inputs={f"{jobs}/{name}.sh": text for name, (text, _) in bodies.items()}
        | {f"{jobs}/names.txt": "\n".join(rng.sample(names, 7)) + "\n"},
        data={
            "path": f"output/{report}.csv",
            "header": ["job", "status", "lines"],
            "rows": [[name, bodies[name][1], str(lines[name])] for name in names],
        },
        check=TABLE_CHECK,
        solve=solve,
        wrong={
            "killed-is-timeout": simple,
            "own-folder": replaced(solve, f'["bash", path.name], cwd="{jobs}"', '["bash", str(path)]'),
            "stderr-too": replaced(solve, "stderr=subprocess.DEVNULL", "stderr=subprocess.STDOUT"),
        },
    )


@generator("script-args", level=2)
def script_args(rng: random.Random) -> TerminalDraft:
    """Write a script that counts the files of a folder by their ending."""
    name, folder, *w = rng.sample(WORDS, 16)
    code = rng.randint(3, 9)
    none = rng.choice(["none", "-", "other"])
    source = template("script-args/solve.sh", name=name, code=code, none=none)

    def tree(box: str, *, spaces: bool, hidden: bool) -> dict:
        files, counts = {}, dict[str, int]()
        for ending in [*rng.sample(["txt", "md", "csv", "log", "sh"], 3), *([none] if hidden else [])]:
            counts[ending] = rng.randint(1, 4)
            for k in range(counts[ending]):
                stem = f"{rng.choice(w)}{' ' if spaces else '-'}{k}"
                below = rng.choice(["", "a/", "a/b c/" if spaces else "a/b/"])
                plain = f".{stem}" if k == 0 else stem
                files[f"{box}/{below}{plain if ending == none else f'{stem}.{ending}'}"] = "x\n"
        out = "".join(f"{ending} {counts[ending]}\n" for ending in sorted(counts))
        return case(["bash", f"{name}.sh", box], out, files=files)

    return program_draft(
        f"Write a bash script {name}.sh. `bash {name}.sh FOLDER` counts the files in FOLDER and in all folders "
        "below it by their ending (what follows the last dot of the name) and prints one line `ENDING COUNT` for "
        "each ending, sorted by ending in byte order. A file whose name has no dot, or only one at its very start, "
        f"counts as `{none}`. If FOLDER is not given or is no folder, print nothing on stdout and exit with status "
        f"{code}.",
        program=f"{name}.sh",
        source=source,
        mistakes={
            "top-only": ("-mindepth 1", "-maxdepth 1"),
            "first-dot": ("##*.", "#*."),
            "dot-files-have-endings": ("?*.*)", "*.*)"),
        },
        groups={
            "plain": [tree(folder, spaces=False, hidden=False) for _ in range(2)]
            + [case(["bash", f"{name}.sh", "k"], "gz 1\n", files={"k/a.tar.gz": ""})],
            "spaces": [tree(f"my {folder}", spaces=True, hidden=False) for _ in range(2)],
            "no_ending": [tree(folder, spaces=False, hidden=True) for _ in range(2)],
            "no_folder": [
                case(["bash", f"{name}.sh"], "", code=code),
                case(["bash", f"{name}.sh", f"{folder}.txt"], "", code=code, files={f"{folder}.txt": "x\n"}),
            ],
        },
    )


@generator("script-fix", level=3)
def script_fix(rng: random.Random) -> TerminalDraft:
    """Repair a script that fails on spaces, patterns and missing folders."""
    name, ending, *w = rng.sample(WORDS, 16)
    code = rng.randint(4, 9)
    broken = template("script-fix/broken.sh", name=name, ending=ending)
    source = template("script-fix/solve.sh", name=name, code=code, ending=ending)

    def folder(text: str, *, spaces: bool) -> dict:
        files, rows = {}, []
        for count in [0, 1, 1, 2, rng.randint(3, 9), 11]:
            stem = f"{rng.choice(w)}{' ' if spaces else '-'}{len(files)}"
            lines = [f"{rng.choice(w)} {text} {text}" for _ in range(count)] + [f"{rng.choice(w)}" for _ in range(3)]
            if "." in text:
                lines.append(text.replace(".", "x"))
            rng.shuffle(lines)
            files[f"in/{stem}.{ending}"] = "\n".join(lines) + "\n"
            rows += [(-count, f"{stem}.{ending}")] if count else []
        files["in/notes.bak"] = text + "\n"
        out = "".join(f"{-count} {file}\n" for count, file in sorted(rows))
        return case(["bash", f"{name}.sh", "in", text], out, files=files)

    number = rng.randint(100, 999)
    return program_draft(
        f"{name}.sh is meant to be called as `bash {name}.sh FOLDER TEXT`. It should print, for each file of FOLDER "
        f"(not below it) that ends in .{ending}, the number of its lines that contain TEXT and the file's name, "
        "with one space between; files without such a line are left out; highest number first, equal numbers by "
        "name in byte order. TEXT is plain text, never a pattern, and can start with a dash; names can hold "
        f"spaces. If FOLDER cannot be entered, it should print nothing on stdout and exit with status {code}. Mend "
        "the script.",
        program=f"{name}.sh",
        source=source,
        mistakes={
            "pattern": ("grep -cF", "grep -c"),
            "keeps-zeros": ('"$count" -gt 0', '"$count" -ge 0'),
            "sorts-as-text": ("-k1,1nr", "-k1,1r"),
        },
        groups={
            "plain": [folder(f"id{number}", spaces=False) for _ in range(2)],
            "names_with_spaces": [folder(f"id{number}", spaces=True) for _ in range(2)],
            "plain_text": [folder(text, spaces=False) for text in (f"v{number}.5", f"-{number}", "a  b [x]")],
            "no_folder": [case(["bash", f"{name}.sh", "nowhere", "x"], "", code=code)],
        },
        inputs={
            f"{name}.sh": broken,
            f"box/a b.{ending}": f"id{number}\n",
            f"box/c.{ending}": f"id{number}\n" * 2,
        },
        may_change=(f"{name}.sh",),
    )


@generator("service-script", level=5)
def service_script(rng: random.Random) -> TerminalDraft:
    """Write a start/stop/status script with a pid file, for a worker that may ignore SIGTERM."""
    name, pid, *log = rng.sample(WORDS, 4)
    down, failed = rng.sample(range(3, 10), 2)
    source = template("service-script/solve.sh", name=name, pid=pid, down=down, failed=failed)
    mistakes = {
        "no-lock": ("  for try in $(seq 100); do\n    if mkdir", "  return\n  for try in $(seq 100); do\n    if mkdir"),
        "trusts-pid": (
            "tr '\\0' ' ' 2> /dev/null < \"/proc/$pid/cmdline\" | grep -q 'worker\\.sh'",
            'kill -0 "$pid" 2> /dev/null',
        ),
        "spares-children": (
            'kill -TERM -- "-$pid"',
            'kill -TERM -- "$pid"; sleep 0.1; running || { rm -f "$pidfile"; echo stopped; exit 0; }',
        ),
    }
    return TerminalDraft(
        instruction=(
            f"Write {name}.sh, a service script for worker.sh, which lies beside it and runs until it is told to "
            f"end. It is called as `bash {name}.sh start|stop|status` and prints exactly one line on stdout:\n"
            f"- start: starts `bash ./worker.sh` in the background, writes its pid to run/{pid}.pid, prints `started "
            "PID` and returns within 2 seconds while the worker goes on. If the worker has ended 0.5 seconds after "
            f"its start, print `failed`, leave no pid file and exit with status {failed}. If it is running already, "
            "start nothing and print `already running PID`.\n"
            f"- status: `running PID`, or `stopped` with exit status {down}.\n"
            "- stop: sends TERM to the worker and to all processes that it started, KILL to what is still there one "
            "second later; when all are gone, removes the pid file and prints `stopped`. If the worker is not "
            "running, prints `not running`.\n"
            "The exit status is 0 where nothing else is said. A pid file can be stale: its content can be nonsense, "
            "its process gone, or its number now belong to another process; the worker then is not running, and "
            "that other process must be left alone. When start is called several times at once, exactly one worker "
            "is started and the others say that it is running already. Use bash, coreutils, procps and util-linux "
            "only."
        ),
        inputs={"worker.sh": f"#!/bin/bash\ndate >> {'-'.join(log)}.txt\nsleep 600 &\nwait\n"},
        data={"program": f"{name}.sh", "pid": pid, "down": down, "failed": failed},
        solve=here(f"{name}.sh", source),
        wrong={what: here(f"{name}.sh", replaced(source, *change)) for what, change in mistakes.items()},
        executes_agent_code="subprocess",
    )
