"""A task set for experiments: chains of dependent steps, whose outcome is sparse and whose steps can be checked.

``chain-8`` asks for eight files, each made from the one before. A check looks at each file, so a wrong step makes all
later ones wrong too. In a configuration: ``tasks.set: clawgym.trainers.recipes.chains:pack``.
"""

from __future__ import annotations

import random
from functools import partial

from clawgym.tasks.packs.seeded import WORDS, Generator, SeededPack, generator
from clawgym.tasks.packs.terminal_basic import TerminalDraft, build

STEPS = (3, 4, 8)
OPS = {
    "sort": ("{0} sorted", "sort {0}"),
    "sort-down": ("{0} sorted from z to a", "sort -r {0}"),
    "reverse": ("{0} with its lines reversed", "tac {0}"),
    "first": ("the first {1} lines of {0}", "head -n {1} {0}"),
    "last": ("the last {1} lines of {0}", "tail -n {1} {0}"),
    "behead": ("{0} without its first line", "sed 1d {0}"),
    "curtail": ("{0} without its last line", "sed '$d' {0}"),
}
"""Name -> what the instruction says, and the command."""
GENERATORS: dict[str, Generator[TerminalDraft]] = {}


def after(op: str, number: int, lines: list[str]) -> list[str]:
    """The lines that a step makes of ``lines``."""
    return {
        "sort": lambda: sorted(lines),
        "sort-down": lambda: sorted(lines, reverse=True),
        "reverse": lambda: lines[::-1],
        "first": lambda: lines[:number],
        "last": lambda: lines[-number:],
        "behead": lambda: lines[1:],
        "curtail": lambda: lines[:-1],
    }[op]()


def draft(rng: random.Random, steps: int) -> TerminalDraft:
    start: list[str] = rng.sample(WORDS, 2 * steps + 4)
    ops: list[tuple[str, int]] = []
    made = [start]
    while len(ops) < steps:  # every step changes something, and leaves enough for the others
        left = len(made[-1])
        op, number = rng.choice([*OPS]), rng.randint(max(3, left - 3), max(3, left - 1))
        lines = after(op, number, made[-1])
        if lines != made[-1] and len(lines) >= 2 + steps - len(ops) and (not ops or ops[-1][0] != op):
            ops.append((op, number))
            made.append(lines)

    def script(of: list[tuple[str, int]], *, chained: bool = True) -> str:
        return "\n".join(
            f"{OPS[op][1].format(f'f{k if chained else 0}.txt', number)} > f{k + 1}.txt"
            for k, (op, number) in enumerate(of)
        )

    says = [f"Make f{k + 1}.txt: {OPS[op][0].format(f'f{k}.txt', number)}." for k, (op, number) in enumerate(ops)]
    other = rng.choice([(op, 3) for op in OPS if after(op, 3, start) != made[1]])
    return TerminalDraft(
        instruction=" ".join(says),
        inputs={"f0.txt": "\n".join(start) + "\n"},
        data={"steps": {f"f{k + 1}.txt": lines for k, lines in enumerate(made[1:])}},
        solve=script(ops),
        wrong={
            "stops-early": script(ops[:-1]),
            "always-from-f0": script([*ops[:1], *ops[:-1]], chained=False),
            "another-start": script([other, *ops[1:]]),  # the last file may be right by chance, the first is not
        },
        check='for path, lines in DATA["steps"].items():\n    checks(path)(lambda: cg.read_lines(WS / path) == lines)',
    )


for count in STEPS:
    generator(f"chain-{count}", family="chains", level=2, into=GENERATORS)(partial(draft, steps=count))

_PACK = SeededPack("chains", "1", GENERATORS, build)


def pack() -> SeededPack[TerminalDraft]:
    """Chains of dependent steps."""
    return _PACK
