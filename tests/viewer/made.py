"""Made answers of the viewer, of every kind and in the shapes of ``web/src/api.ts``, and a small server for them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import queue
import random
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Answer = dict[str, Any]

WEB = Path(__file__).parents[2] / "clawgym/reporting/web"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SHELL = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><title>ClawGym</title>'
    '<link rel="stylesheet" href="/app.css"></head><body><div id="root"></div><script src="/app.js"></script>'
    "</body></html>"
)
FORGE = "document.title='forged'"
HOSTILE = f'<script>{FORGE}</script><img src=x onerror="{FORGE}">\x1b[2J\u202egnp.exe \x00'
NOW = 1795690621.0
CATEGORIES = ("files", "text", "services", "data", "code")
CHECKS = ("file_exists", "content_matches", "no_extra_files", "service_answers", "permissions_kept", "log_untouched")
OUTCOMES = ("solved", "failed", "failed", "solved", "truncated", "solved", "infra")
SET = {"task_set": "terminal-basic@2", "task_set_hash": "77" * 32}


def estimate(value: float, wide: float = 0.06) -> Answer:
    value = min(1.0, max(0.0, value))
    low, high = max(0.0, value - wide), min(1.0, value + wide)
    return {"value": value, "low": low, "high": high, "tasks": 120, "method": "bootstrap"}


def picture(n: int, width: int = 320, height: int = 200) -> str:
    """A PNG as a data: URL: a box that moves to the right with ``n``."""
    plain = b"\0" + b"\xf1\xf3\xf6" * width
    left = 20 + 12 * n
    boxed = b"\0" + b"\xf1\xf3\xf6" * left + b"\x2f\x55\xc8" * 70 + b"\xf1\xf3\xf6" * (width - left - 70)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = plain * 60 + boxed * 60 + plain * (height - 120)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def episode_line(n: int) -> Answer:
    outcome = OUTCOMES[n % len(OUTCOMES)]
    graded = outcome != "infra"
    failed = [CHECKS[n % 6], CHECKS[(n + 2) % 6]] if graded and outcome != "solved" else []
    official = None if not graded else 1.0 if outcome == "solved" else (n * 37 % 80) / 100
    causes = {"truncated": "wall time", "failed": "checks failed", "infra": "the endpoint answered 503 three times"}
    return {
        "name": f"task-{n:04d}-0",
        "order": n,
        "task": f"{CATEGORIES[n % 5]}/rename-the-reports-of-{n:04d}",
        "sample": 0,
        "category": CATEGORIES[n % 5],
        "level": ("easy", "medium", "hard")[n % 3],
        "outcome": outcome,
        "strict": None if official is None else float(official == 1),
        "official": official,
        "corrected": official,
        "passed": 6 - len(failed) if graded else 0,
        "checks": 6 if graded else 0,
        "failed": failed,
        "cause": causes.get(outcome, ""),
        "fault": "" if graded else "endpoint",
        "steps": 8 + n % 40,
        "tool_calls": 5 + n % 30,
        "prompt_tokens": 12_000 + 371 * (n % 90),
        "completion_tokens": 900 + 17 * (n % 60),
        "cost_usd": 0.012 + 0.0003 * (n % 50),
        "seconds": 21.5 + n * 7 % 190,
        "attempts": 1 + (n % 11 == 0),
        "tampered": n % 97 == 5,
        "runs_agent_code": n % 5 == 4,
        "judged_by": "",
        "finished": f"2026-11-26T21:{n // 60 % 60:02d}:{n % 60:02d}+00:00",
    }


def summary(lines: list[Answer], planned: int) -> Answer:
    graded = [line for line in lines if line["official"] is not None]
    some, n, infra = bool(graded), max(1, len(graded)), len(lines) - len(graded)
    strict = sum(line["strict"] for line in graded) / n
    outcomes, causes = (Counter(str(line[key]) for line in graded if line[key]) for key in ("outcome", "cause"))
    scores = {
        "episodes": len(graded),
        "strict": estimate(strict) if some else None,
        "official": estimate(strict + 0.18) if some else None,
        "corrected": estimate(strict + 0.1, wide=0.08) if some else None,
    }
    groups = [
        {
            "name": name,
            "episodes": len(graded) // 5,
            "strict": estimate(0.3 + 0.1 * k, wide=0.1),
            "official": estimate(0.5 + 0.1 * k),
            "corrected": None,
        }
        for k, name in enumerate(CATEGORIES)
    ]
    judging = {"episodes": 120, "asked": 360, "read": 357, "alpha": 0.81, "same_verdict": 0.92}
    return {
        "scores": scores,
        "planned": planned,
        "complete": planned == len(graded),
        "outcomes": outcomes,
        "causes": causes,
        "pass_at": {"1": estimate(strict), "2": estimate(strict + 0.1), "4": estimate(strict + 0.16)} if some else {},
        "pass_hat": {"1": estimate(strict), "2": estimate(strict - 0.12), "4": estimate(strict - 0.2)} if some else {},
        "attempts": len(lines) + infra,
        "infra_attempts": 2 * infra,
        "infra_causes": {"the endpoint answered 503": 2 * infra - 1, "no space left on the device": 1} if infra else {},
        "infra_faults": {"endpoint": 2 * infra - 1, "host": 1} if infra else {},
        "infra_newest": {},
        "infra_episodes": infra,
        "infra_rate": 2 * infra / max(1, len(lines) + infra),
        "infra_share": infra / max(1, len(lines)),
        "scores_infra_zero": scores if infra else None,
        "missing": [f"task-{k}#0" for k in range(planned - len(graded))],
        "unsupported": {"services/needs-docker": "needs a Docker engine"} if infra else {},
        "problems": {},
        "tampered": [line["name"] for line in graded if line["tampered"]],
        "judged": {},
        "judging": {
            "helpfulness, gpt-x": judging | {"prompt_tokens": 1_200_000, "completion_tokens": 30_000, "cost_usd": 1.75}
        }
        if some
        else {},
        "groups": {"category": groups} if some else {},
        "safety": {},
        "usage": {
            "prompt_tokens": sum(line["prompt_tokens"] for line in graded),
            "completion_tokens": sum(line["completion_tokens"] for line in graded),
            "cached_tokens": sum(line["prompt_tokens"] for line in graded) // 2,
            "cost_usd": sum(line["cost_usd"] for line in graded) if some else None,
        },
        "seconds": {"start": 0.4 * n, "agent": 61.0 * n, "verify": 2.2 * n} if some else {},
        "cost_per_solved": 0.04 if some else None,
        "tokens_per_solved": 61_000.0 if some else None,
        "detectable": {"strict": 0.045, "official": 0.031} if some else {},
    }


ABOUT = [
    ["Task set", "terminal-basic@2"],
    ["Agent", "openclaw 2026.11.2"],
    ["Model", "claude-sonnet-x"],
    ["Seed", "0"],
    ["Isolation", "namespace"],
    ["ClawGym", "0.2.0"],
    ["Started", "2026-11-26 20:58:12 UTC"],
]


def run(run_id: str, lines: list[Answer], *, state: str = "complete", planned: int = 0) -> Answer:
    graded = [line for line in lines if line["official"] is not None]
    n = max(1, len(graded))
    failed = {name: sum(name in line["failed"] for line in graded) for name in CHECKS}
    bins = [[0] * 20, [0] * 20]
    for line in graded:
        bins[line["strict"] == 1][min(19, int(20 * line["official"]))] += 1
    return {
        "id": run_id,
        "name": run_id,
        "path": f"runs/{run_id}",
        "state": state,
        "changed": NOW,
        "indexed": {"done": len(lines), "total": len(lines)},
        "about": ABOUT,
        "manifest": {"kind": "eval", "seed": 0, "config": {"limit": 40}},
        "summary": summary(lines, planned or len(lines)),
        "checks": [
            {"name": name, "failed": k, "graded": len(graded), "share": k / n, "mean": 1 - k / n, "tasks": k}
            for name, k in sorted(failed.items(), key=lambda item: -item[1])
        ]
        if graded
        else [],
        "distribution": {"solved": bins[1], "unsolved": bins[0]},
        "categories": list(CATEGORIES),
        "outcomes": sorted({line["outcome"] for line in lines}),
        "slowest": {"median": 61.2, "p95": 180.4, "max": 211.0} if graded else None,
        "notes": [],
    }


DIFF = """--- a/report/summarize.py
+++ b/report/summarize.py
@@ -1,6 +1,9 @@
 import csv
