"""Family ``programs``: small programs to write. Hidden cases check their output and exit status."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Literal

from clawgym.tasks.packs.seeded import WORDS, Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import TerminalDraft, case, program_draft, template

PROGRAMS: dict[str, Generator[TerminalDraft]] = {}
generator = partial(_generator, family="programs", into=PROGRAMS)


@generator("number-fold", level=2)
def number_fold(rng: random.Random) -> TerminalDraft:
    """Write a program that selects numbers from stdin and sums them up."""
    name = rng.choice(WORDS)
    k, bound = rng.randint(3, 9), rng.randint(-20, 20)
    which, condition, kept = rng.choice(
        [
            (f"divisible by {k}", f"n % {k} == 0", lambda n: n % k == 0),
            (f"greater than {bound}", f"n > {bound}", lambda n: n > bound),
            (f"smaller than {bound}", f"n < {bound}", lambda n: n < bound),
            (f"not divisible by {k}", f"n % {k} != 0", lambda n: n % k != 0),
        ]
    )
    what, formula, fold = rng.choice(
        [
            ("the sum", "sum(kept)", sum),
            ("the largest", "max(kept)", max),
            ("the smallest", "min(kept)", min),
            ("the sum of the squares", "sum(n * n for n in kept)", lambda s: sum(n * n for n in s)),
        ]
    )

    def one(numbers: list[int], separators: str) -> dict:
        chosen = [n for n in numbers if kept(n)]
        text = "".join(f"{n}{rng.choice(separators)}" for n in numbers)
        return case(["python3", f"{name}.py"], f"{fold(chosen) if chosen else 'none'}\n", stdin=text)

    def some(count: int, low: int = -60, high: int = 60) -> list[int]:
        return [rng.randint(low, high) for _ in range(count)]

    left_out = [n for n in range(-60, 61) if not kept(n)]
    return program_draft(
        f"Write a Python program {name}.py that reads whole numbers from stdin, separated by spaces and line "
        f"breaks, and prints {what} of those that are {which}. If there is none of them, it prints the word none.",
        program=f"{name}.py",
        source=template("number-fold/solve.py", condition=condition, formula=formula),
        mistakes={
            "first-line-only": ("sys.stdin.read()", "sys.stdin.readline()"),
            "the-others": (f"if {condition}]", f"if not ({condition})]"),
            "zero-for-none": ('"none"', "0"),
        },
        groups={
            "one_line": [one(some(rng.randint(6, 12)), " ") for _ in range(3)],
            "many_lines": [one([*rng.sample(left_out, 2), *some(9)], "\n") for _ in range(3)],
            "large": [one(some(300, -(10**12), 10**12), " \n") for _ in range(2)],
            "nothing_left": [one(rng.sample(left_out, 4), " \n"), one([], " ")],
        },
    )


Interval = tuple[str, Fraction, Fraction, str]


def _merged(intervals: list[Interval]) -> list[Interval]:
    """The union, by looking at every end point and every gap between two of them."""
    points = sorted({p for _, low, high, _ in intervals for p in (low, high)})
    places = sorted([*points, *((a + b) / 2 for a, b in pairwise(points))])

    def covered(x: Fraction) -> bool:
        return any(
            (low < x or (low == x and left == "[")) and (x < high or (x == high and right == "]"))
            for left, low, high, right in intervals
        )

    result, start = [], None
    for k, x in enumerate(places):
        end_point = k % 2 == 0  # end points and gaps take turns
        if covered(x) and start is None:
            start = ("[", x) if end_point else ("(", places[k - 1])
        if start and (k + 1 == len(places) or not covered(places[k + 1])) and covered(x):
            result.append((*start, x if end_point else places[k + 1], "]" if end_point else ")"))
            start = None
    return result


@generator("interval-union", level=4)
def interval_union(rng: random.Random) -> TerminalDraft:
    """Write a program that computes the union of intervals with open and closed ends, in exact fractions."""
    name, label = rng.sample(WORDS, 2)
    code = rng.randint(3, 9)

    def show(x: Fraction) -> str:
        decimal = f"{float(x):.6f}".rstrip("0").rstrip(".")
        return decimal if rng.random() < 0.4 and Fraction(decimal) == x else str(x)

    def one(intervals: list[Interval]) -> dict:
        lines = []
        for left, low, high, right in intervals:
            gap = rng.choice(["", " "])
            lines += [f"{left}{gap}{show(low)}, {show(high)}{gap}{right}" + rng.choice(["", "", "  # note"])]
            lines += rng.choice([[], [], [""], ["# more"]])
        united = _merged(intervals)
        total = sum((high - low for _, low, high, _ in united), Fraction())
        out = "".join(f"{left}{low}, {high}{right}\n" for left, low, high, right in united) + f"{label} {total}\n"
        return case(["python3", f"{name}.py"], out, stdin="\n".join(lines) + "\n")

    def drawn(count: int, denominators: list[int], span: int) -> list[Interval]:
        made = []
        for _ in range(count):
            low = Fraction(rng.randint(-span, span), rng.choice(denominators))
            high = low + Fraction(rng.randint(1, span), rng.choice(denominators))
            made.append((rng.choice("[("), low, high, rng.choice("])")))
        return made

    def touching(ends: str) -> list[Interval]:
        x = Fraction(rng.randint(1, 40), rng.choice([3, 7, 10]))
        pair: list[Interval] = [("[", x - 2, x, ends[0]), (ends[1], x, x + 1, ")")]
        return pair if rng.random() < 0.5 else pair[::-1]

    a = Fraction(rng.randint(1, 9))
    return program_draft(
        f"Write a Python program {name}.py that reads intervals from stdin, one per line, such as `[1/3, 2)`, "
        "`(-0.5,4]` or `[2, 2]`; `[` and `]` include the end point, `(` and `)` leave it out. Numbers are whole, "
        "decimal or fractions and are exact; spaces do not matter; `#` starts a comment; blank lines are skipped. "
        "Print the union as the fewest possible intervals, lowest first, one per line, written `[1/3, 2)`, with "
        "each number whole or as a fraction in lowest terms such as -7/2. Intervals without any number in them, "
        f"such as (1, 1], are not printed. After them print `{label} T`, where T is the total length, written the "
        "same way. If some line has its ends in the wrong order (`[2, 1]`), print nothing on stdout and exit with "
        f"status {code}.",
        program=f"{name}.py",
        source=template("interval-union/solve.py", code=code, label=label),
        mistakes={
            "rounds": ("Fraction(number) for", "Fraction(number).limit_denominator(1000) for"),
            "touching-apart": ("start <= union", "start < union"),
            "prints-empty": ("if start < end", "if start <= end"),
        },
        groups={
            "whole": [one(drawn(rng.randint(3, 7), [1], 20)) for _ in range(2)],
            "exact": [one(drawn(6, [1, 3, 10, 997, 1009, 65536], 4000)) for _ in range(3)],
            "touching": [one(touching(ends)) for ends in ("](", ")[", ")(", "][")],
            "empty": [
                one([("(", a, a, "]"), ("[", a + 2, a + 2, "]"), ("[", a + 1, a + 1, ")")]),
                one([("(", a, a, ")"), ("(", a, a + 1, ")"), ("[", a + 1, a + 1, ")")]),
            ],
            "wrong_order": [
                case(["python3", f"{name}.py"], "", stdin=f"[0, 1]\n(1/3, {low}]\n[4, 5)\n", code=code)
                for low in ("0.3", "-1")
            ],
        },
    )


def _plan(rules: dict[str, list[str]], target: str, changed: list[str]) -> list[str]:
    """The targets to build, by repeated marking."""
    needed, affected, size = {target}, set(changed), -1
    while size != (size := len(needed) + len(affected)):
        needed |= {d for name in needed for d in rules.get(name, [])}
        affected |= {name for name, deps in rules.items() if affected & set(deps)}
    left = [name for name in rules if name in needed and (not changed or name in affected)]
    order = []
    while left:
        ready = [name for name in left if not set(rules[name]) & set(left)]
        order.append(ready[0])
        left.remove(ready[0])
    return order


@generator("build-plan", level=4)
def build_plan(rng: random.Random) -> TerminalDraft:
    """Write a program that finds what must be rebuilt, and in which order."""
    name, rules_file, *w = rng.sample(WORDS, 40)
    loop, unknown = rng.sample(range(3, 10), 2)

    def rules_of(size: int) -> dict[str, list[str]]:
        names, sources = rng.sample(w, size), [f"{word}.c" for word in rng.sample(w, 5)]
        rules = {}
        for k, target in enumerate(names):
            rules[target] = [*rng.sample(names[k + 1 :], min(rng.randint(1, 3), size - k - 1)), rng.choice(sources)]
        order = list(rules)
        rng.shuffle(order)
        return {target: rules[target] for target in order}

    def text_of(rules: dict[str, list[str]], *, fancy: bool) -> str:
        first, later = [], []
        for target, deps in rules.items():
            if fancy and len(deps) > 2:
                first.append(f"{target}: {deps[0]} \\\n    {deps[1]}  # and more below")
                later.append(f"{target}:{' '.join(deps[2:])}")
            else:
                first.append(f"{target} : {' '.join(deps)}")
        return "# rules\n" + "\n".join(first) + "\n\n" + "".join(line + "\n" for line in later)

    def one(size: int, *, fancy: bool = False, changes: int = 0, top: bool = True) -> dict:
        while True:  # until a change reaches a target through another one
            rules = rules_of(size)
            everything = sorted({d for deps in rules.values() for d in deps} | set(rules))
            target = max(rules, key=lambda t: len(_plan(rules, t, []))) if top else rng.choice(sorted(rules))
            changed = rng.sample(everything, changes)
            plan = _plan(rules, target, changed)
            if not changes or any(not {t, *rules[t]} & set(changed) for t in plan):
                break
        argv = ["python3", f"{name}.py", "box/rules.txt", target, *changed]
        out = "\n".join(plan) if plan else "nothing to do"
        return case(argv, out + "\n", files={"box/rules.txt": text_of(rules, fancy=fancy)})

    def special(target: str, out: str, code: int) -> dict:
        a, b, c, d, e = w[:5]
        text = f"{a}: {b} x.c\n{b}: {c}\n{c}: {d} {b}\n{d}: x.c\n{e}: {d} {e}.c\n"
        return case(["python3", f"{name}.py", "rules.txt", target], out, code=code, files={"rules.txt": text})

    return program_draft(
        f"Write a Python program {name}.py, called as `python3 {name}.py RULES TARGET [CHANGED ...]`. RULES is a "
        "file with lines `target: dependency dependency ...` (spaces around the colon or not). `#` starts a "
        "comment, a backslash at the end of a line joins it with the next, and several lines for one target add "
        "up. Names that are never a target are source files.\n"
        "Print the targets that must be built for TARGET, one per line: TARGET itself and every target that it "
        "depends on, directly or not; if CHANGED names are given, only those of them that are changed themselves "
        "or depend, directly or not, on a changed name. A target comes after all of its dependencies that are "
        "printed too; whenever several could come next, the one that appears as a target first in the file does. "
        "If nothing must be built, print `nothing to do`.\n"
        "If targets needed for TARGET depend on themselves, directly or not, print `cycle:` and these targets, "
        f"sorted, on one line with single spaces, and exit with status {loop}. If TARGET is neither a target nor a "
        f"dependency in the file, print `unknown: TARGET` and exit with status {unknown}. See {rules_file}.txt for "
        "an example of RULES.",
        program=f"{name}.py",
        source=template("build-plan/solve.py", unknown=unknown, loop=loop),
        mistakes={
            "last-rule-wins": (
                "deps.setdefault(head.strip(), []).extend(tail.split())",
                "deps[head.strip()] = tail.split()",
            ),
            "direct-changes-only": (
                "(below(name) | {name}) & set(changed)",
                "(set(deps[name]) | {name}) & set(changed)",
            ),
            "whole-file": ("if name in below(target) | {target}]", "]"),
        },
        groups={
            "order": [one(8), one(14), one(20, top=False)],
            "syntax": [one(10, fancy=True), one(14, fancy=True)],
            "changed": [one(14, changes=1), one(14, changes=2), one(20, changes=1, fancy=True)],
            "errors": [
                special(w[0], f"cycle: {' '.join(sorted(w[1:3]))}\n", loop),
                special(w[5], f"unknown: {w[5]}\n", unknown),
                special(w[4], f"{w[3]}\n{w[4]}\n", 0),
                special("x.c", "nothing to do\n", 0),
            ],
        },
        inputs={f"{rules_file}.txt": text_of(rules_of(6), fancy=True)},
    )


class StrayMark(Exception):
    """Raised if a damaged record contains the byte that starts records. The caller draws again."""


class _Recorder:
    """Writes the record format of ``record-decode`` and notes what a reader must print."""

    def __init__(self, magic: bytes, *, big: bool) -> None:
        self.order: Literal["big", "little"] = "big" if big else "little"
        self.blob, self.lines = magic + bytes([1, big]), list[str]()
        self.names: dict[int, str] = {}
        self.time = 0

    @staticmethod
    def varint(value: int) -> bytes:
        out = b""
        while value > 127:
            out, value = out + bytes([value & 127 | 128]), value >> 7
        return out + bytes([value])

    def record(self, kind: int, body: bytes) -> bytes:
        inner = bytes([kind]) + self.varint(len(body)) + body
        return b"\xa5" + inner + (zlib.crc32(inner) & 0xFFFF).to_bytes(2, self.order)

    def define(self, number: int, name: str) -> None:
        self.names[number] = name
        self.blob += self.record(1, self.varint(number) + name.encode())

    def sample_record(self, number: int, delta: int, value: int) -> bytes:
        zigzag = 2 * delta if delta >= 0 else -2 * delta - 1
        return self.record(2, self.varint(number) + self.varint(zigzag) + value.to_bytes(4, self.order, signed=True))

    def sample(self, number: int, delta: int, value: int) -> None:
        self.time += delta
        self.lines.append(f"sample {self.names.get(number, '?')} {self.time} {value}")
        self.blob += self.sample_record(number, delta, value)

    def text(self, number: int, text: str, *, inside: int | None = None) -> None:
        """A text record; ``inside`` puts it into the body of a damaged record, as a reader that looks on finds it."""
        record = self.record(3, self.varint(number) + text.encode())
        if inside is not None:
            self.lines.append(f"bad {len(self.blob)}")
            outer = self.record(inside, b"..." + record)
            record = outer[:-1] + bytes([outer[-1] ^ 0x50])
            if record.count(0xA5) != 2:
                raise StrayMark
        self.lines.append(f"text {self.names.get(number, '?')} {text}")
        self.blob += record

    def damaged(self, record: bytes, keep: int | None = None) -> None:
        """A record with one wrong bit, or cut off after ``keep`` bytes."""
        self.lines.append(f"bad {len(self.blob)}")
        record = record[:keep] if keep else record[:-3] + bytes([record[-3] ^ 1]) + record[-2:]
        if record.count(0xA5) != 1:
            raise StrayMark
        self.blob += record


@generator("record-decode", level=5)
def record_decode(rng: random.Random) -> TerminalDraft:
    """Write a decoder for a binary format with checksums that continues after damaged records."""
    name, *w = rng.sample(WORDS, 30)
    magic = w.pop()[:4].upper().encode()
    code = rng.randint(3, 9)

    def delta() -> int:
        return rng.choice([rng.randint(0, 60), rng.randint(-3000, 3000), rng.randint(100_000, 9_000_000)])

    def value() -> int:
        return rng.choice([rng.randint(-100, 100), rng.randint(-(2**31), 2**31 - 1)])

    def recording(*, big: bool = False, count: int = 8) -> _Recorder:
        made = _Recorder(magic, big=big)
        for number in range(3):
            made.define(number, rng.choice(w))
        for _ in range(count):
            made.sample(rng.randrange(3), delta(), value())
        made.text(rng.randrange(3), " ".join(rng.sample(w, 3)) + " é")
        return made

    def with_names() -> _Recorder:
        made = recording(count=2)
        made.sample(300, delta(), value())
        made.define(300, rng.choice(w))
        made.sample(300, delta(), value())
        made.define(1, rng.choice(w))
        made.text(1, " ".join(rng.choices(w, k=40)))
        made.blob += made.record(9, bytes(rng.choices(range(128), k=200)))
        made.sample(1, delta(), value())
        return made

    def with_damage(*, big: bool) -> _Recorder:
        made = recording(count=2, big=big)
        made.blob += b"\0\x01junk"
        made.sample(0, delta(), value())
        made.damaged(made.sample_record(1, 5000, 77))
        made.sample(2, delta(), value())
        made.text(1, rng.choice(w), inside=3)
        made.damaged(made.record(2, b"\1")[:2] + b"\xff\xff\xff\xff\xff\x01" + bytes(5))
        made.sample(0, delta(), value())
        return made

    def cut() -> _Recorder:
        made = recording(count=3)
        made.damaged(made.record(3, b"\1" + rng.choice(w).encode() * 3), keep=rng.choice([1, 2, 3, 9]))
        return made

    def one(make: _Recorder) -> dict:
        argv = ["python3", f"{name}.py", "data.bin"]
        return case(argv, "\n".join(make.lines) + "\n", files={"data.bin": "hex:" + make.blob.hex()})

    def clean(make: Callable[[], _Recorder]) -> _Recorder:
        while True:
            try:
                return make()
            except StrayMark:
                continue

    example = clean(lambda: with_damage(big=False))
    return program_draft(
        f"Write a Python program {name}.py; `python3 {name}.py FILE` decodes a recording and prints one line per "
        "event.\n\n"
        f"The file starts with the four bytes {magic.decode()}, a version byte (1) and a flags byte; if bit 0 of "
        "the flags is set, the fixed-width numbers (value, checksum) are big-endian, otherwise little-endian. If "
        "the file does not start with these four bytes and 1, print nothing on stdout and exit with status "
        f"{code}.\n"
        "Records follow: the mark 0xA5, a kind byte, the length of the body (varint), the body, and a checksum of "
        "2 bytes: the low 16 bits of the CRC-32 (as zlib's) of kind, length bytes and body. A varint has 7 bits "
        "per byte, lowest first, with bit 7 set on all bytes but its last; more than 5 bytes make the record bad.\n"
        "- kind 1, name: number (varint), then UTF-8 to the end of the body. From here on the number means this "
        "name.\n"
        "- kind 2, sample: name number (varint), milliseconds since the sample before it, or since 0 for the first "
        "(zigzag varint: 0, -1, 1, -2, ... are 0, 1, 2, 3, ...), value (signed, 4 bytes). Print `sample NAME TIME "
        "VALUE`, where TIME is the sum so far.\n"
        "- kind 3, text: name number (varint), UTF-8 to the end of the body. Print `text NAME TEXT`.\n"
        "- other kinds: skip the record in silence.\n"
        "NAME is ? for a number without a name. Bytes before a mark are skipped in silence. If what starts at a "
        "mark is no whole record with the right checksum, print `bad OFFSET` (of the mark, from the start of the "
        "file, decimal), forget it altogether, and look for the next mark from the very next byte on. sample.bin "
        "and sample.txt are an example.",
        program=f"{name}.py",
        source=template("record-decode/solve.py", magic=magic.decode(), code=code),
        mistakes={
            "little-endian-only": ('"big" if data[5] & 1 else "little"', '"little"'),
            "stops-at-damage": ("at += 1\n        continue", "break"),
            "no-zigzag": ("(delta >> 1) ^ -(delta & 1)", "delta"),
        },
        groups={
            "plain": [one(clean(recording)), one(clean(lambda: recording(count=40)))],
            "big_endian": [one(clean(lambda: recording(big=True)))],
            "names": [one(clean(with_names)), one(clean(with_names))],
            "damage": [one(clean(lambda: with_damage(big=False))), one(clean(lambda: with_damage(big=True)))],
            "cut_off": [one(clean(cut)), one(clean(cut))],
            "not_a_recording": [
                case(["python3", f"{name}.py", "data.bin"], "", code=code, files={"data.bin": "hex:" + blob.hex()})
                for blob in (b"NOPE" + example.blob[4:], magic + b"\2" + example.blob[5:])
            ],
        },
        inputs={"sample.bin": example.blob, "sample.txt": "\n".join(example.lines) + "\n"},
    )
