"""Family ``mail``: mails to sort, to answer and to compare."""

from __future__ import annotations

import random
from functools import partial

from clawgym.tasks.packs.seeded import WORDS, Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import TODAY, ToolCallDraft, call
from ._start import day, euros, mailbox, people

MAIL: dict[str, Generator[ToolCallDraft]] = {}
generator = partial(_generator, family="mail", into=MAIL)

_PARTS = ("mail",)


def _tables(box: dict) -> dict:
    return {table: rows for table, rows in box.items() if table != "numbers"}


@generator("mail-label", level=1)
def mail_label(rng: random.Random) -> ToolCallDraft:
    """Label and archive the mails of one person."""
    group = people(rng, 6)
    (name, sender), (_, twin) = group[:2]
    label, *words = rng.sample(WORDS, 7)
    mails = [(sender, "inbox", n * 2, f"News of the {w}", f"Please look at the {w}.") for n, w in enumerate(words[:3])]
    mails += [
        (twin, "inbox", 3, f"News of the {words[3]}", "Please look at it."),
        (sender, "archive", 9, "Old", "Done."),
    ]
    rng.shuffle(mails)
    box = mailbox(rng, group[1:], mails)
    box["contacts"] = sorted([address, who] for who, address in group)
    numbers = dict(zip(box["numbers"], mails, strict=True))
    mine = [n for n, m in numbers.items() if m[:2] == (sender, "inbox")]
    twins = [n for n, m in numbers.items() if m[0] == twin]
    # Whatever else the other person of that first name wrote is noise as well.
    both = [step for n in mine for step in (call("label_mail", mail=n, label=label), call("archive_mail", mail=n))]
    return ToolCallDraft(
        instruction=(
            f"Put the label {label} on every mail from {name} that is in the inbox, and move these mails to the "
            "archive."
        ),
        parts=_PARTS,
        start=_tables(box),
        calls=[call("list_contacts"), call("search_mails", words=sender), *both],
        wrong={
            "labels-only": ([step for step in both if step["name"] == "label_mail"], ""),
            "forgets-one": (both[2:], ""),
            "the-other-one-too": ([*both, call("label_mail", mail=twins[0], label=label)], ""),
            "answers-without-acting": ([], ""),
        },
    )


@generator("mail-invoice", level=2)
def mail_invoice(rng: random.Random) -> ToolCallDraft:
    """Send on the number, amount and date of the newer of two invoices."""
    group = people(rng, 7)
    (_, sender), (book, bookkeeper) = group[2], group[3]
    thing, other = rng.sample(WORDS, 2)
    name = group[2][0]
    numbers = rng.sample(range(1000, 9999), 3)
    cents = rng.sample(range(1_000, 90_000), 3)
    due = [day(n) for n in rng.sample(range(10, 40), 3)]

    def letter(k: int, what: str) -> str:
        return f"Invoice {numbers[k]} for the {what}: {euros(cents[k])} EUR, due on {due[k]}."

    mails = [
        (sender, "inbox", 9, f"Invoice for the {thing}", letter(0, thing)),
        (sender, "inbox", 5, f"Invoice for the {other}", letter(1, other)),
        (sender, "inbox", 2, f"Invoice for the {thing}, corrected", letter(2, thing)),
    ]
    box = mailbox(rng, group, mails)
    old, foreign, new = box["numbers"]

    def send(k: int, to: str = bookkeeper) -> dict:
        body = f"Please pay {euros(cents[k])} EUR by {due[k]}."
        return call("send_mail", to=[to], subject=f"Invoice {numbers[k]}", body=body)

    return ToolCallDraft(
        instruction=(
            f"{name} sent invoices for the {thing}; only the newest of these counts. Send a mail to {book} with the "
            "subject `Invoice NUMBER` and the body `Please pay AMOUNT EUR by DATE.`, with number, amount and date as "
            f"the invoice gives them. Then archive all the mails with invoices for the {thing}."
        ),
        parts=_PARTS,
        start=_tables(box),
        calls=[
            call("list_contacts"),
            call("search_mails", words=f"Invoice for the {thing}"),
            *(call("read_mail", mail=n) for n in (old, new)),
            send(2),
            *(call("archive_mail", mail=n) for n in (old, new)),
        ],
        wrong={
            "the-old-invoice": ([send(0), *(call("archive_mail", mail=n) for n in (old, new))], ""),
            "wrong-recipient": ([send(2, sender), *(call("archive_mail", mail=n) for n in (old, new))], ""),
            "forgets-the-archive": ([send(2)], ""),
            "archives-too-much": ([send(2), *(call("archive_mail", mail=n) for n in (old, new, foreign))], ""),
        },
    )


@generator("mail-quotes", level=3)
def mail_quotes(rng: random.Random) -> ToolCallDraft:
    """Compare the newest quote of each supplier, and answer all suppliers."""
    group = people(rng, 8)
    thing, label = rng.sample(WORDS, 2)
    pieces = rng.randint(10, 90)
    suppliers = [address for _, address in group[2:6]]
    while True:
        offers = {s: (rng.randint(900, 1_500), rng.randint(1_000, 9_000)) for s in suppliers}
        old = (rng.randint(400, 600), 1_000)  # withdrawn, and cheaper than all
        totals = {s: pieces * piece + shipping for s, (piece, shipping) in offers.items()}
        best = min(totals, key=lambda s: totals[s])
        by_piece = min(offers, key=lambda s: offers[s][0])
        if best != by_piece and sorted(totals.values())[1] > totals[best]:
            break

    def quote(offer: tuple[int, int]) -> str:
        return f"The {thing} costs {euros(offer[0])} EUR a piece, and shipping is {euros(offer[1])} EUR in all."

    changed = rng.choice([s for s in suppliers if s != best])
    subject = f"Quote: {thing}"
    mails = [(changed, "inbox", 8, subject, quote(old))]
    mails += [(s, "inbox", 7 - k, subject, quote(offers[s])) for k, s in enumerate(rng.sample(suppliers, 4))]
    box = mailbox(rng, group, mails)
    newest = {m[0]: n for n, m in zip(box["numbers"], mails, strict=True)}
    cheap = box["numbers"][0]

    def answers(winner: str, cents: int, chosen: int = 0) -> list:
        order = call("reply_mail", mail=chosen or newest[winner], body=f"We order {pieces} for {euros(cents)} EUR.")
        no = [call("reply_mail", mail=n, body="We chose another offer.") for s, n in newest.items() if s != winner]
        return [order, *no, *(call("label_mail", mail=n, label=label) for n in newest.values())]

    right = answers(best, totals[best])
    return ToolCallDraft(
        instruction=(
            f"Today is {TODAY}. Mails with the subject `{subject}` are offers for the {thing}; of each supplier only "
            f"the newest one counts. I need {pieces} pieces. Reply to the offer that is cheapest in all, shipping "
            f"included, with `We order {pieces} for TOTAL EUR.`, where TOTAL has two decimals, and to the other "
            f"offers that count with `We chose another offer.` Put the label {label} on every offer that counts."
        ),
        parts=_PARTS,
        start=_tables(box),
        code=True,
        calls=[
            call("search_mails", words=subject),
            *(call("read_mail", mail=n) for n in sorted((cheap, *newest.values()))),
            *right,
        ],
        wrong={
            "forgets-shipping": (answers(best, pieces * offers[best][0]), ""),
            "cheapest-piece": (answers(by_piece, totals[by_piece]), ""),
            "the-withdrawn-offer": (answers(changed, pieces * old[0] + old[1], cheap), ""),
            "forgets-a-label": (right[:-1], ""),
        },
    )
