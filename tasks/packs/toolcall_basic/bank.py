"""Family ``bank``: transfers between accounts."""

from __future__ import annotations

import random
from functools import partial

from clawgym.tasks.packs.seeded import WORDS, Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import TODAY, ToolCallDraft, call
from ._start import day, euros, ledger, people

BANK: dict[str, Generator[ToolCallDraft]] = {}
generator = partial(_generator, family="bank", into=BANK)

_PARTS = ("bank",)


def _account(accounts: list[list], owner: str, kind: str) -> str:
    return next(row[0] for row in accounts if row[1:3] == [owner, kind])


def _numbered(rng: random.Random, bookings: list[list]) -> list[list]:
    """Rows of ``bookings`` by day, numbered."""
    number = rng.randint(1_000, 5_000)
    return [[number + k, *row] for k, row in enumerate(sorted(bookings, key=lambda row: row[0]))]


@generator("bank-transfer", level=1)
def bank_transfer(rng: random.Random) -> ToolCallDraft:
    """Make one transfer between two people."""
    group = people(rng, 5)
    accounts = ledger(rng, group)
    giver, taker = group[0][0], group[2][0]
    twin = group[1][0]
    cents, memo = rng.randint(1_001, 99_999), " ".join(rng.sample(WORDS, 2))
    source, target = _account(accounts, giver, "checking"), _account(accounts, taker, "savings")

    def pay(a: str = source, b: str = target, c: int = cents) -> dict:
        return call("transfer", source=a, target=b, cents=c, memo=memo)

    return ToolCallDraft(
        instruction=(
            f"Transfer {euros(cents)} euros from the checking account of {giver} to the savings account of {taker}, "
            f"with the memo `{memo}`."
        ),
        parts=_PARTS,
        start={"accounts": accounts, "bookings": []},
        calls=[call("list_accounts", owner=giver), call("list_accounts", owner=taker), pay()],
        wrong={
            "wrong-amount": ([pay(c=cents * 100 if cents < 2_000 else cents // 100)], ""),
            "wrong-recipient": ([pay(b=_account(accounts, taker, "checking"))], ""),
            "wrong-payer": ([pay(a=_account(accounts, twin, "checking"))], ""),
            "twice": ([pay(), pay()], ""),
            "makes-money": ([call("deposit", target=target, cents=cents, memo=memo)], ""),
        },
    )


@generator("bank-refund", level=2)
def bank_refund(rng: random.Random) -> ToolCallDraft:
    """Find a payment that was made twice, and refund it."""
    group = people(rng, 6)
    accounts = ledger(rng, group)
    (buyer, _), (shop, _) = group[2], group[3]
    mine, theirs = _account(accounts, buyer, "checking"), _account(accounts, shop, "checking")
    bookings = []
    others = [row[0] for row in accounts if row[0] not in (mine, theirs)]
    for word in rng.sample(WORDS, 12):
        to = rng.choice([theirs, theirs, *others[:3]])
        bookings.append([day(-rng.randint(5, 30)), mine, to, rng.randint(500, 40_000), f"order {word}"])
    double = next(row for row in bookings if row[2] == theirs)
    # Alike in all but one thing: another day, another amount.
    near = [[day(-3), *double[1:]], [double[0], mine, theirs, double[3] + 100, double[4]]]
    numbered = _numbered(rng, [*bookings, list(double), *near])
    number = [row[0] for row in numbered if row[1:] == double][-1]

    def back(cents: int = double[3], memo: str = f"refund {number}", a: str = theirs, b: str = mine) -> dict:
        return call("transfer", source=a, target=b, cents=cents, memo=memo)

    return ToolCallDraft(
        instruction=(
            f"Today is {TODAY}. One payment of {buyer} from the checking account to the checking account of {shop} "
            "was booked twice: the same amount, on the same day, with the same memo. Send the money of the second "
            "booking (the one with the higher number) back the way it came, with the memo `refund NUMBER`, where "
            "NUMBER is that booking's."
        ),
        parts=_PARTS,
        start={"accounts": accounts, "bookings": numbered},
        calls=[
            call("list_accounts", owner=buyer),
            call("list_accounts", owner=shop),
            call("statement", account=mine, first_day=day(-40), last_day=TODAY),
            back(),
        ],
        wrong={
            "refunds-the-first": ([back(memo=f"refund {number - 1}")], ""),
            "wrong-amount": ([back(double[3] + 100)], ""),
            "pays-a-third-time": ([back(a=mine, b=theirs)], ""),
            "answers-without-acting": ([], ""),
        },
    )


@generator("bank-settle", level=3)
def bank_settle(rng: random.Random) -> ToolCallDraft:
    """Settle the costs that several people paid for a trip."""
    group = people(rng, 7)
    accounts = ledger(rng, group)
    friends = [name for name, _ in rng.sample(group[:6], 4)]
    shops = [_account(accounts, group[6][0], kind) for kind in ("checking", "savings")]
    trip, other = rng.sample(WORDS, 2)
    pot = f"P{rng.randint(1000, 9999)}"
    accounts.append([pot, "Common pot", "pot", rng.randint(10_000, 50_000), 0])
    own = {name: _account(accounts, name, "checking") for name in friends}
    while True:
        bookings, paid = [], dict.fromkeys(friends, 0)
        for _ in range(rng.randint(9, 13)):
            name, cents = rng.choice(friends), rng.randint(800, 30_000)
            paid[name] += cents
            bookings.append([day(-rng.randint(1, 20)), own[name], rng.choice(shops), cents, f"trip {trip}"])
        loose = [
            [day(-rng.randint(1, 20)), own[rng.choice(friends)], shops[0], rng.randint(800, 30_000), f"trip {other}"]
            for _ in range(4)
        ]
        total = sum(paid.values())
        if total % 4 == 0 and all(cents not in (0, total // 4) for cents in paid.values()):
            break
    with_loose = dict(paid)
    for _, source, _, cents, _ in loose:
        with_loose[next(n for n in friends if own[n] == source)] += cents

    def settle(paid: dict[str, int], share: int) -> list:
        owed = [(name, share - cents) for name, cents in sorted(paid.items())]
        memo = f"settle {trip}"
        gives = [call("transfer", source=own[n], target=pot, cents=c, memo=memo) for n, c in owed if c > 0]
        return [*gives, *(call("transfer", source=pot, target=own[n], cents=-c, memo=memo) for n, c in owed if c < 0)]

    right = settle(paid, total // 4)
    names = ", ".join(friends[:3])
    return ToolCallDraft(
        instruction=(
            f"Today is {TODAY}. {names} and {friends[3]} were on a trip together. What they paid for it from their "
            f"checking accounts, in the last 30 days, has the memo `trip {trip}`. Each of the four is to bear the "
            f"same share of it. Whoever paid less than a share transfers the difference to the account {pot} (the "
            "common pot); then whoever paid more gets the difference from it. Checking accounts only; every transfer "
            f"has the memo `settle {trip}`."
        ),
        parts=_PARTS,
        start={"accounts": accounts, "bookings": _numbered(rng, [*bookings, *loose])},
        code=True,
        calls=[
            call("list_accounts"),
            *(call("statement", account=own[n], first_day=day(-30), last_day=TODAY) for n in friends),
            call(
                "code_interpreter", code=f"paid = {paid!r}\n{{n: sum(paid.values()) // 4 - c for n, c in paid.items()}}"
            ),
            *right,
        ],
        wrong={
            "counts-another-trip": (settle(with_loose, sum(with_loose.values()) // 4), ""),
            "collects-only": ([step for step in right if step["arguments"]["target"] == pot], ""),
            "thirds": (settle(paid, total // 3), ""),
            "pays-too-much-by-a-cent": (
                [
                    *right[:-1],
                    {
                        **right[-1],
                        "arguments": {**right[-1]["arguments"], "cents": right[-1]["arguments"]["cents"] + 1},
                    },
                ],
                "",
            ),
        },
    )