+import sys
 
-def total(path):
-    return sum(int(row[1]) for row in csv.reader(open(path)))
+def total(path, column=1):
+    with open(path, newline="") as file:
+        rows = list(csv.reader(file))
+    return sum(int(row[column]) for row in rows[1:])
"""
INSTRUCTION = (
    "Rename all reports in `incoming/` so that their names begin with the date of the file's first line, and write the "
    "total of each into `report/totals.csv`. Keep the permissions of the files. Do not touch `log/`.\n\n"
    "The date has the form 2026-11-26."
)
THOUGHT = (
    "The names carry no date yet. I list the folder first, and read the beginning of each file, so that I see whether "
    "all of them have a date.\n"
)
TRACEBACK = (
    'Traceback (most recent call last):\n  File "report/summarize.py", line 9\n'
    "IndexError: list index out of range\nstatus 1"
)


def step(n: int, *, pictures: bool = False, turn: int | None = None) -> Answer:
    made: Answer = {
        "n": n,
        "source": "agent",
        "time": f"2026-11-26T21:{n // 60 % 60:02d}:{n % 60:02d}+00:00",
        "text": "",
        "reasoning": "",
        "model": "claude-sonnet-x",
        "usage": {"prompt_tokens": 3000 + 21 * n, "completion_tokens": 120, "cached_tokens": 2800, "cost_usd": None},
        "calls": [],
        "observations": [],
        "cut": 0,
        "role": "main",
        "policy_version": None,
        "finish_reason": "tool_calls",
        "flaw": "",
        "turn": turn,
        "rewards": [],
    }
    if n == 0:
        return made | {"source": "user", "text": INSTRUCTION, "model": "", "usage": None, "finish_reason": ""}

    def call(name: str, arguments: str, seen: str, **more: Any) -> None:
        made["calls"] = [{"id": f"c{n}", "name": name, "arguments": arguments, "changes": more.get("changes", [])}]
        made["observations"] = [{"call": f"c{n}", "text": seen, "picture": more.get("picture")}]

    if pictures and n % 2:
        where = json.dumps({"action": "left_click", "coordinate": [40 + 12 * n, 90]})
        call("computer", where, "", picture={"src": picture(n), "step": n})
    elif n % 4 == 1:
        made["reasoning"] = THOUGHT * (1 + n % 3)
        names = "".join(f"-rw-r--r-- 1 user user {1000 + 7 * k} report-{k:03d}.txt\n" for k in range(6 + n % 30))
        call("exec", f"ls -la incoming/ && head -n 1 incoming/*.txt | head -{n % 90}", names)
    elif n % 4 == 2:
        made["text"] = "The script reads the wrong column. I correct it and run it again."
        arguments = json.dumps({"path": "report/summarize.py", "old": "row[1]", "new": "row[column]"}, indent=1)
        call("edit", arguments, "ok", changes=[{"path": "report/summarize.py", "diff": DIFF, "whole": False}])
    elif n % 4 == 3:
        call("exec", "python3 report/summarize.py incoming/*.txt > report/totals.csv; echo status $?", TRACEBACK)
    else:
        made["text"] = f"Step {n} is done. I check the totals once more before I end."
        made["finish_reason"] = "stop"
    return made


def episode(line: Answer, run_id: str, turns: int, **more: Any) -> Answer:
    bad = "expected 2026-11-26-report-004.txt, found report-004.txt"
    checks = [
        {
            "name": name,
            "score": float(name not in line["failed"]),
            "seen": f"{name}: {bad if name in line['failed'] else 'ok'}",
        }
        for name in CHECKS
    ]
    retried = {"fault": "endpoint", "seconds": 12.0, "finished": "2026-11-26T21:00:00+00:00"}
    last = {key: line[key] for key in ("outcome", "cause", "fault", "seconds", "finished")}
    return {
        **line,
        "run": run_id,
        "task_hash": "9f2c" * 16,
        "seed": 7,
        "checks_list": checks if line["official"] is not None else [],
        "facts": [["Grading mode", "clean"], ["No-model baseline", "0.17"]],
        "phases": {"start": 0.4, "agent": 61.2, "verify": 2.1},
        "history": [
            {"attempt": 1, "outcome": "infra", "cause": "the endpoint answered 503", **retried},
            {"attempt": 2, **last},
        ],
        "final_message": "All reports are renamed, and report/totals.csv has one line for each.",
        "verifier_log": "\n".join(str(check["seen"]) for check in checks),
        "error_log": "HTTP 503: overloaded\n" * 5 if line["outcome"] == "infra" else "",
        "votes": [{"criterion": "keeps to the instruction", "votes": [1.0, 0.5, 1.0]}],
        "files": [{"name": "transcript.json", "size": 48_211}, {"name": "verifier.log", "size": 512}],
        "workspace": {
            "files": [
                {"path": f"incoming/2026-11-{k:02d}-report.txt", "size": 900 + k, "kind": "file"} for k in range(1, 20)
            ],
            "note": "",
        },
        "turns": turns,
        "pictures": [],
        "has_tokens": False,
        "pool": {"source": "pool-1", "seq": 2} if line["name"] == "desktop" else None,
        "notes": [],
        **more,
    }


WORDS = (
    "The",
    " file",
    " is",
    " renamed",
    "\n",
    " and",
    " I",
    " check",
    " it",
    ".",
    " `ls",
    " -la",
    "`",
    " report",
    "-",
    "004",
)


def tokens(turn: int, turns: int) -> Answer:
    rng = random.Random(turn)

    def token(k: int, sampled: bool) -> Answer:
        logprob = -rng.expovariate(2.2) * (3 if rng.random() < 0.08 else 0.6)
        return {
            "id": 1000 + rng.randrange(30_000),
            "text": WORDS[k % len(WORDS)],
            "logprob": logprob if sampled else None,
            "advantage": math.sin(k / 9) * 1.4 if sampled else None,
            "trained": sampled and k % 50 < 44,
        }

    return {
        "turn": turn,
        "turns": turns,
        "role": "main",
        "policy_version": 3,
        "flaw": "",
        "before": 412 * turn,
        "context": [token(k, False) for k in range(90)],
        "sampled": [token(k, True) for k in range(260)],
        "reward": 0.5,
        "advantages": {"step": 41, "spread": [-0.4, 1.2]},
        "note": "",
    }


MAIN_CHARTS = {
    "Reward of the episodes that were trained on": {"rollout/avg_reward_submitted": "reward"},
    "Groups": {
        "rollout/group_mixed_frac": "mixed",
        "rollout/group_all_zero_frac": "all zero",
        "rollout/group_all_one_frac": "all one",
    },
    "Entropy, nats per token": {"actor/entropy": "entropy"},
    "Staleness in policy versions": {"staleness/mean": "mean", "staleness/max": "maximum"},
    "Idle fraction of a step": {"perf/trainer_idle_ratio": "trainer", "perf/rollout_idle_ratio": "rollouts"},
    "Difference of token probabilities between trainer and engine": {"training/rollout_probs_diff": "difference"},
}
CURVES = {
    "rollout/avg_reward_submitted": (0.2, 0.7, 0.03),
    "rollout/group_mixed_frac": (0.6, 0.4, 0.04),
    "rollout/group_all_zero_frac": (0.35, 0.1, 0.03),
    "rollout/group_all_one_frac": (0.05, 0.5, 0.03),
    "actor/entropy": (1.2, 0.5, 0.02),
    "training/rollout_probs_diff": (0.004, 0.006, 0.001),
    "staleness/mean": (0.2, 1.2, 0.2),
    "staleness/max": (1, 3, 0.4),
    "perf/trainer_idle_ratio": (0.3, 0.2, 0.03),
    "perf/rollout_idle_ratio": (0.1, 0.15, 0.03),
    "actor/pg_loss": (0.02, -0.01, 0.01),
    "actor/grad_norm": (2.0, 0.8, 0.2),
    "timing/step": (30, 24, 2),
}


def training(training_id: str, *, seed: int = 1, state: str = "complete", steps: int = 300) -> Answer:
    rng = random.Random(seed)
    at = list(range(1, steps + 1))
    rise = [1 - math.exp(-3 * k / max(1, steps)) for k in range(steps + 1)]
    charts = [
        {"title": title, "metrics": list(lines), "labels": list(lines.values()), "main": True}
        for title, lines in MAIN_CHARTS.items()
    ]
    charts += [{"title": n, "metrics": [n], "labels": [n], "main": False} for n in list(CURVES)[-3:]]
    evaluations = []
    for split, top in (("heldout", 0.62), ("validation", 0.7)):
        for k in range(0, steps + 1, 25) if steps else ():
            score = 0.18 + (top - 0.18) * rise[k]
            rest = {"episodes": 96, "samples": 1, "greedy": False, "by_generator": {}, "partial": score, "infra": 0}
            span = {"score": score, "low": score - 0.05, "high": score + 0.05}
            evaluations.append({"step": k, "task_set": "terminal-basic@2", "split": split, **span, **rest})
    return {
        "id": training_id,
        "name": training_id,
        "path": f"runs/{training_id}",
        "state": state,
        "changed": NOW,
        "about": [["Method", "grpo"], ["Model", "smol-135m"], ["Seed", str(seed)], ["ClawGym", "0.2.0"]],
        "manifest": {"kind": "train"},
        "config": [["lr", str(1e-6 * seed)], ["group_size", "8"], ["steps", str(steps)]],
        "data": [{"use": "training", "name": "terminal-basic@2", "split": "train", "tasks": 480, "sha256": "ab" * 32}],
        "steps": at,
        "times": [NOW + k for k in at],
        "metrics": {
            name: [start + (end - start) * rise[k] + rng.gauss(0, noise) for k in range(steps)]
            for name, (start, end, noise) in CURVES.items()
        },
        "charts": charts,
        "evaluations": evaluations,
        "timeline": [
            {"step": k // 2, "loop": loop, "start": 20.0 * k + off, "end": 20.0 * k + off + long}
            for k in range(40 if steps else 0)
            for loop, off, long in (("rollouts", 0, 15), ("trainer", 9, 8))
        ],
        "guards": [
            {"name": "kl", "limit": 0.1, "metric": "actor/step_kl", "fired": []},
            {
                "name": "mismatch",
                "limit": 0.02,
                "metric": "training/rollout_probs_diff",
                "fired": [118, 119] if seed == 2 else [],
            },
        ],
        "checkpoints": [
            {"name": f"{k:06d}", "step": k, "best": k == 200, "last": k == 300} for k in (100, 200, 300) if k <= steps
        ],
        "pool": "pool-1",
        "notes": [],
    }


def pool() -> Answer:
    channel = {
        "name": "train",
        "episodes": {"solved": 420, "failed": 510, "truncated": 40, "infra": 12, "open": 9},
        "fates": {"delivered": 800, "zero-variance group": 130, "too stale": 40},
        "groups": {"consumed": 100, "ready": 6, "open": 2, "dropped": 21},
        "dropped": {"zero variance": 17, "infra": 4},
        "turns": 18_300,
        "flawed_turns": 120,
        "flaws": {"tokens not exact": 90, "cut off": 30},
        "curation": {"kept": 700, "left_out": 130, "undecided": 140},
        "samples": 1210,
        "trained_ids": 2_400_000,
        "samples_per_episode": 1.3,
        "newest": NOW,
    }
    versions: list[Answer] = [{"version": v, "turns": 1500 + 90 * v, "tokens": 200_000} for v in range(12)]
    return {
        "id": "pool-1",
        "name": "pool.db",
        "path": "runs/grpo-a/pool.db",
        "changed": NOW,
        "training": "grpo-a",
        "channels": [channel],
        "batches": {"consumed": 100, "leased": 1},
        "images": 0,
        "tools": 2,
        "versions": [*versions, {"version": None, "turns": 4, "tokens": 100}],
        "notes": [],
    }


def pool_group(k: int) -> Answer:
    return {
        "id": f"g{k}",
        "channel": "train",
        "task": f"files/rename-{k:03d}",
        "size": 8,
        "members": 8,
        "closed": 8,
        "infra": 0,
        "state": ("consumed", "dropped", "ready")[k % 3],
        "reason": "zero variance" if k % 3 == 1 else "",
        "opened": NOW - 60 * k,
        "rewards": [1.0, 0.0, None, 0.5, 1.0, 1.0, 0.0, 0.0],
        "episodes": [8 * k + j for j in range(8)],
    }


def pool_line(seq: int) -> Answer:
    outcome = ("solved", "failed")[seq % 3 == 0]
    return {
        "seq": seq,
        "id": f"e{seq}",
        "channel": "train",
        "group": f"g{seq // 8}",
        "task": f"files/rename-{seq // 8:03d}",
        "sample": seq % 8,
        "agent": "tool-loop",
        "state": "closed",
        "outcome": outcome,
        "cause": "",
        "reward": float(outcome == "solved"),
        "turns": 18,
        "flawed": int(seq % 7 == 0),
        "sequences": 1 + seq % 2,
        "trained_ids": 2100,
        "trainable": True,
        "fate": "delivered",
        "opened": NOW - 60 * seq,
        "closed": NOW - 50 * seq,
    }


def pool_episode(seq: int) -> Answer:
    return pool_line(seq) | {
        "pool": "pool.db",
        "run": {"source": "small", "name": "desktop"},
        "rewards": {"outcome": 1.0, "judge": 0.4},
        "penalties": {"length": -0.1},
        "tags": ["chain-8"],
        "curation_note": "kept: the verifier agrees with the judge",
        "meta": {"policy": 3},
        "members": [{"seq": 8 * (seq // 8) + k, "sample": k, "reward": float(k % 3 != 0)} for k in range(8)],
        "advantage": {"centred": 0.375, "normalized": 0.72},
        "trained": {
            "step": 41,
            "turns": [{"turn": k, "step": k + 1, "mean": 0.72, "least": -0.4, "most": 1.2} for k in range(17)],
        },
        "pictures": [],
        "notes": [],
        "rewards_by_turn": [{"step": k, "name": "judge", "value": math.sin(k / 2)} for k in range(1, 18)],
    }


def judged_step(n: int) -> Answer:
    made = step(n, turn=n - 1 if n else None) | {"policy_version": 3}
    if n:
        reward = {
            "name": "judge",
            "value": round(math.sin(n / 2), 2),
            "judge": "prm-7b",
            "votes": [1.0, None, 0.5],
            "texts": ["The step lists the folder before it changes anything.", "", "Useful, but the file was known."],
            "hints": ["Read the date from the first line of each file, not from its name."] if n % 5 == 0 else [],
        }
        flaw = "tokens not exact" if n == 7 else ""
        made |= {"rewards": [reward], "flaw": flaw, "role": "subagent" if n in (9, 10) else "main"}
    return made


def tree() -> Answer:
    def turn(k: int, parent: int | None, role: str = "main") -> Answer:
        about = {"role": role, "flaw": "tokens not exact" if k == 12 else "", "policy_version": 3}
        return {"turn": k, "parent": parent, **about, "context_ids": 200, "sampled_ids": 110, "finish_reason": "stop"}

    turns = [turn(k, k - 1 if k else None) for k in range(10)]
    turns += [turn(k, 6 if k == 10 else k - 1) for k in range(10, 16)] + [turn(16, None, "subagent")]
    first = {"turns": list(range(10)), "trained": list(range(10)), "ids": 3100, "trained_ids": 1100}
    second = {"turns": [*range(7), *range(10, 16)], "trained": [10, 11, 13, 14, 15], "ids": 3900, "trained_ids": 450}
    return {"turns": turns, "sequences": [first, second], "roles": ["main"], "note": ""}


def difference(value: float, told: bool) -> Answer:
    return {
        "value": value,
        "low": value - 0.04,
        "high": value + 0.04,
        "p": 0.004 if told else 0.41,
        "tasks": 118,
        "ahead": 31,
        "behind": 12,
        "detectable": 0.048,
        "method": "bootstrap",
        "test": "sign-flip",
        "told_apart": told,
        "verdict": "better" if told else "not told apart",
    }


def compare(a: str, b: str) -> Answer:
    def side(name: str) -> Answer:
        usage = {"prompt_tokens": 4_000_000, "completion_tokens": 180_000, "cached_tokens": 2_000_000, "cost_usd": 3.2}
        return {
            "id": name,
            "name": "openclaw, claude-sonnet-x",
            "run": name,
            "samples": 1,
            "means": {"strict": 0.42, "official": 0.61, "corrected": 0.55},
            "infra_share": 0.004,
            "missing": 0,
            "usage": usage,
            "seconds": {"agent": 8000.0, "verify": 240.0},
            "cost_per_solved": 0.05,
            "tokens_per_solved": 71_000.0,
        }

    return {
        "a": side(a),
        "b": side(b),
        "refused": "",
        "tasks": 118,
        "scores": {"strict": difference(0.081, True), "official": difference(0.012, False)},
        "left_out": {"graded by another verifier": ["files/one", "files/two"]},
        "notes": ["The two runs used different versions of the agent."],
        "by_task": [
            {
                "task": f"files/rename-{k:03d}",
                "category": "files",
                "strict": [float(k % 2), float(k % 3 == 0)],
                "official": [0.4 + 0.01 * k, 0.9 - 0.01 * k],
                "episodes": [f"task-{k + 3:04d}-0", f"task-{k + 3:04d}-0"],
            }
            for k in range(30)
        ],
        "checks": [{"name": name, "a": 0.3 - 0.02 * k, "b": 0.1 + 0.03 * k} for k, name in enumerate(CHECKS)],
        "alpha": 0.05,
        "power": 0.8,
    }


def board() -> Answer:
    entries = [
        {
            "run": "small",
            "rank": k + 1 if k < 4 else None,
            "name": f"openclaw, model-{k}",
            "folder": f"run-{k}",
            "agent": "openclaw",
            "agent_version": "2026.11.2",
            "model": f"model-{k}",
            "samples": 1,
            "isolation": "namespace",
            "library": "0.2.0",
            "strict": estimate(0.6 - 0.08 * k),
            "corrected": estimate(0.55 - 0.08 * k),
            "official": estimate(0.7 - 0.05 * k),
            "excluded": [],
            "episodes": 120 if k < 4 else 71,
            "planned": 120,
            "infra_rate": 0.002,
            "cost_per_solved": 0.03 * (k + 1),
            "tokens_per_solved": 40_000.0,
            "verified": "reproduced" if k == 0 else "",
            "flags": ["incomplete"] if k == 4 else [],
        }
        for k in range(5)
    ]
    return {"id": "board-1", **SET, "by": "strict", "entries": entries, "notes": []}


def audit() -> Answer:
    flaws = (
        ("solution fails", True, 4),
        ("no-op earns reward", True, 2),
        ("flaky", False, 3),
        ("needs network", False, 0),
    )
    policies = enumerate(("no-op", "touch-all-files", "echo-the-instruction"))
    return {
        "id": "audit-1",
        "name": "terminal-basic",
        "path": "audits/terminal-basic",
        "state": "complete",
        **SET,
        "size": 300,
        "audited": 300,
        "kept": 291,
        "flaws": [
            {"name": n, "breaks": b, "about": f"What {n} means, in a sentence.", "tasks": k} for n, b, k in flaws
        ],
        "policies": [
            {"policy": name, "mean": 0.02 * k, "max": 0.4, "above_0": 8 * k, "above_half": k, "crashed": 0}
            for k, name in policies
        ],
        "baseline": 0.041,
        "seconds": {"audit": 512.0},
        "unsupported": {"services/needs-docker": "needs a Docker engine"},
        "infra": {},
        "problems": {},
    }


def audit_task(k: int) -> Answer:
    broken = {"solution fails": "check content_matches scored 0"} if k % 75 == 9 else {}
    flaky = {"flaky": "2 of 3 runs of the solution passed"} if k % 100 == 3 else {}
    about = {"baseline": 0.01 * (k % 12), "solution": "passes", "broken": bool(broken)}
    return {"task": f"files/rename-{k:03d}", "flaws": broken | flaky, **about}


def attack() -> Answer:
    def rate(exploit: str, grader: str, kind: str, earned: int, allowed: bool) -> Answer:
        return {
            "exploit": exploit,
            "task_class": kind,
            "grader": grader,
            "tasks": 120,
            "earned": earned,
            "official": earned,
            "full": earned // 2,
            "gain": earned / 150,
            "official_gain": earned / 150,
            "allowed": allowed,
            "rate": earned / 120,
            "earned_on": [f"files/rename-{k:03d}" for k in range(earned)],
        }

    return {
        "id": "attack-1",
        "name": "attacks",
        "path": "attacks/terminal-basic",
        "state": "complete",
        **SET,
        "size": 120,
        "attacked": 120,
        "rates": [
            rate("replace-the-checker", "ClawGym", "reads files", 0, False),
            rate("replace-the-checker", "original grader", "reads files", 74, False),
            rate("patch-builtins", "ClawGym", "in_process", 9, True),
        ],
        "exploits": [
            {"name": "replace-the-checker", "tries": "Writes its own checker over the one of the task."},
            {"name": "patch-builtins", "tries": "Patches functions that the checker calls in the same process."},
        ],
        "infra": {},
    }


def online(writable: bool) -> Answer:
    def gate(version: int, verdict: str) -> Answer:
        measured = {"n": 140, "value": 0.6 + 0.01 * version, "low": 0.55, "high": 0.69, "needed": 0.5}
        figures = [{"name": name, **measured} for name in ("win rate against the version that answers", "canaries")]
        reasons = ["the interval of the win rate lies above one half"]
        return {"version": version, "verdict": verdict, "reasons": reasons, "figures": figures}

    verdicts = {"promoted": "promote", "rejected": "reject"}
    return {
        "id": "online-1",
        "name": "assistant",
        "path": "online/assistant",
        "base_url": "http://127.0.0.1:8000/v1",
        "serving": 3,
        "versions": [
            {
                "number": k + 1,
                "parent": k or None,
                "state": state,
                "answers": k == 2,
                "made": NOW - 4000 * (4 - k),
                "sessions": 40 * (k + 1),
                "gate": [gate(k + 1, verdicts.get(state, "undecided"))],
                "can_promote": writable and state == "candidate",
                "can_roll_back_to": writable and k == 0,
            }
            for k, state in enumerate(("promoted", "rejected", "promoted", "candidate"))
        ],
        "events": [
            {"at": NOW - 9000, "kind": "promoted", "version": 1, "before": 0, "reason": "gate"},
            {"at": NOW - 3000, "kind": "promoted", "version": 3, "before": 1, "reason": "gate"},
        ],
        "comparison": gate(4, "undecided"),
        "watch": {"version": 3, "verdict": "holds", "reason": "220 ratings since the promotion"},
        "writable": writable,
        "notes": [],
    }


def live(n: int = 3) -> Answer:
    boxes = [
        {
            "id": f"{k}",
            "task": f"files/rename-{k:03d}",
            "instruction": INSTRUCTION,
            "agent": "openclaw",
            "turn": 4 + k,
            "action": "exec: ls -la incoming/",
            "text": "-rw-r--r-- 1 user user 1007 report-001.txt\n" * 9,
            "picture": picture(k) if k == 1 else None,
        }
        for k in range(n)
    ]
    return {"runs": [{"source": "running", "name": "running", "pid": 4711, "sandboxes": boxes}] if n else []}


def search(text: str) -> Answer:
    items = [
        {
            "source": "small",
            "run": "small",
            "episode": f"task-{k:04d}-0",
            "task": f"files/rename-{k:04d}",
            "outcome": OUTCOMES[k % 7],
            "step": k % 9,
            "parts": [["ls -la incoming/ && ", False], [text, True], [" " + HOSTILE, False]],
        }
        for k in range(4, 0 if text == "nothing" else 24)
    ]
    return {"total": len(items), "all": len(items), "offset": 0, "items": items, "note": ""}


def experiment(name: str, state: str = "complete", arms: int = 3) -> Answer:
    """An experiment; without arms, one that has just begun."""
    x = list(range(16, 16 * 13, 16))
    lines = []
    for n in range(arms):
        y = [0.2 + (0.2 + 0.15 * n) * (1 - math.exp(-at / 60)) for at in x]
        lines.append({"name": f"arm-{n}", "x": x, "y": y, "low": [v - 0.08 for v in y], "high": [v + 0.08 for v in y]})
    drawn = {"title": "Score of first replies", "about": "means", "across": "session", "from": 0, "to": 1}
    rows = [[f"arm-{n}", "3", "0.20 [0.11, 0.29]"] for n in range(arms)]
    grid = {"title": "By arm", "about": "95 % intervals", "columns": ["arm", "seeds", "after"], "rows": rows}
    return {
        "id": name, "name": name, "path": f"/runs/{name}", "state": state, "changed": NOW, "about": [],
        "notes": ["The policy uses hints."], "charts": [{**drawn, "lines": lines}] if arms else [],
        "tables": [grid] if arms else [],
    }  # fmt: skip


def source(kind: str, source_id: str, **more: Any) -> Answer:
    empty = dict.fromkeys(("parent", "run", "training", "indexed"))
    about = {"path": f"{kind}s/{source_id}", "state": "complete", "problem": "", "changed": NOW, "label": ""}
    return {"id": source_id, "kind": kind, "name": source_id, **about, **empty, **more}


def run_figures(made: Answer) -> Answer:
    s = made["summary"]
    scores = {name: s["scores"][name] for name in ("strict", "official", "corrected", "episodes")}
    return {
        **SET,
        "agent": "openclaw",
        "model": "claude-sonnet-x",
        "samples": 1,
        "created": "2026-11-26T20:58:12+00:00",
        "planned": s["planned"],
        "outcomes": s["outcomes"],
        **scores,
        "cost_usd": s["usage"]["cost_usd"],
        "tokens": s["usage"]["prompt_tokens"],
        "infra_rate": s["infra_rate"],
        "seconds": 7000.0,
    }


class Made:
    """All answers. Change :attr:`answers` or :attr:`lists`, and tell the pages with :meth:`Server.tell`."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.lists: dict[str, tuple[int, Callable[[int], Answer]]] = {}
        small = [episode_line(n) for n in range(40)]
        small[0] |= {"name": "desktop", "task": "desktop/click-the-box"}
        small[1] |= {"name": "long", "task": "text/thousands-of-turns"}
        small[2] |= {"name": "hostile", "task": HOSTILE, "cause": HOSTILE, "category": HOSTILE, "failed": [HOSTILE]}
        self.runs: dict[str, Answer] = {}
        self.run("big", [episode_line(n) for n in range(5000)])
        self.run("small", small)
        self.run("running", small[3:12], state="running", planned=40)
        self.run("interrupted", small[3:23], state="incomplete", planned=40)
        self.run("empty", [], state="incomplete", planned=40)
        self.run("one", small[3:4])
        self._episodes(small)
        self.trainings = {
            "grpo-a": training("grpo-a"),
            "grpo-b": training("grpo-b", seed=2),
            "grpo-now": training("grpo-now", seed=3, state="running", steps=40),
            "grpo-new": training("grpo-new", seed=4, state="incomplete", steps=0),
        }
        self.answers |= {f"training/{name}": made for name, made in self.trainings.items()}
        self.answers["pools/pool-1"] = pool()
        self.lists["pools/pool-1/episodes"] = (992, pool_line)
        self.lists["pools/pool-1/groups"] = (124, pool_group)
        for seq in (1, 2, 3):
            self.answers[f"pools/pool-1/episodes/{seq}"] = pool_episode(seq)
            self.lists[f"pools/pool-1/episodes/{seq}/turns"] = (19, judged_step)
            self.answers[f"pools/pool-1/episodes/{seq}/sequences"] = tree()
        self.answers |= {
            "experiments/personal": experiment("personal"),
            "experiments/begun": experiment("begun", "running", 0),
        }
        self.answers |= {"boards/board-1": board(), "audits/audit-1": audit(), "attacks/attack-1": attack()}
        self.lists["audits/audit-1/tasks"] = (300, audit_task)
        self.answers |= {"online/online-1": online(True), "live": live(), "sources": self._sources()}

    def run(self, name: str, lines: list[Answer], **more: Any) -> None:
        """Add a run, or replace it."""
        self.runs[name] = self.answers[f"runs/{name}"] = run(name, lines, **more)
        self.page(f"runs/{name}/episodes", lines)
        for line in lines:
            self.answers[f"runs/{name}/episodes/{line['name']}"] = lambda line=line: episode(line, name, 12)

    def page(self, address: str, items: list[Answer]) -> None:
        self.lists[address] = (len(items), items.__getitem__)

    def _episodes(self, small: list[Answer]) -> None:
        base = "runs/small/episodes"
        shots = [{"src": picture(n), "step": n} for n in range(1, 14, 2)]
        self.answers[f"{base}/desktop"] = episode(small[0], "small", 14, pictures=shots)
        self.page(f"{base}/desktop/turns", [step(n, pictures=True) for n in range(14)])
        self.answers[f"{base}/long"] = episode(small[1], "small", 5000, pool={"source": "pool-1", "seq": 1})
        self.lists[f"{base}/long/turns"] = (5000, step)
        bad = episode(small[2], "small", 3, final_message=HOSTILE, verifier_log=HOSTILE, facts=[[HOSTILE, HOSTILE]])
        bad["checks_list"] = [{"name": HOSTILE, "score": 0.0, "seen": HOSTILE}]
        bad["workspace"] = {"files": [{"path": HOSTILE, "size": 1, "kind": "file"}], "note": HOSTILE}
        self.answers[f"{base}/hostile"] = bad
        turn = step(1) | dict.fromkeys(("text", "reasoning", "model", "role", "flaw", "finish_reason"), HOSTILE)
        change = {"path": HOSTILE, "diff": "+" + HOSTILE, "whole": True}
        turn["calls"] = [{"id": "c", "name": HOSTILE, "arguments": HOSTILE, "changes": [change]}]
        shot = {"src": f"javascript:{FORGE}", "step": 1}
        turn["observations"] = [{"call": "c", "text": HOSTILE, "picture": shot}]
        self.page(f"{base}/hostile/turns", [step(0), turn, turn | {"n": 2}])

    def _sources(self) -> Answer:
        found = [
            source("run", name, state=made["state"], label="openclaw, claude-sonnet-x", run=run_figures(made),
                   indexed=made["indexed"], changed=NOW - 3600 * k)
            for k, (name, made) in enumerate(self.runs.items())
        ]  # fmt: skip
        problem = "receipt.json is not JSON (line 4). Copy the run again, or remove the folder."
        found.append(source("run", "damaged", state="damaged", problem=problem))
        for name, made in self.trainings.items():
            score = made["evaluations"][-1] if made["evaluations"] else None
            figures = {
                "method": "grpo",
                "model": "smol-135m",
                "created": "",
                "steps": len(made["steps"]),
                "score": score,
            }
            found.append(source("training", name, state=made["state"], label="grpo, smol-135m", training=figures))
        found.append(source("experiment", "personal"))
        found.append(source("pool", "pool-1", name="pool.db", parent="grpo-a", label="992 episodes"))
        found += [
            source(kind, f"{kind}-1", label="terminal-basic@2") for kind in ("board", "audit", "attack", "online")
        ]
        paths, problems = ["runs/", "audits/"], ["runs/old: not readable"]
        return {"library": "0.2.0", "writable": True, "paths": paths, "sources": found, "problems": problems}

    def answer(self, address: str, query: dict[str, str]) -> Any:
        if address == "compare":
            return compare(query["a"], query["b"])
        if address.endswith("/tokens"):
            return tokens(int(query.get("turn", 0)), 18)
        if address == "search":
            return search(query.get("q", ""))
        if address in self.lists:
            return part(*self.lists[address], query)
        found = self.answers.get(address)
        if found is None and address.endswith("/turns"):
            return part(12, step, query)
        return found() if callable(found) else found


