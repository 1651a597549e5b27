"""The tables, the same on SQLite and PostgreSQL.

Rules: frequently used narrow columns come before wide ones. Every query that runs at each step has an index. Times are
seconds since 1970 by the clock of the database.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

__all__ = ["VERSION", "batches", "episodes", "groups", "images", "meta", "metadata", "turn_rewards", "turns"]

VERSION = 2
"""Version of the tables. Pools of other versions are refused."""

metadata = MetaData()
_KEY = BigInteger().with_variant(Integer, "sqlite")  # SQLite only numbers rows automatically for INTEGER

meta = Table(
    "clawgym_pool",
    metadata,
    Column("key", String, primary_key=True),
    Column("value", String, nullable=False),
)

groups = Table(
    "groups",
    metadata,
    Column("seq", _KEY, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    Column("channel", String, nullable=False),
    Column("task_id", String, nullable=False),
    Column("size", Integer, nullable=False),
    Column("members", Integer, nullable=False),
    Column("closed", Integer, nullable=False),
    Column("infra", Integer, nullable=False),
    Column("state", String, nullable=False),  # open, ready, leased, consumed, dropped
    Column("reason", String),  # why it was dropped
    Column("deadline", Float(53)),
    Column("opened_at", Float(53), nullable=False),
    Column("ready_at", Float(53)),
    Column("batch", _KEY),  # the last batch that contained it
    Index("groups_by_readiness", "channel", "state", "ready_at", "seq"),
    Index("groups_by_deadline", "state", "deadline"),
    Index("groups_by_batch", "batch"),
)

episodes = Table(
    "episodes",
    metadata,
    Column("seq", _KEY, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    Column("group_seq", _KEY, ForeignKey("groups.seq"), nullable=False),
    Column("channel", String, nullable=False),
    Column("state", String, nullable=False),  # open, closed
    Column("n_turns", Integer, nullable=False),
    Column("outcome", String),
    Column("cause", String),
    Column("reward", Float(53)),
    Column("trainable", Boolean),  # decided by curation; NULL: undecided
    Column("fate", String),  # delivered, or why not; NULL: not decided yet
    Column("opened_at", Float(53), nullable=False),
    Column("closed_at", Float(53)),
    Column("n_samples", Integer),
    Column("n_trained", BigInteger),
    Column("n_flawed", Integer),
    Column("rows", String),  # JSON: role -> [samples, trained ids, oldest policy version or null]
    Column("task_id", String, nullable=False),
    Column("task_hash", String, nullable=False),
    Column("sample", Integer, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("agent", String, nullable=False),
    Column("secret_sha256", String, nullable=False),
    Column("tags", String, nullable=False),
    Column("note", String, nullable=False),
    Column("meta", LargeBinary, nullable=False),
    Column("closing", LargeBinary),  # JSON: rewards, meta
    Index("episodes_by_group", "group_seq"),
    Index("episodes_by_task", "task_id", "seq"),
    Index("episodes_by_state", "state", "seq"),
    # Covers everything that stats sums up, so that it does not read the rows.
    Index("episodes_counted", "channel", "state", "outcome", "fate", "n_turns", "n_flawed", "n_samples", "n_trained"),
)

turns = Table(
    "turns",
    metadata,
    Column("episode_seq", _KEY, ForeignKey("episodes.seq"), primary_key=True, autoincrement=False),
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("parent", Integer),
    Column("policy_version", BigInteger),
    Column("n_sampled", Integer, nullable=False),
    Column("malformed_calls", Integer, nullable=False),
    Column("role", String, nullable=False),
    Column("finish_reason", String, nullable=False),
    Column("flaw", String),
    Column("digest", LargeBinary, nullable=False),
    Column("context_ids", LargeBinary, nullable=False),
    Column("sampled_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("document", LargeBinary, nullable=False),
)

turn_rewards = Table(
    "turn_rewards",
    metadata,
    Column("episode_seq", _KEY, ForeignKey("episodes.seq"), primary_key=True, autoincrement=False),
    Column("name", String, primary_key=True),
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("value", Float(53), nullable=False),
    Column("about", LargeBinary),  # JSON: provenance of the reward; NULL: none
)

images = Table(
    "images",
    metadata,
    Column("sha256", String, primary_key=True),
    Column("media_type", String, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

batches = Table(
    "batches",
    metadata,
    Column("seq", _KEY, primary_key=True, autoincrement=True),
    Column("consumer", String, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("channel", String, nullable=False),
    Column("roles", String, nullable=False),
    Column("state", String, nullable=False),  # leased, acked
    Column("lease_until", Float(53), nullable=False),
    Column("fetched_at", Float(53), nullable=False),
    Column("contents", LargeBinary, nullable=False),  # JSON: [[group seq, [episode seq, ...]], ...]
    UniqueConstraint("consumer", "step"),
    Index("batches_by_lease", "state", "lease_until"),
)
