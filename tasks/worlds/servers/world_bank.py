"""A bank ledger: accounts, and what was booked between them."""

from __future__ import annotations

import sqlite3
from typing import Annotated, Any, ClassVar

from . import _text as check
from .clawgym_tools import ToolError

__all__ = ["Bank"]

_PAGE = 40


class Bank:
    """Amounts are whole cents. Transfers move money and never make any; deposits come from outside (``cash``)."""

    TABLES: ClassVar = {
        "accounts": "id TEXT PRIMARY KEY, owner TEXT NOT NULL, kind TEXT NOT NULL, "
        "balance_cents INTEGER NOT NULL, overdraft_cents INTEGER NOT NULL CHECK (overdraft_cents >= 0), "
        "CHECK (balance_cents >= -overdraft_cents)",
        "bookings": "id INTEGER PRIMARY KEY, day TEXT NOT NULL, source TEXT REFERENCES accounts, "
        "target TEXT NOT NULL REFERENCES accounts, cents INTEGER NOT NULL CHECK (cents > 0), memo TEXT NOT NULL, "
        "CHECK (source IS NOT target)",
    }
    TOOLS = ("list_accounts", "get_account", "statement", "transfer", "deposit")

    def __init__(self, db: sqlite3.Connection, today: str) -> None:
        self._db, self._today = db, today

    def list_accounts(self, owner: Annotated[str, "part of the owner's name; leave out for all"] = "") -> list[dict]:
        """Accounts with owner, kind, balance, and how far the balance may go below zero."""
        rows = self._db.execute("SELECT * FROM accounts WHERE instr(lower(owner), lower(?)) ORDER BY id", (owner,))
        return [_account(row) for row in rows]

    def get_account(self, account: Annotated[str, "its id"]) -> dict:
        """One account."""
        return self._account(account)

    def statement(
        self,
        account: Annotated[str, "its id"],
        first_day: Annotated[str, "YYYY-MM-DD"],
        last_day: Annotated[str, "YYYY-MM-DD, included"],
        offset: Annotated[int, "leave out so many"] = 0,
    ) -> dict:
        """What was booked on an account, oldest first; at most 40 at a time. Money that leaves it is negative."""
        self._account(account)
        if offset < 0:
            raise ToolError("offset must not be negative: call it again")
        where = "(source = ? OR target = ?) AND day BETWEEN ? AND ?"
        values = (account, account, check.date(first_day, "first_day"), check.date(last_day, "last_day"))
        rows = self._db.execute(
            f"SELECT id, day, source, target, cents, memo FROM bookings WHERE {where} ORDER BY day, id "
            f"LIMIT {_PAGE} OFFSET ?",
            (*values, offset),
        ).fetchall()
        (number,) = self._db.execute(f"SELECT count(*) FROM bookings WHERE {where}", values).fetchone()
        found = []
        for booking, day, source, target, cents, memo in rows:
            other, signed = (target, -cents) if source == account else (source or "cash", cents)
            found.append({"id": booking, "day": day, "other": other, "cents": signed, "memo": memo})
        return {"bookings": found, "more": max(0, number - offset - len(rows))}

    def transfer(
        self,
        source: Annotated[str, "account id"],
        target: Annotated[str, "account id"],
        cents: Annotated[int, "the amount, in cents"],
        memo: str,
    ) -> dict:
        """Move money from one account to another, today."""
        giver = self._account(source)
        self._account(target)
        if source == target:
            raise ToolError("source and target are the same account: name two")
        room = giver["balance_cents"] + giver["overdraft_cents"]
        if check.amount(cents, "cents") > room:
            raise ToolError(f"account {source} can give {room} cents at most, not {cents}: nothing is booked")
        self._db.execute("UPDATE accounts SET balance_cents = balance_cents - ? WHERE id = ?", (cents, source))
        return self._book(source, target, cents, memo)

    def deposit(
        self, target: Annotated[str, "account id"], cents: Annotated[int, "the amount, in cents"], memo: str
    ) -> dict:
        """Pay cash into an account, today."""
        self._account(target)
        return self._book(None, target, check.amount(cents, "cents"), memo)

    def _book(self, source: Any, target: str, cents: int, memo: str) -> dict:
        self._db.execute("UPDATE accounts SET balance_cents = balance_cents + ? WHERE id = ?", (cents, target))
        made = self._db.execute(
            "INSERT INTO bookings (day, source, target, cents, memo) VALUES (?, ?, ?, ?, ?)",
            (self._today, source, target, cents, check.text(memo, "memo", 140)),
        ).lastrowid
        return {"id": made}

    def _account(self, account: str) -> dict[str, Any]:
        row = self._db.execute("SELECT * FROM accounts WHERE id = ?", (account,)).fetchone()
        if row is None:
            raise ToolError(f"there is no account {account[:40]!r}: see list_accounts")
        return _account(row)


def _account(row: tuple) -> dict[str, Any]:
    return dict(zip(("id", "owner", "kind", "balance_cents", "overdraft_cents"), row))
