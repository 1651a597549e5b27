"""Family ``files``: tasks on files and text."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta, timezone
from functools import partial

from clawgym.tasks.packs.seeded import WORDS, Generator, csv_text
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import TABLE_CHECK, TerminalDraft, python, replaced, template

FILES: dict[str, Generator[TerminalDraft]] = {}
generator = partial(_generator, family="files", into=FILES)


@generator("write-word", level=1)
def write_word(rng: random.Random) -> TerminalDraft:
    """Write one word to one file."""
    word, name = rng.sample(WORDS, 2)
    return TerminalDraft(
        instruction=f"Write the word {word} to the file {name}.txt.",
        data={"path": f"{name}.txt", "word": word},
        solve=f"echo {word} > {name}.txt",
        wrong={
            "swapped": f"echo {name} > {word}.txt",
            "upper-case": f"echo {word.upper()} > {name}.txt",
            "whole-sentence": f"echo the word {word} > {name}.txt",
        },
    )


@generator("file-op", level=1)
def file_op(rng: random.Random) -> TerminalDraft:
    """Rename, copy, move or extend one file."""
    a, b, other, extra = rng.sample(WORDS, 4)
    text, rest = (" ".join(rng.sample(WORDS, 3)) + "\n" for _ in range(2))
    what = rng.choice(["rename", "copy", "move", "append"])
    instruction, target, after, solve, wrong = {
        "rename": (
            f"Rename {a}.txt to {b}.txt.",
            f"{b}.txt",
            {f"{a}.txt": None},
            f"mv {a}.txt {b}.txt",
            [f"cp {a}.txt {b}.txt", f"mv {other}.txt {b}.txt", f"rm {a}.txt; echo {a} > {b}.txt"],
        ),
        "copy": (
            f"Copy {a}.txt to {b}.txt.",
            f"{b}.txt",
            {f"{a}.txt": text},
            f"cp {a}.txt {b}.txt",
            [f"mv {a}.txt {b}.txt", f"cp {other}.txt {b}.txt", f"mkdir {b}.txt; cp {a}.txt {b}.txt"],
        ),
        "move": (
            f"Move {a}.txt into a new folder {b}.",
            f"{b}/{a}.txt",
            {f"{a}.txt": None},
            f"mkdir {b}\nmv {a}.txt {b}",
            [f"mv {a}.txt {b}", f"mkdir {b}; cp {a}.txt {b}", f"mkdir {b}; mv *.txt {b}"],
        ),
        "append": (
            f"Add a line {extra} to the end of {a}.txt.",
            f"{a}.txt",
            {f"{a}.txt": text + extra + "\n"},
            f"echo {extra} >> {a}.txt",
            [f"echo {extra} > {a}.txt", f"echo {extra} >> {other}.txt", f"sed -i '1i {extra}' {a}.txt"],
        ),
    }[what]
    return TerminalDraft(
        instruction=instruction,
        inputs={f"{a}.txt": text, f"{other}.txt": rest},
        may_change=(f"{a}.txt", f"{other}.txt"),
        data={
            "target": target,
            "text": text + extra + "\n" if what == "append" else text,
            "after": after,
            "kept": {f"{other}.txt": rest},
        },
        solve=solve,
        wrong=dict(zip(["near-miss", "other-file", "wrong-place"], wrong, strict=True)),
    )


@generator("line-filter", level=1)
def line_filter(rng: random.Random) -> TerminalDraft:
    """Select the lines with a word and sort them."""
    word, source, target, *pool = rng.sample(WORDS, 40)
    matching = [" ".join(rng.sample([word, pool.pop()], 2)) for _ in range(rng.randint(3, 5))]
    matching.sort(reverse=True)
    if rng.random() < 0.5:
        matching.append(matching.pop(0))
    rest = [f"{pool.pop()} {pool.pop()}" for _ in range(rng.randint(4, 6))]
    lines = [*rest, *matching]
    order = sorted(rng.sample(range(len(lines)), len(matching)))
    for place, line in zip(order, matching, strict=True):
        lines.remove(line)
        lines.insert(place, line)
    return TerminalDraft(
        instruction=f"Write the lines of {source}.txt that contain {word} to {target}.txt, sorted.",
        inputs={f"{source}.txt": "\n".join(lines) + "\n"},
        data={"path": f"{target}.txt", "lines": sorted(matching)},
        solve=f"grep {word} {source}.txt | LC_ALL=C sort > {target}.txt",
        wrong={
            "not-sorted": f"grep {word} {source}.txt > {target}.txt",
            "inverted": f"grep -v {word} {source}.txt | LC_ALL=C sort > {target}.txt",
            "not-filtered": f"LC_ALL=C sort {source}.txt > {target}.txt",
        },
    )


_COMMANDS = {
    "keep": "grep {0}",
    "drop": "grep -v {0}",
    "sort": "LC_ALL=C sort",
    "sort-down": "LC_ALL=C sort -r",
    "reverse": "tac",
    "first": "head -n {0}",
    "last": "tail -n {0}",
    "count": "grep -c {0}",
}
"""A change of lines -> how bash makes it, with its word or number."""


def _changed(op: str, value: str | int, lines: list[str]) -> list[str]:
    """What one change leaves of the lines."""
    match op, value:
        case "keep" | "drop", str():
            return [line for line in lines if (value in line) == (op == "keep")]
        case "first", int():
            return lines[:value]
        case "last", int():
            return lines[-value:]
        case "count", str():
            return [str(sum(value in line for line in lines))]
        case _:
            return lines[::-1] if op == "reverse" else sorted(lines, reverse=op == "sort-down")


def _steps(ops: list[tuple[str, str | int]], start: list[str], *, chained: bool = True) -> list[list[str]]:
    """The lines after each step; without ``chained`` every step reads the start."""
    results, lines = [], start
    for op, value in ops:
        lines = _changed(op, value, lines if chained else start)
        results.append(lines)
    return results


@generator("text-steps", level=2)
def text_steps(rng: random.Random) -> TerminalDraft:
    """Write files in four or five steps, each of which reads the file of the step before."""
    say = {
        "sort": "{0} sorted",
        "sort-down": "{0} sorted from z to a",
        "reverse": "{0} with its lines reversed",
        "first": "the first {1} lines of {0}",
        "last": "the last {1} lines of {0}",
        "count": "the number of lines of {0} that contain {1}",
    }
    other = {"sort": "sort-down", "sort-down": "sort", "reverse": "sort", "first": "last", "last": "first"}
    while True:  # until reading f0.txt each time, or mixing up the directions, gives something else
        word, *pool = rng.sample(WORDS, 30)
        start = [
            " ".join(rng.sample([rng.choice([word, pool.pop()]), pool.pop()], 2)) for _ in range(rng.randint(6, 8))
        ]
        ops: list[tuple[str, str | int]] = [
            (op, rng.randint(3, 5))
            for op in rng.sample(["sort", "sort-down", "reverse", "first", "last"], rng.randint(3, 4))
        ]
        ops.append(("count", word))
        expected = _steps(ops, start)
        mixed = [(other.get(op, op), value) for op, value in ops]
        if expected[-1] != ["0"] and expected not in (_steps(ops, start, chained=False), _steps(mixed, start)):
            break

    def script(steps: list[tuple[str, str | int]], *, chained: bool = True) -> str:
        return "\n".join(
            f"{_COMMANDS[op].format(value)} f{k if chained else 0}.txt > f{k + 1}.txt"
            for k, (op, value) in enumerate(steps)
        )

    sentences = [f"Make f{k + 1}.txt: {say[op].format(f'f{k}.txt', value)}." for k, (op, value) in enumerate(ops)]
    return TerminalDraft(
        instruction=" ".join(sentences),
        inputs={"f0.txt": "\n".join(start) + "\n"},
        data={"steps": {f"f{k + 1}.txt": lines for k, lines in enumerate(expected)}},
        solve=script(ops),
        wrong={
            "stops-early": script(ops[:-1]),
            "always-from-f0": script(ops, chained=False),
            "mixed-up": script(mixed),
        },
    )


@generator("text-pipe", level=2)
def text_pipe(rng: random.Random) -> TerminalDraft:
    """Apply three or four changes to the lines of a file, in the given order."""
    say = {
        "keep": "keep the lines that contain {0}",
        "drop": "drop the lines that contain {0}",
        "sort": "sort them",
        "sort-down": "sort them from z to a",
        "reverse": "reverse their order",
        "first": "keep the first {0}",
        "last": "keep the last {0}",
    }
    other = {"keep": "drop", "sort": "sort-down", "first": "last"}
    other |= {b: a for a, b in other.items()}
    source, target = rng.sample(WORDS, 2)
    count = rng.randint(3, 4)
    while True:  # until leaving out any change, mixing up the directions, or another order gives something else
        words = rng.sample(WORDS, 14)
        start = [" ".join(rng.sample([rng.choice(words[:2]), rng.choice(words[2:])], 2)) for _ in range(9)]
        ops: list[tuple[str, str | int]] = [
            (op, rng.choice(words[:2]) if op in ("keep", "drop") else rng.randint(2, 5))
            for op in rng.sample(list(say), count)
        ]
        expected = _steps(ops, start)[-1]
        mixed = [(other.get(op, op), value) for op, value in ops]
        wrong = [*(ops[:k] + ops[k + 1 :] for k in range(len(ops))), mixed, ops[::-1]]
        if len(set(start)) == 9 and len(expected) > 1 and all(_steps(some, start)[-1] != expected for some in wrong):
            break

    def script(steps: list[tuple[str, str | int]]) -> str:
        first, *rest = [_COMMANDS[op].format(value) for op, value in steps]
        return " | ".join([f"{first} {source}.txt", *rest]) + f" > {target}.txt"

    sentences = ", ".join(say[op].format(value) for op, value in ops)
    return TerminalDraft(
        instruction=f"Take the lines of {source}.txt: {sentences}. Write the result to {target}.txt.",
        inputs={f"{source}.txt": "\n".join(start) + "\n"},
        data={"path": f"{target}.txt", "lines": expected},
        solve=script(ops),
        wrong={
            "stops-early": script(ops[:-1]),
            "another-order": script(ops[::-1]),
            "mixed-up": script(mixed),
        },
    )


@generator("tidy-inbox", level=3)
def tidy_inbox(rng: random.Random) -> TerminalDraft:
    """Sort files with awkward names into folders by the date in their text."""
    inbox, archive, *w = rng.sample(WORDS, 24)
    months = [f"20{rng.randint(19, 24)}-{rng.randint(1, 12):02d}" for _ in range(3)]
    plan = [  # (name, name in the archive, month or None, kind)
        (f"{w[0].title()} {w[1]} ({rng.randint(3, 9)}).TXT", None, months[0], "dated"),
        (f"-{w[2]}.md", f"{w[2]}.md", months[1], "dated"),
        (f"__{w[3]}--{w[4].upper()}!.Jpg", f"{w[3]}-{w[4]}.jpg", months[1], "dated"),
        (f"{w[5]}.{w[6].title()}.txt", f"{w[5]}-{w[6]}.txt", months[2], "dated"),
        (f"{w[7].title()}  {w[8].title()}.txt", f"{w[7]}-{w[8]}.txt", months[0], "same_name"),
        (f"{w[7]}-{w[8]}.TXT", f"{w[7]}-{w[8]}-2.txt", months[0], "same_name"),
        (f"{w[7]}_{w[8]}.txt", f"{w[7]}-{w[8]}-3.txt", months[0], "same_name"),
        (f"{w[9]}'s list.md", f"{w[9]}-s-list.md", None, "undated"),
        (f"{w[10]} & {w[11]}.txt", f"{w[10]}-{w[11]}.txt", "bad", "undated"),
    ]
    inputs, expected = {}, {}
    for k, (name, clean, month, kind) in enumerate(plan):
        if clean is None:
            clean = name.lower().replace(" (", "-").replace(")", "").replace(" ", "-")
        day = (
            f"{rng.choice(['2021', '2023'])}-02-{rng.choice([29, 30])}"
            if month == "bad"
            else f"{month}-{rng.randint(1, 28):02d}"
        )
        head = f"note: {w[12 + k]}\n" if month is None else f"date: {day}\n"
        text = head + " ".join(rng.sample(WORDS, 4)) + "\n"
        inputs[f"{inbox}/{name}"] = text
        folder = f"{archive}/{'undated' if month in (None, 'bad') else month}"
        expected[f"{folder}/{clean}"] = {"text": text, "kind": kind, "folder": folder}
    solve = python(template("tidy-inbox/solve.py", inbox=inbox, archive=archive))
    return TerminalDraft(
        instruction=(
            f"Move every file of the folder {inbox} to {archive}/YYYY-MM/NAME.EXT.\n"
            "- YYYY-MM comes from the first line of the file, `date: YYYY-MM-DD`. Without such a line, or with a "
            f"date that does not exist in the calendar, the folder is {archive}/undated.\n"
            "- EXT is what follows the last dot of the old name, in lower case. NAME is what stands before that "
            "dot, in lower case, with every run of characters other than a-z and 0-9 made one `-`, and no `-` at "
            "either end.\n"
            "- If several files get the same place, go through the old names in byte order (as `LC_ALL=C sort` "
            "does): the first keeps NAME.EXT, the next become NAME-2.EXT, NAME-3.EXT, and so on.\n"
            f"Do not change what is in the files; {inbox} ends up empty (or gone)."
        ),
        inputs=inputs,
        may_change=(f"{inbox}/*",),
        data={"inbox": inbox, "archive": archive, "expected": expected},
        solve=solve,
        wrong={
            "overwrites": replaced(solve, "while target in taken:", "while False:"),
            "single-characters": replaced(solve, 're.sub("[^a-z0-9]+", "-", stem)', 're.sub("[^a-z0-9]", "-", stem)'),
            "trusts-dates": replaced(
                solve,
                'folder = date(*map(int, match.groups())).strftime("%Y-%m")',
                "folder = match[1] + '-' + match[2]",
            ),
        },
    )


def _iso(ms: int, offset: int = 0) -> str:
    moment = datetime.fromtimestamp(ms / 1000, UTC).astimezone(timezone(timedelta(minutes=offset)))
    text = moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{ms % 1000:03d}"
    sign, away = "+-"[offset < 0], abs(offset)
    return text + (f"{sign}{away // 60:02d}:{away % 60:02d}" if offset else "Z")


@generator("log-correlate", level=5)
def log_correlate(rng: random.Random) -> TerminalDraft:
    """Merge three logs with different clocks, repeated lines and an hour that occurs twice."""
    report, *names = rng.sample(WORDS, 24)
    sites, requests = names[:3], [f"{name}-{rng.randint(10, 99)}" for name in names[3:20]]
    year = rng.randint(2018, 2024)
    change = int(datetime(year, 10, rng.randint(20, 28), 1, tzinfo=UTC).timestamp() * 1000)
    zones = {site: [(0, summer), (change, summer - 60)] for site, summer in zip(sites, (120, 60, -180), strict=True)}
    skew = {"w1": rng.randint(800, 4000), "w2": -rng.randint(800, 4000), "w3": 0}
    edge, worker, bills, rows, complete = [], [], [], [], 0

    events = iter(f"{number:06x}" for number in rng.sample(range(16**6), 400))

    def local_time(ms: int, site: str) -> str:
        offset = zones[site][ms >= change][1]
        local = datetime.fromtimestamp(ms // 1000 + offset * 60, UTC).strftime("%d.%m.%Y %H:%M:%S")
        return local + " B" * (change <= ms < change + 3_600_000)

    for k, request in enumerate(requests):
        site, host = rng.choice(sites), rng.choice(sorted(skew))
        first = change + rng.randint(-5_400_000, 5_000_000)
        if k == 0:  # at least one is certain to meet both a wrong clock and the second of the doubled hours
            first, host = change + rng.randint(300_000, 900_000), "w1"
        lacks = {3: "start", 7: "done", 11: "bill", 13: "edge"}.get(k)
        if lacks != "edge":
            for ms in [first] + [first + rng.randint(50, 900) for _ in range(rng.choice([0, 0, 1, 2]))]:
                offset = rng.choice([0, 0, 60, 120, -180, 330])
                edge.append(f"{_iso(ms, offset)} e{next(events)} req={request} site={site}")
        start = first + rng.randint(5_000, 9_000)
        done = start + rng.randint(2_000, 60_000)
        for what, ms in [("start", start), ("start", start + 700), ("done", done - 400), ("done", done)]:
            if what != lacks and (k % 3 == 0 or ms in (start, done)):
                line = {"id": f"k{next(events)}", "host": host, "ms": ms + skew[host], "req": request, "what": what}
                worker.append(json.dumps(line))
        cents = [rng.randint(100, 9_900) for _ in range(rng.choice([1, 1, 2]))]
        last = 0
        for value in cents if lacks != "bill" else []:
            last = max(last, (done + rng.randint(1_000, 600_000)) // 1000 * 1000 + 1000)
            bills.append([f"b{next(events)}", local_time(last, site), site, request, value])
            last += 1000
        if lacks is None:
            complete += 1
            rows.append([request, _iso(first), start - first, done - start, sum(cents), (last - 1000 - done) // 1000])
    duplicates = 0
    bills_text = [csv_text([row]).rstrip("\n") for row in bills]
    for lines in (edge, worker, bills_text):
        again = rng.sample(lines, 4)
        duplicates += len(again)
        lines += again
        rng.shuffle(lines)
    rows.sort(key=lambda row: (row[1], row[0]))
    zone_rows = [[site, _iso(since), offset] for site, periods in zones.items() for since, offset in periods]
    rng.shuffle(zone_rows)
    solve = python(template("log-correlate/solve.py", report=report))
    return TerminalDraft(
        instruction=(
            "Three logs tell of the same requests; put them together.\n\n"
            "- logs/edge.log: ISO time with its offset, event id, req=ID, site=SITE.\n"
            "- logs/worker.jsonl: `ms` is Unix time in milliseconds by the clock of `host`; clocks.json says by how "
            "many milliseconds each host's clock is ahead of the true time (negative: behind).\n"
            "- logs/billing.csv: `local_time` is DD.MM.YYYY HH:MM:SS at the site. zones.csv says from which UTC "
            "moment on which offset (minutes east of UTC) holds at a site. A local time that happens twice means "
            "the earlier moment, unless it ends in ` B`.\n\n"
            "The lines are in no order. A line whose event id (`id`) was seen before is a duplicate: ignore it, but "
            "count it. A request is complete if it has an edge event, a start, a done and a bill. It can have "
            "several of each.\n\n"
            f"Write output/{report}.csv with the header `req,edge_utc,queue_ms,work_ms,cents,billed_after_s` and one "
            "row per complete request: edge_utc is the earliest edge event as YYYY-MM-DDTHH:MM:SS.mmmZ; queue_ms "
            "runs from it to the first start; work_ms from the first start to the last done; cents is the sum of "
            "the bills; billed_after_s is from the last done to the last bill in whole seconds, rounded down. Sort "
            "by edge_utc, then req.\n"
            "Write output/summary.json: an object with the integers complete, incomplete (requests seen anywhere "
            "that are not complete), duplicates (lines ignored, all logs together) and total_cents (of the complete "
            "requests)."
        ),
        inputs={
            "logs/edge.log": "\n".join(edge) + "\n",
            "logs/worker.jsonl": "\n".join(worker) + "\n",
            "logs/billing.csv": "id,local_time,site,req,cents\n" + "\n".join(bills_text) + "\n",
            "clocks.json": json.dumps(skew) + "\n",
            "zones.csv": csv_text([["site", "from_utc", "offset_minutes"], *zone_rows]),
        },
        data={
            "path": f"output/{report}.csv",
            "header": ["req", "edge_utc", "queue_ms", "work_ms", "cents", "billed_after_s"],
            "rows": [[str(cell) for cell in row] for row in rows],
            "summary": {
                "complete": complete,
                "incomplete": len(requests) - complete,
                "duplicates": duplicates,
                "total_cents": sum(row[4] for row in rows),
            },
        },
        check=TABLE_CHECK + "\n" + template("log-correlate/check.py"),
        solve=solve,
        wrong={
            "ignores-clocks": replaced(solve, 'e["ms"] - skew[e["host"]]', 'e["ms"]'),
            "one-offset": replaced(
                solve,
                'return max(fits) if local.endswith(" B") else min(fits)',
                "return wall - sorted(zones[site])[0][1] * 60000",
            ),
            "keeps-duplicates": replaced(solve, "seen.add(event)", "pass"),
        },
    )
