"""Family ``data``: tasks on CSV, JSON and SQLite files."""

from __future__ import annotations

import json
import random
from datetime import date, timedelta
from functools import partial

from clawgym.tasks.packs.seeded import WORDS, Generator, csv_text
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import TABLE_CHECK, TerminalDraft, python, replaced, template
from ._sqlite import database

DATA: dict[str, Generator[TerminalDraft]] = {}
generator = partial(_generator, family="data", into=DATA)


@generator("csv-total", level=2)
def csv_total(rng: random.Random) -> TerminalDraft:
    """Add up one column of a CSV file, found by its name."""
    source, target, key, *columns = rng.sample(WORDS, 6)
    names = rng.sample(WORDS, rng.randint(4, 6))
    while True:  # until no two columns have the same total
        table = [[rng.randint(2, 30) for _ in columns] for _ in names]
        totals = [sum(column) for column in zip(*table, strict=True)]
        if len(set(totals)) == 3:
            break
    place = rng.randrange(3)

    def total(field: int) -> str:
        return f"echo $(( $(tail -n +2 {source}.csv | cut -d, -f{field + 2} | paste -sd+) )) > {target}.txt"

    return TerminalDraft(
        instruction=f"Write the total of the column {columns[place]} in {source}.csv to {target}.txt.",
        inputs={
            f"{source}.csv": csv_text(
                [[key, *columns], *([name, *row] for name, row in zip(names, table, strict=True))]
            )
        },
        data={"path": f"{target}.txt", "total": totals[place], "totals": totals},
        solve=total(place),
        wrong={
            "next-column": total((place + 1) % 3),
            "counts-rows": f"tail -n +2 {source}.csv | wc -l > {target}.txt",
            "lists-values": f"tail -n +2 {source}.csv | cut -d, -f{place + 2} > {target}.txt",
        },
    )


def _money(cents: int) -> str:
    return f"{'-' * (cents < 0)}{abs(cents) // 100}.{abs(cents) % 100:02d}"


@generator("csv-join", level=3)
def csv_join(rng: random.Random) -> TerminalDraft:
    """Join customers and orders, and keep those without a counterpart."""
    people, orders, report, void, *w = rng.sample(WORDS, 20)
    ids = [9, 10, 101, *rng.sample(range(11, 100), 6)]
    shapes = ['{} "{}" & Co', "{}, {} and Sons", "{} {}", "The {} {}"]
    names = {i: shapes[k % 4].format(w[k].title(), w[k + 3].title()) for k, i in enumerate(ids)}
    idle, lines = ids[-2:], []
    for i in ids[:-2]:
        count = rng.randint(1, 4)
        lines += [(i, rng.choice(["paid", "paid", "open"]), rng.randint(100, 30_000)) for _ in range(count)]
        lines += [(i, "refund", -rng.randint(1, 99))] * rng.randint(0, 1)
    same = 40_000 + rng.randint(1, 9_000)  # 9 and 10 have equal totals, above most others
    lines = [line for line in lines if line[0] not in (9, 10)]
    lines += [(9, "paid", same), (10, "paid", same - 1_050), (10, "open", 1_050)]
    lines += [(rng.choice(ids), void, rng.randint(100, 9_000)) for _ in range(3)] + [(idle[0], void, 5_000)]
    strangers = [(200 + k, "paid", rng.randint(100, 900)) for k in range(3)]
    rng.shuffle(all_lines := lines + strangers)
    numbered = list(zip(rng.sample(range(5, 400), len(all_lines)), all_lines, strict=True))
    unmatched = sorted(number for number, (i, *_) in numbered if i not in names)
    rows = []
    for i in ids:
        own = [cents for j, status, cents in lines if j == i and status != void]
        rows.append((i, names[i], len(own), sum(own)))
    rows.sort(key=lambda row: (-row[3], row[0]))
    solve = python(template("csv-join/solve.py", people=people, orders=orders, void=void, report=report))
    return TerminalDraft(
        instruction=(
            f"{people}.csv lists customers, {orders}.csv their orders. Write output/{report}.csv with the header "
            "`customer,name,orders,total`: one row for every customer (those without orders too), with the number "
            "of orders and the total of their amounts with two decimals. Refunds count as orders with a negative "
            f"amount; orders with the status `{void}` do not count at all. Sort by total, highest first; equal totals "
            "by customer number, lowest first. Quote names as CSV needs it.\n"
            "Write output/unmatched.txt with the numbers of the orders whose customer is not listed, one per line, "
            "lowest first."
        ),
        inputs={
            f"{people}.csv": csv_text([["id", "name"], *([i, names[i]] for i in sorted(ids, key=str))]),
            f"{orders}.csv": csv_text(
                [
                    ["order", "customer", "status", "amount"],
                    *([number, i, status, _money(cents)] for number, (i, status, cents) in numbered),
                ]
            ),
        },
        data={
            "path": f"output/{report}.csv",
            "header": ["customer", "name", "orders", "total"],
            "rows": [[str(i), name, str(count), _money(cents)] for i, name, count, cents in rows],
            "unmatched": [str(number) for number in unmatched],
        },
        check=TABLE_CHECK + "\n" + template("csv-join/check.py"),
        solve=solve,
        wrong={
            "inner-join": replaced(solve, "list(customers)", "[i for i in customers if counts[i]]"),
            "sorts-ids-as-text": replaced(solve, "(-cents[i], int(i))", "(-cents[i], i)"),
            "counts-void": replaced(solve, f'elif row["status"] != "{void}":', "else:"),
        },
    )