def part(total: int, at: Callable[[int], Answer], query: dict[str, str]) -> Answer:
    """A part of a list, filtered and sorted."""
    offset, limit = int(query.get("offset", 0)), min(500, int(query.get("limit", 100)))
    exact = {n: query[n] for n in ("outcome", "category", "fate", "state", "group", "channel") if query.get(n)}
    check, text, flaw = query.get("check"), query.get("q", "").lower(), query.get("flaw")
    sort = query.get("sort", "order")
    if not (exact or check or text or flaw) and sort == "order":
        items = [at(n) for n in range(offset, min(total, offset + limit))]
        return {"total": total, "all": total, "offset": offset, "items": items, "note": ""}
    rows = [row for row in map(at, range(total)) if all(str(row.get(name)) == value for name, value in exact.items())]
    rows = [row for row in rows if not check or check in row["failed"]]
    rows = [row for row in rows if not text or text in f"{row.get('task')} {row.get('cause')}".lower()]
    rows = [row for row in rows if not flaw or flaw in row["flaws"]]
    if (name := sort.removeprefix("-")) != "order":
        name = {"cost": "cost_usd", "tokens": "prompt_tokens"}.get(name, name)
        rows.sort(key=lambda row: (row[name] is not None, row[name]), reverse=sort.startswith("-"))
    return {"total": len(rows), "all": total, "offset": offset, "items": rows[offset : offset + limit], "note": ""}


