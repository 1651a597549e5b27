"""Family ``data``: questions about files in the folder of the interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

from clawgym.tasks.packs.seeded import WORDS, Generator, csv_text
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import ToolCallDraft, python
from ._start import day, euros

QUESTIONS: dict[str, Generator[ToolCallDraft]] = {}
generator = partial(_generator, family="data", into=QUESTIONS)

_END = "End with a line `Answer: ...` that holds the number and nothing else."


@generator("data-total", level=1)
def data_total(rng: random.Random) -> ToolCallDraft:
    """Add up one column over the rows of one kind."""
    name, *kinds = rng.sample(WORDS, 5)
    while True:
        rows = [
            [n, rng.choice(kinds), rng.randint(1, 9), rng.randint(100, 99_999)]
            for n in rng.sample(range(1, 999), rng.randint(40, 80))
        ]
        kind = rng.choice(kinds)
        chosen = [row for row in rows if row[1] == kind]
        total = sum(row[3] for row in chosen)
        weighted, everything = sum(row[2] * row[3] for row in chosen), sum(row[3] for row in rows)
        if len({total, weighted, everything, len(chosen) * 100}) == 4:
            break

    def code(value: str, condition: str) -> str:
        return (
            f'import csv\nrows = list(csv.DictReader(open("{name}.csv", newline="")))\n'
            f"print(sum({value} for row in rows if {condition}))"
        )

    amount, mine = 'round(float(row["amount"]) * 100)', f'row["kind"] == "{kind}"'
    return ToolCallDraft(
        instruction=f"{name}.csv lists sales. What is the total of the amounts of the kind {kind}, in cents? {_END}",
        inputs={
            f"{name}.csv": csv_text(
                [["number", "kind", "pieces", "amount"], *([n, k, p, euros(c)] for n, k, p, c in rows)]
            )
        },
        calls=[python(code(amount, mine))],
        answer=str(total),
        kind="number",
        wrong={
            "times-pieces": ([python(code(amount + ' * int(row["pieces"])', mine))], str(weighted)),
            "every-kind": ([python(code(amount, "True"))], str(everything)),
            "counts-rows": ([python(code("1", mine))], str(len(chosen))),
            "in-euros": ([python(code(amount, mine))], euros(total)),
        },
    )


_CHANGES: dict[str, tuple[str, str, Callable[[list[str], Any], list[str]]]] = {
    "sort": ("sort them", "sorted(words)", lambda words, _: sorted(words)),
    "sort-down": (
        "sort them from z to a",
        "sorted(words, reverse=True)",
        lambda words, _: sorted(words, reverse=True),
    ),
    "reverse": ("reverse their order", "words[::-1]", lambda words, _: words[::-1]),
    "first": ("keep the first {0}", "words[:{0}]", lambda words, n: words[:n]),
    "last": ("keep the last {0}", "words[-{0}:]", lambda words, n: words[-n:]),
    "skip": ("leave out the first {0}", "words[{0}:]", lambda words, n: words[n:]),
    "cut": ("leave out the last {0}", "words[:-{0}]", lambda words, n: words[:-n]),
    "without": (
        'leave out "{0}"',
        "[word for word in words if word != '{0}']",
        lambda words, one: [word for word in words if word != one],
    ),
    "add": ('add "{0}" at the end', "words + ['{0}']", lambda words, one: [*words, one]),
}
"""What can be done to a list of words: in words, in Python, and done."""
_OTHER = {"sort": "sort-down", "sort-down": "sort", "first": "last", "last": "first", "skip": "cut", "cut": "skip"}


@generator("data-words", level=2)
def data_words(rng: random.Random) -> ToolCallDraft:
    """Apply three or four changes to a list of words, in the given order."""
    count = rng.randint(3, 4)

    def changed(steps: list[tuple[str, Any]]) -> list[str]:
        return reduce(lambda words, step: _CHANGES[step[0]][2](words, step[1]), steps, start)

    def code(steps: list[tuple[str, Any]]) -> str:
        lines = [f"words = {_CHANGES[name][1].format(value)}\n" for name, value in steps]
        return f"words = open('{source}.txt').read().split()\n{''.join(lines)}print('Answer:', *words)"

    while True:  # until leaving out any change, mixing up the directions, or another order gives something else
        drawn: list[str] = rng.sample(WORDS, 9)
        source, new, *start = drawn
        values = {"without": rng.choice(start), "add": new}
        steps = [(name, values.get(name, rng.randint(2, 4))) for name in rng.sample(list(_CHANGES), count)]
        mixed = [(_OTHER.get(name, name), value) for name, value in steps]
        expected = changed(steps)
        wrong = [*(steps[:k] + steps[k + 1 :] for k in range(count)), mixed, steps[::-1]]
        if 1 < len(expected) < 5 and all(changed(some) != expected for some in wrong):
            break
    asked = ", ".join(_CHANGES[name][0].format(value) for name, value in steps)
    return ToolCallDraft(
        instruction=(
            f'Take the words of "{source}.txt": {asked}. Which words are left? End with a line `Answer: ...` that '
            "holds them in order, with a space between, and nothing else."
        ),
        inputs={f"{source}.txt": "\n".join(start) + "\n"},
        calls=[python(code(steps))],
        answer=" ".join(expected),
        kind="words",
        wrong={
            name: ([python(code(some))], " ".join(changed(some)))
            for name, some in (("stops-early", steps[:-1]), ("another-order", steps[::-1]), ("mixed-up", mixed))
        }
        | {"answers-without-acting": ([], " ".join(start[: len(expected)]))},
    )


@generator("data-join", level=2)
def data_join(rng: random.Random) -> ToolCallDraft:
    """Join two tables and find the largest total of a group."""
    customers, orders, *towns = rng.sample(WORDS, 8)
    void = rng.choice(("returned", "void", "cancelled"))
    while True:
        people = {n: rng.choice(towns) for n in rng.sample(range(100, 999), 14)}
        rows = [
            (n, rng.choice(list(people)), rng.choice(("paid", "paid", "paid", void)), rng.randint(500, 90_000))
            for n in rng.sample(range(1000, 9999), 60)
        ]
        largest = max(_by_town(people, [r for r in rows if r[2] != void]))
        with_void, single = max(_by_town(people, rows)), max(c for _, _, s, c in rows if s != void)
        smallest = min(_by_town(people, [r for r in rows if r[2] != void]))
        if len({largest, with_void, single, smallest}) == 4:
            break

    def code(condition: str, what: str = "max(totals.values())") -> str:
        return f"""
            import csv
            town = {{row["id"]: row["town"] for row in csv.DictReader(open("{customers}.csv", newline=""))}}
            totals = {{}}
            for row in csv.DictReader(open("{orders}.csv", newline="")):
                if {condition}:
                    key = town[row["customer"]]
                    totals[key] = totals.get(key, 0) + int(row["cents"])
            print({what})
            """

    counts = f'row["status"] != "{void}"'
    return ToolCallDraft(
        instruction=(
            f"{customers}.csv lists customers with their towns, {orders}.csv their orders. Orders with the status "
            f"{void} do not count. Add up the orders of all customers of each town: what is the largest total of a "
            f"town, in cents? {_END}"
        ),
        inputs={
            f"{customers}.csv": csv_text([["id", "town"], *([n, t] for n, t in sorted(people.items()))]),
            f"{orders}.csv": csv_text([["order", "customer", "status", "cents"], *map(list, rows)]),
        },
        calls=[python(code(counts))],
        answer=str(largest),
        kind="number",
        wrong={
            "counts-all-orders": ([python(code("True"))], str(with_void)),
            "smallest-for-largest": ([python(code(counts, "min(totals.values())"))], str(smallest)),
            "largest-order": ([], str(single)),
        },
    )


def _by_town(people: dict[int, str], rows: list[tuple[int, int, str, int]]) -> list[int]:
    totals: dict[str, int] = {}
    for _, customer, _, cents in rows:
        totals[people[customer]] = totals.get(people[customer], 0) + cents
    return list(totals.values())


@generator("data-sensors", level=3)
def data_sensors(rng: random.Random) -> ToolCallDraft:
    """Clean a log of measurements with repeats, gaps and two units, and find the daily maxima."""
    log, *sensors = rng.sample(WORDS, 4)
    days = [day(n) for n in range(-9, 0)]
    while True:
        rows: list[list[str]] = []
        kept: dict[tuple[str, str], int] = {}
        first: dict[tuple[str, str], int] = {}
        raw: dict[tuple[str, str], int] = {}
        for date in days:
            for hour in rng.sample(range(24), 4):
                for sensor in sensors:
                    key = (f"{date}T{hour:02d}:00", sensor)
                    for _ in range(rng.choice((1, 1, 1, 2))):
                        tenths = 2 * rng.randint(-50, 150)
                        fahrenheit = rng.random() < 0.3
                        shown = tenths * 9 // 5 + 320 if fahrenheit and tenths % 10 == 0 else tenths
                        unit = "F" if shown != tenths else "C"
                        rows.append([*key, _decimal(shown), unit])
                        kept[key], raw[key] = tenths, shown
                        first.setdefault(key, tenths)
                if rng.random() < 0.3:
                    rows.append([f"{date}T{hour:02d}:30", rng.choice(sensors), "n/a", "C"])
        sensor = rng.choice(sensors)
        sums = [_maxima(values, sensor) for values in (kept, first, raw)]
        if len(set(sums)) == 3 and all(value > 0 for value in sums):
            break

    def code(keep: str, convert: str) -> str:
        return f"""
            import csv
            from fractions import Fraction

            values = {{}}
            for row in csv.DictReader(open("{log}.csv", newline="")):
                if row["sensor"] == "{sensor}" and row["value"] != "n/a":
                    value = Fraction(row["value"])
                    if row["unit"] == "F":
                        value = {convert}
                    {keep}
            days = {{}}
            for time, value in values.items():
                days[time[:10]] = max(value, days.get(time[:10], value))
            print(sum(days.values()) * 10)
            """

    last, celsius = 'values[row["time"]] = value', "(value - 32) * Fraction(5, 9)"
    return ToolCallDraft(
        instruction=(
            f"{log}.csv holds measurements of sensors, in degrees Celsius (C) or Fahrenheit (F). Where a sensor has "
            "several rows for one time, only the last of them counts; `n/a` is no measurement. Take the highest "
            f"temperature that the sensor {sensor} measured on each day, in Celsius. What is the sum of these, in "
            f"tenths of a degree? {_END}"
        ),
        inputs={f"{log}.csv": csv_text([["time", "sensor", "value", "unit"], *rows])},
        calls=[python(code(last, celsius))],
        answer=str(sums[0]),
        kind="number",
        wrong={
            "keeps-the-first": ([python(code('values.setdefault(row["time"], value)', celsius))], str(sums[1])),
            "one-unit-only": ([python(code(last, "value"))], str(sums[2])),
            "in-degrees": ([python(code(last, celsius))], _decimal(sums[0])),
        },
    )


def _decimal(tenths: int) -> str:
    return f"{'-' * (tenths < 0)}{abs(tenths) // 10}.{abs(tenths) % 10}"


def _maxima(values: dict[tuple[str, str], int], sensor: str) -> int:
    days: dict[str, int] = {}
    for (time, name), tenths in values.items():
        if name == sensor:
            days[time[:10]] = max(tenths, days.get(time[:10], tenths))
    return sum(days.values())
