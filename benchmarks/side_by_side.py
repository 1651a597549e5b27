"""Two versions of the library beside each other: the hot paths of six benchmarks, run by turns.

    git worktree add ../before REV && (cd ../before && make .venv/.installed)
    python benchmarks/side_by_side.py ../before

Each round runs each benchmark in both checkouts, in turns first and second. Printed are both medians and the median of
the rounds' ratios: above 1 this version is slower. Results are kept in ``--out``; the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parents[1]
COMMANDS = {
    "sandbox": "--count 30 -n 32",
    "env": "-n 32 --rounds 10 --tasks 20 --repeats 2",
    "parallel": "terminal toolcall -n 16",
    "gateway": "--streams 64 --seconds 3",
    "engine": "--rounds 1 --tokens 64",
    "train": "update --rounds 1",
}
NUMBER = r"([\d.]+)"
PATHS = {  # benchmark -> what is measured -> (the number in its output, its unit); a rate ends in /s
    "sandbox": {
        "create, exec, close": (rf"create, exec /bin/true, close +{NUMBER} ms", "ms"),
        "fork from a snapshot": (rf"fork from a snapshot +{NUMBER} ms", "ms"),
        "a command in a shell": (rf"/bin/true in its shell +{NUMBER} ms", "ms"),
        "commands in 32 sandboxes": (rf"namespace: '/bin/true' in all 32 +{NUMBER} /s", "commands/s"),
    },
    "env": {
        "step, 32 environments": (rf"32 ClawGym, step /bin/true +{NUMBER}", "turns/s"),
        "send and recv, 32 environments": (rf"32 ClawGym, send/recv : +{NUMBER}", "turns/s"),
        "first reset": (rf"32 ClawGym, first reset +{NUMBER} s", "s"),
        "submit and grade": (rf"32 ClawGym, submit and grade +{NUMBER} s", "s"),
        "grade()": (rf"grade\(\), clean mode +{NUMBER}", "ms"),
    },
    "parallel": {
        "terminal": (rf"terminal .* MiB +{NUMBER}", "turns/s"),
        "tool calls": (rf"toolcall .* MiB +{NUMBER}", "turns/s"),
    },
    "gateway": {
        "requests, 64 streams": (rf"(?s)unpaced, 64.*gateway +{NUMBER} requests/s", "requests/s"),
        "CPU of a request": (rf"(?s)unpaced, 64.*gateway.*CPU +{NUMBER} ms", "ms"),
    },
    "engine": {
        "even lengths, batch 64": (rf"even: batch 64 +engine +{NUMBER} tok/s", "tokens/s"),
        "mixed lengths, batch 64": (rf"mixed: 192 prompts, batch 64 +engine +{NUMBER} tok/s", "tokens/s"),
        "turns of a conversation": (rf"turns: .*engine +{NUMBER} tok/s", "tokens/s"),
    },
    "train": {
        "update": (rf"(?s)mixed: .*?ours, rollout +{NUMBER}", "us a token"),
    },
}


def main() -> int:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the other version, installed in its .venv")
    parser.add_argument("names", nargs="*", choices=[*COMMANDS, []], help="benchmarks; all, unless named")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "runs/side_by_side.json")
    given = parser.parse_args()
    trees = {"before": given.before.resolve(), "after": HERE}
    done: dict[str, list[str]] = json.loads(given.out.read_text()) if given.out.exists() else {}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for turn in range(given.rounds):
        for name in given.names or COMMANDS:
            for side in ("before", "after") if turn % 2 else ("after", "before"):
                outputs = done.setdefault(f"{name} {side}", [])
                if len(outputs) <= turn:
                    print(f"round {turn + 1}: {name}, {side}", file=sys.stderr, flush=True)
                    outputs.append(run(trees[side], name))
                    given.out.write_text(json.dumps(done))
    print("| benchmark | hot path | before | after | ratio |\n|---|---|---:|---:|---:|")
    for name in given.names or COMMANDS:
        for path, (pattern, unit) in PATHS[name].items():
            before, after = (
                [number(pattern, output) for output in done[f"{name} {side}"][: given.rounds]]
                for side in ("before", "after")
            )
            slower = [b / a if unit.endswith("/s") else a / b for b, a in zip(before, after, strict=True)]
            print(f"| {name} | {path} | {median(before):g} | {median(after):g} {unit} | {median(slower):.2f} |")
    return 0


def run(tree: Path, name: str) -> str:
    """What a benchmark prints in a checkout."""
    argv = [str(tree / ".venv/bin/python"), f"benchmarks/{name}.py", *COMMANDS[name].split()]
    ended = subprocess.run(argv, cwd=tree, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(argv)} failed in {tree}: run it there to see why\n{ended.stderr[-2000:]}")
    return ended.stdout


def number(pattern: str, output: str) -> float:
    """The first number that the pattern finds."""
    found = re.search(pattern, output)
    if found is None:
        raise SystemExit(f"no number was found by {pattern!r} in:\n{output}")
    return float(found[1])


if __name__ == "__main__":
    sys.exit(main())