def embedded(made: Made, run_id: str) -> Answer:
    """What a mailable report of a run holds."""
    base = f"runs/{run_id}"
    answers: dict[str, Any] = {"sources": made.answers["sources"], base: made.answers[base]}
    answers[f"{base}/episodes"] = lines = made.answer(f"{base}/episodes", {"limit": "500"})
    for line in lines["items"]:
        name = f"{base}/episodes/{line['name']}"
        answers |= {name: made.answer(name, {}), f"{name}/turns": made.answer(f"{name}/turns", {"limit": "20"})}
        answers[f"{name}/turns"]["total"] = len(answers[f"{name}/turns"]["items"])
    return {"home": f"/{base}", "answers": answers}


def report(data: Answer) -> str:
    """A report in one file, with a policy by hashes."""
    css, script = (WEB / "app.css").read_text(), (WEB / "app.js").read_text()
    style_hash, script_hash = (
        "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'" for text in (css, script)
    )
    policy = f"default-src 'none'; script-src {script_hash}; style-src {style_hash}; img-src data:; base-uri 'none'"
    plain = json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>ClawGym</title>'
        f'<style>{css}</style></head><body><div id="root"></div>'
        f'<script type="application/json" id="clawgym-data">{plain}</script><script>{script}</script></body></html>'
    )