@generator("json-tree", level=3)
def json_tree(rng: random.Random) -> TerminalDraft:
    """Sum up a tree of units; a person can be in several of them."""
    root, source, report, *w = rng.sample(WORDS, 20)
    staff = [{"id": n, "pay": rng.randint(20, 90) * 100} for n in rng.sample(range(100, 999), 16)]

    def unit(name: str, depth: int) -> dict:
        units = [unit(next(names), depth - 1) for _ in range(rng.randint(1, 3) if depth else 0)]
        return {"name": name, "people": rng.sample(staff, rng.randint(0, 3)), "units": units}

    def visit(node: dict, above: str) -> dict[int, int]:
        path = above + node["name"]
        found = {p["id"]: p["pay"] for p in node["people"]}
        for below in node["units"]:
            found |= visit(below, path + "/")
        expected[path] = [len(found), sum(found.values())]
        return found

    while True:  # until there are units of three sizes
        names, expected = iter(w), {}
        tree = unit(root, 2)
        leaf = tree["units"][0]["units"][0]
        leaf["people"] = list({p["id"]: p for p in [staff[0], *leaf["people"]]}.values())
        tree["people"] = [staff[0]]  # sits in two units: counts once in the root
        visit(tree, "")
        sizes = sorted({people for people, _ in expected.values()})
        if len(sizes) >= 3:
            break
    few = sizes[len(sizes) // 2]
    solve = python(template("json-tree/solve.py", source=source, report=report, few=few))
    return TerminalDraft(
        instruction=(
            f"{source}.json holds a tree of units: each has a name, people (id and pay) and units below it. Write "
            f"output/{report}.json: an object that has for every unit, under its path of names from the root such as "
            f"`{root}/{tree['units'][0]['name']}`, an object with `people`, the number of different people (by id) "
            "in the unit or anywhere below it, and `pay`, the sum of their pay, each of them once.\n"
            f"Write output/small.txt: the paths of the units with fewer than {few} people so counted, one per line, "
            "sorted in byte order."
        ),
        inputs={f"{source}.json": json.dumps(tree, indent=2) + "\n"},
        data={
            "path": f"output/{report}.json",
            "units": expected,
            "small": sorted(path for path, (people, _) in expected.items() if people < few),
        },
        solve=solve,
        wrong={
            "own-people-only": replaced(solve, 'found.update(visit(below, path + "/"))', 'visit(below, path + "/")'),
            "counts-twice": replaced(
                solve,
                'found = {p["id"]: p["pay"] for p in unit["people"]}',
                'found = {(path, p["id"]): p["pay"] for p in unit["people"]}',
            ),
            "names-not-paths": replaced(solve, 'path = above + unit["name"]', 'path = unit["name"]'),
        },
    )


@generator("sqlite-report", level=3)
def sqlite_report(rng: random.Random) -> TerminalDraft:
    """Report the sales of a month from a database with NULLs and times of day."""
    shop, report, *w = rng.sample(WORDS, 24)
    year, month = rng.randint(2015, 2024), rng.choice([1, 3, 5, 7, 8, 10, 12])
    first = date(year, month, 1)
    kinds = list(enumerate(w[:5], 1))
    items = [(n, n % 4 + 1, name, rng.randint(90, 4_000)) for n, name in enumerate(w[5:17], 1)]
    sales = []
    for n in range(1, 61):
        day = first + timedelta(days=rng.randint(-12, 42))
        clock = f" {rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        discount, returned = rng.choice([None, None, 0, 5, 10, 25]), rng.choice([None, 0, 0, 1])
        sales.append((n, rng.choice(items)[0], rng.randint(1, 9), discount, returned, f"{day}{clock}"))
    last = f"{year}-{month:02d}-31 2{rng.randint(0, 3)}:15"
    sales.append((61, items[0][0], 9, None, 0, last))
    sales.append((62, items[1][0], 9, 10, None, f"{first} 00:00"))
    price = {n: (kind, cents) for n, kind, _, cents in items}
    rows = []
    for number, name in kinds:
        own = [
            (qty, qty * price[item][1] * (100 - (discount or 0)) // 100, when[:10])
            for _, item, qty, discount, returned, when in sales
            if price[item][0] == number and returned != 1 and when[:7] == f"{year}-{month:02d}"
        ]
        rows.append((name, sum(q for q, _, _ in own), sum(c for _, c, _ in own), len({d for _, _, d in own})))
    rows.sort(key=lambda row: (-row[2], row[0]))
    blob, _ = database(
        {
            "kind": ("CREATE TABLE kind (id INTEGER PRIMARY KEY, name TEXT)", [(n, (None, name)) for n, name in kinds]),
            "item": (
                "CREATE TABLE item (id INTEGER PRIMARY KEY, kind INTEGER, name TEXT, cents INTEGER)",
                [(n, (None, *rest)) for n, *rest in items],
            ),
            "sale": (
                "CREATE TABLE sale (id INTEGER PRIMARY KEY, item INTEGER, qty INTEGER, discount INTEGER, returned "
                "INTEGER, sold_at TEXT)",
                [(n, (None, *rest)) for n, *rest in sales],
            ),
        }
    )
    solve = python(template("sqlite-report/solve.py", year=year, month=f"{month:02d}", shop=shop, report=report))
    return TerminalDraft(
        instruction=(
            f"{shop}.db is an SQLite database of sales (Python's sqlite3 can read it). Report {year}-{month:02d} in "
            f"output/{report}.csv with the header `kind,qty,revenue_cents,days` and one row for every kind, those "
            "without sales too (zeros): the pieces sold; the revenue, which is for each sale qty x cents less its "
            "discount in percent (none if NULL), rounded down to whole cents sale by sale; and on how many "
            "different days something was sold. The month includes all of its last day. Leave out returned sales "
            "(returned = 1; NULL means not returned). Sort by revenue, highest first, then by kind."
        ),
        inputs={f"{shop}.db": blob},
        data={
            "path": f"output/{report}.csv",
            "header": ["kind", "qty", "revenue_cents", "days"],
            "rows": [[str(cell) for cell in row] for row in rows],
        },
        check=TABLE_CHECK,
        solve=solve,
        wrong={
            "drops-null-returned": replaced(solve, "COALESCE(s.returned, 0) = 0", "s.returned = 0"),
            "drops-last-day": replaced(
                solve, f"s.sold_at < '{year}-{month:02d}-32'", f"s.sold_at <= '{year}-{month:02d}-31'"
            ),
            "inner-join": solve.replace("LEFT JOIN", "JOIN"),
        },
    )


@generator("csv-repair", level=4)
def csv_repair(rng: random.Random) -> TerminalDraft:
    """Make one clean table of three exports in different formats."""
    north, south, west, clean, code, *w = rng.sample(WORDS, 24)
    accents = ["café {}", "jalapeño {}", "5 € {}", "crème {}", "{} “best”", "smörgås {}"]
    ids = [f"{code[0].upper()}-{n}" for n in [9, 10, 100, *rng.sample([*range(11, 99)], 11)]]
    names = [accents[k % 6].format(w[k]) for k in range(14)]
    base = date(rng.randint(2019, 2024), 5, 1)

    def row(k: int, back: int = 0) -> tuple[str, str, int, date]:
        return ids[k], names[k], rng.randint(100_000, 5_000_000), base + timedelta(days=k % 11 - back)

    tables = {
        north: [row(k) for k in (0, 1, 2, 3, 4)] + [row(5, 7)],
        south: [row(k) for k in (5, 6, 7, 8, 9)] + [row(1, 3)],
        west: [row(k) for k in (10, 11, 12, 13)] + [row(6, 9), row(3, 0)],
    }
    best: dict[str, tuple[str, str, int, date]] = {}
    for rows in tables.values():
        for one in rows:
            if one[0] not in best or one[3] > best[one[0]][3]:
                best[one[0]] = one
        rng.shuffle(rows)
    expected = [best[i] for i in sorted(best, key=lambda i: int(i[2:]))]
    broken = {ids[2], ids[11]}  # names with a line break in them

    def comma(cents: int) -> str:
        return f"{cents // 100:,}.{cents % 100:02d}"

    def dotted(cents: int) -> str:
        return comma(cents).translate(str.maketrans(",.", ".,"))

    def named(one: tuple[str, str, int, date]) -> str:
        return one[1].replace(" ", "\r\n" if one[0] == ids[2] else "\n", 1) if one[0] in broken else one[1]

    head = ["id", "name", "amount", "updated"]
    first = csv_text([head, *([r[0], named(r), _money(r[2]), r[3]] for r in tables[north])], end="\r\n")
    second = csv_text([head, *([r[0], r[1], dotted(r[2]), f"{r[3]:%d.%m.%Y}"] for r in tables[south])], ";")
    third = csv_text([head, *([r[0], named(r), "$" + comma(r[2]), f"{r[3]:%m/%d/%Y}"] for r in tables[west])], "\t")
    third += "\tno id\t$1.00\t01/02/2024\n"
    solve = python(template("csv-repair/solve.py", north=north, south=south, west=west, clean=clean))
    return TerminalDraft(
        instruction=(
            f"Make one clean table output/{clean}.csv of three exports:\n"
            f"- {north}.csv: commas, UTF-8 with a byte order mark; amounts like 1234.50, dates like 2024-12-31\n"
            f"- {south}.csv: semicolons, Windows-1252; amounts like 1.234,50, dates like 31.12.2024\n"
            f"- {west}.tsv: tabs, UTF-16 with a byte order mark; amounts like $1,234.50, dates like 12/31/2024\n"
            "The clean table is UTF-8 without a byte order mark, has commas, the header `id,name,amount,updated`, "
            "amounts like 1234.50 and dates like 2024-12-31. A line break inside a name becomes one space. Rows "
            "without an id go. An id that occurs more than once is kept once, with the latest `updated`; among "
            f"equals the one of {north}.csv, then {south}.csv, then {west}.tsv. Sort by the number in the id "
            f"({ids[0]} before {ids[1]})."
        ),
        inputs={
            f"{north}.csv": b"\xef\xbb\xbf" + first.encode(),
            f"{south}.csv": second.encode("cp1252"),
            f"{west}.tsv": b"\xff\xfe" + third.encode("utf-16-le"),
        },
        data={
            "path": f"output/{clean}.csv",
            "header": head,
            "rows": [[i, name, _money(cents), str(day)] for i, name, cents, day in expected],
        },
        check=TABLE_CHECK,
        solve=solve,
        wrong={
            "latin-1": replaced(solve, '"cp1252"', '"latin-1"'),
            "last-file-wins": replaced(solve, "day > best", "day >= best"),
            "sorts-ids-as-text": replaced(solve, "int(i[2:])", "i"),
        },
    )


@generator("sqlite-recover", level=5)
def sqlite_recover(rng: random.Random) -> TerminalDraft:
    """Recover the rows of a table from a database whose first page is lost."""
    source, report, table, *w = rng.sample(WORDS, 30)
    ids = sorted(rng.sample(range(3, 30_000), 70))

    def row() -> tuple[None, str, int, str | None]:
        cents = rng.choice([0, 1, -1, 300, -40_000, 9_000_000, -(2**31) - 5, 2**45 + 7]) + rng.randint(0, 60)
        length = rng.choice([0, 0, 3, 5, 8, 40])
        return None, " ".join(rng.sample(w, 2)), cents, " ".join(rng.choices(w, k=length)) if length else None

    new = {i: row() for i in ids}
    long = rng.sample(ids, 3)
    for k, i in enumerate(long):
        new[i] = (None, new[i][1], new[i][2], " ".join(rng.choices(w, k=260 + 200 * k)))
    old = {i: row() for i in [*rng.sample(ids, 30), *rng.sample(range(30_001, 31_000), 6)]}
    sql = "CREATE TABLE {} (id INTEGER PRIMARY KEY, owner TEXT, cents INTEGER, note TEXT)"
    blob, roots = database(
        {
            table: (sql.format(table), sorted(new.items())),
            f"old_{table}": (sql.format(f"old_{table}"), sorted(old.items())),
        }
    )
    solve = python(template("sqlite-recover/solve.py", source=source, root=roots[table], report=report))
    everything = "[r for p in range(1, len(data) // size + 1) if data[(p - 1) * size] == 13 for r in walk(p)]"
    return TerminalDraft(
        instruction=(
            f"The first page (1024 bytes) of the SQLite 3 database {source}.db was overwritten with zeros; the rest "
            "is intact. The page size was 1024, with no reserved bytes, the text encoding UTF-8. The page that is "
            "lost held the schema. From a backup of it we know:\n\n"
            f"    {sql.format(table)}   -- root page {roots[table]}\n\n"
            "Other tables may have left pages that look alike. Recover all rows of this table, and only these, into "
            f"output/{report}.json: an array of objects with id, owner, cents and note (null where it is NULL), "
            "sorted by id."
        ),
        inputs={f"{source}.db": bytes(1024) + blob[1024:]},
        data={"path": f"output/{report}.json", "rows": [[i, *new[i][1:]] for i in ids]},
        solve=solve,
        wrong={
            "reads-every-leaf": replaced(solve, f"list(walk({roots[table]}))", everything),
            "no-overflow": replaced(solve, "while page:", "while False:"),
            "unsigned": replaced(
                solve, 'payload[body : body + width], "big", signed=True', 'payload[body : body + width], "big"'
            ),
        },
    )