class Server:
    """Answers of a :class:`Made` on loopback, with the strict policy of the viewer."""

    def __init__(self, made: Made) -> None:
        self.made = made
        self.failing: set[str] = set()
        """Addresses that answer with an error."""
        self.silent: set[str] = set()
        """Addresses that answer only after :attr:`released`."""
        self.released = threading.Event()
        self.posted: list[tuple[str, Any]] = []
        self.streams: list[queue.Queue[str | None]] = []
        self.http = _Http(("127.0.0.1", 0), type("Handler", (_Handler,), {"outer": self}))
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), name="made-pages", daemon=True).start()

    def tell(self, event: Answer) -> None:
        """Send an event to all pages."""
        for stream in self.streams:
            stream.put(json.dumps(event))

    def cut(self) -> None:
        """End the streams of events."""
        for stream in self.streams:
            stream.put(None)
        self.streams.clear()

    def close(self) -> None:
        self.released.set()
        self.cut()
        self.http.shutdown()
        self.http.server_close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser ends requests that it does not need any more."""


class _Handler(BaseHTTPRequestHandler):
    outer: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), "application/json", status)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path in ("/app.js", "/app.css"):
            kind = "text/javascript" if url.path.endswith("js") else "text/css"
            self._send((WEB / url.path[1:]).read_bytes(), f"{kind}; charset=utf-8")
        elif url.path == "/favicon.ico":
            self._send(b"", "image/x-icon")
        elif not url.path.startswith("/api/"):
            self._send(SHELL.encode(), "text/html; charset=utf-8")
        elif (address := url.path.removeprefix("/api/")) == "events":
            self._events()
        else:
            self._answer(address, dict(parse_qsl(url.query)))

    def _answer(self, address: str, query: dict[str, str]) -> None:
        if address in self.outer.silent:
            self.outer.released.wait(60)
        if address in self.outer.failing:
            self._json({"error": "The run folder cannot be read: receipt.json is cut off. Copy the run again."}, 503)
        elif (found := self.outer.made.answer(address, query)) is None:
            self._json({"error": f"There is no {address}. The list of sources shows what there is."}, 404)
        else:
            self._json(found)

    def do_POST(self) -> None:
        self.outer.posted.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        self._json(online(True))

    def _events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        told: queue.Queue[str | None] = queue.Queue()
        self.wfile.write(b"retry: 300\n\n: here\n\n")
        self.wfile.flush()
        self.outer.streams.append(told)
        while (text := told.get()) is not None:
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()


@contextlib.contextmanager
def serving(made: Made | None = None) -> Iterator[Server]:
    server = Server(made or Made())
    try:
        yield server
    finally:
        server.close()
