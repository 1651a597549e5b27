"""Does a service take on a person's style if the real OpenClaw is its client? (docs/results/online.md)

    python benchmarks/personal_service.py --out runs/personal-service
    python benchmarks/personal_service.py --arm combined --arm random --seeds 3

A simulated person with two or three style rules talks to the real, unmodified OpenClaw, whose model is a service
(`clawgym serve`): asks, complains until the reply is right, says thanks. Each conversation is a session of its own of
one running OpenClaw. The service trains on the conversations, without the gate, so each version answers at once.

Arms: ``binary``, ``opd`` and ``combined`` as in ``personal.py``; ``random``: ``binary``, but each vote is inverted by a
coin; ``memory``: no training, but OpenClaw's USER.md has what the person complained of; ``both``: that and
``combined``.

The model is tiny, so its chat template shows of OpenClaw's instructions only the content of USER.md. Its first version
is imitated as in ``personal.py``. The same command resumes; a finished cell (arm, seed) is not run again.
``report.html`` has the scores of first replies over the conversations.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from drift import live

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.agents.openclaw.install import installed
from clawgym.agents.openclaw.process import OpenClawProcess, openclaw
from clawgym.errors import ClawGymError
from clawgym.online.config import ServiceFolder, load_service_config
from clawgym.online.judging import ConversationJudge
from clawgym.online.service import Service, open_service
from clawgym.pool import Pool
from clawgym.registry import judges
from clawgym.reporting.experiment import experiment, experiment_page, markdown, table
from clawgym.rewards.rules import DegradedJudge
from clawgym.simulation.judge import ComplaintJudge
from clawgym.simulation.rules import RULES
from clawgym.simulation.users import THANKS, User, UserRequest, requests, user_of
from clawgym.trainers.config import load_config
from clawgym.trainers.local.personal import imitated_policy
from clawgym.trainers.local.personal_report import curves, format_interval, over_seeds

Arm = Literal["binary", "opd", "combined", "random", "memory", "both"]
ARMS: tuple[Arm, ...] = get_args(Arm)
_DEFAULT: tuple[Arm, ...] = ("binary", "opd", "combined", "memory")
_TURNS, _TOKENS, _AT_ONCE = 3, 96, 16
"""Most replies of a conversation, tokens of a reply, and conversations at a time."""
_COLUMNS = ("arm", "seeds", "before", "first replies", "last quarter", "after", "change", "seconds a reply")
_AGENT = "service"
_WINDOW = 32_768
"""The context window as OpenClaw is told: it takes none below 16,000."""
_NOTES = (
    "{%- if '/USER.md\\n' in opening -%}"
    "{%- set opening = opening.split('/USER.md\\n')[1].split('\\n## ')[0] | trim -%}"
    "{%- endif -%}"
)
_MISSING = "{%- set opening = '' if opening.startswith('[MISSING]') else opening -%}"
_OPENING = "{%- set opening = text_of(messages[0].content) -%}"


@judges.register("coin")
class CoinJudge(DegradedJudge):
    """:class:`~clawgym.simulation.judge.ComplaintJudge` with half of its votes inverted."""

    def __init__(self) -> None:
        super().__init__(ComplaintJudge(), 0.5, seed=0)


def settings(arm: Arm, seed: int) -> list[str]:
    """The settings of a service."""
    hints = int(arm in ("opd", "combined", "both"))
    return [
        "redact=false", "held_out=0", "idle=3600", "gate.on=false", f"training.seed={seed}",
        f"training.reward.judge={'coin' if arm == 'random' else 'complaints'}", f"training.distillation.hints={hints}",
        f"training.distillation.w_rl={0.0 if arm == 'opd' else 1.0}", f"training.rollout.groups={_AT_ONCE}",
        "training.rollout.staleness=8", "training.model.lora={rank: 16, alpha: 32}", "training.optimizer.lr=0.002",
        "training.compute.row_tokens=512", "training.compute.micro_tokens=4096",
    ]  # fmt: skip


class Person:
    """Talks to OpenClaw over its chat API, a session for each conversation."""

    def __init__(self, user: User, claw: OpenClawProcess, service: Service, pool: Pool, *, memory: bool) -> None:
        self._user, self._claw, self._service, self._pool, self._memory = user, claw, service, pool, memory
        self._sessions = itertools.count()
        self.turns = 0
        """Replies so far."""

    async def talk(self, request: UserRequest) -> float:
        """One conversation; the score of its first reply."""
        session, text = f"s{next(self._sessions)}", request.text
        scores: list[float] = []
        while len(scores) < _TURNS and text != THANKS:
            reply = await self._ask(text, session)
            scores.append(self._user.score(request, reply).total)
            text = self._user.answer(request, reply)
            if self._memory:
                self._remember(text)
        await self._ask(text, session)  # the last words are heard too
        return scores[0]

    async def measured(self, asked: Sequence[UserRequest], folder: ServiceFolder) -> float:
        """The mean score of first replies, in conversations that leave nothing."""
        scores: list[float] = []
        for start in range(0, len(asked), _AT_ONCE):
            some = asked[start : start + _AT_ONCE]
            replies = await asyncio.gather(*(self._ask(one.text, f"s{next(self._sessions)}") for one in some))
            scores += [self._user.score(one, reply).total for one, reply in zip(some, replies, strict=True)]
        judge = ConversationJudge(folder, folder.config, self._pool)
        for episode in list(self._pool.episodes(state="open")):
            await self._service.conversations.end(episode.id)
            self._pool.curate(episode.id, trainable=False)
            await judge(self._pool.episode(episode.id))
        return fmean(scores)

    async def _ask(self, text: str, session: str) -> str:
        self.turns += 1
        status, reply = await self._claw.chat(text, _AGENT, session=session, timeout=600)
        if status != 200:
            raise ClawGymError(f"OpenClaw answered {status} {reply}: see its log")
        return reply

    def _remember(self, answer: str) -> None:
        """Write what the person complains of into a file that OpenClaw shows to the model."""
        notes = self._claw.workspace / _AGENT / "USER.md"
        known = notes.read_text("utf-8").strip() if notes.exists() else ""
        new = [r.instruction for r in RULES.values() if r.complaint in answer and r.instruction not in known]
        if new:
            notes.write_text(" ".join([known, *new]).strip() + "\n", "utf-8")


async def cell(base: Path, out: Path, arm: Arm, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One service and one OpenClaw, from the first version to the last."""
    shutil.rmtree(out, ignore_errors=True)
    folder, began = ServiceFolder(out), time.monotonic()
    folder.create(load_service_config(None, str(base), settings(arm, seed)))
    user, asked = user_of(seed), requests(seed)
    heldout = list(itertools.islice(requests(seed, heldout=True), options.measured))
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(open_service(folder, loops=()))
        pool = stack.enter_context(Pool(folder.pool))
        key = service.keys.make("openclaw")
        model = ModelLink(service.base_url, key, context_window=_WINDOW, max_tokens=_TOKENS)
        home = await asyncio.to_thread((out / "openclaw").absolute)
        claw = await stack.enter_async_context(
            openclaw(installed(), home, {_AGENT: model}, tools={"profile": "minimal", "deny": ["*"]})
        )
        person = Person(user, claw, service, pool, memory=arm in ("memory", "both"))
        before = await person.measured(heldout, folder)
        first, _ = await live(
            folder, service, pool, person.talk, asked, options.conversations, _AT_ONCE, _say, arm != "memory"
        )
        after = await person.measured(heldout, folder)
        versions = service.versions.serving.number
    seconds = time.monotonic() - began
    return {
        "arm": arm, "seed": seed, "rules": list(user.rules), "before": before, "after": after, "versions": versions,
        "first_replies": [round(score, 4) for score in first], "turns": person.turns, "seconds": seconds,
    }  # fmt: skip


async def first_version(config: str, out: Path) -> Path | None:
    """The first policy of ``personal.py`` in ``out``, whose chat template shows of OpenClaw's instructions only the
    content of USER.md."""
    made = await imitated_policy(load_config(config, []), out, on_progress=_progress, stop=asyncio.Event())
    if made is not None:
        settings = made / "tokenizer_config.json"
        about = json.loads(settings.read_text("utf-8"))
        if _NOTES not in about["chat_template"]:
            about["chat_template"] = about["chat_template"].replace(_OPENING, _OPENING + _NOTES + _MISSING)
            settings.write_text(json.dumps(about, indent=2) + "\n", "utf-8")
    return made


async def _run(options: argparse.Namespace) -> int:
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    base = options.model or await first_version(options.config, out / "base")
    assert base is not None
    results = out / "results.jsonl"
    text: str = results.read_text("utf-8") if results.exists() else ""
    done = [json.loads(line) for line in text.splitlines()]
    for seed, arm in itertools.product(range(options.seeds), options.arm or _DEFAULT):
        if any((row["arm"], row["seed"]) == (arm, seed) for row in done):
            continue
        row = await cell(base, out / f"{arm}-{seed}", arm, seed, options)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        done.append(row)
        _report(done, out)
    _report(done, out)
    return 0


def _report(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Print the table, and write ``report.html``."""
    cells = {arm: [row for row in rows if row["arm"] == arm] for arm in ARMS}
    cells = {arm: held for arm, held in cells.items() if held}
    if not cells:
        return
    shown = []
    for arm, held in cells.items():
        last = [row["first_replies"][-len(row["first_replies"]) // 4 :] for row in held]
        about = (
            over_seeds([row["before"] for row in held]),
            over_seeds([fmean(row["first_replies"]) for row in held]),
            over_seeds([fmean(some) for some in last]),
            over_seeds([row["after"] for row in held]),
        )
        change = over_seeds([row["after"] - row["before"] for row in held], least=-1.0)
        pace = fmean(row["seconds"] / row["turns"] for row in held)
        figures = [*map(format_interval, about), format_interval(change, sign=True), f"{pace:.2f}"]
        shown.append([arm, str(len(held)), *figures])
    grid = table("By arm", _COLUMNS, shown, "Intervals (95 %) are over seeds (Student's t).")
    chart = curves("Score of first replies", cells, _AT_ONCE)
    page = experiment_page(experiment(out.resolve().name, charts=[chart], tables=[grid]))
    (out / "report.html").write_text(page, "utf-8")
    print(markdown(grid))


def _progress(what: str, done: int, total: int) -> None:
    if done % max(1, total // 20) == 0:
        _say(f"{what} ({done} of {total})")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="the folder of the first version; default: imitation")
    parser.add_argument(
        "--arm", action="append", choices=ARMS, help=f"may be given several times; default: {', '.join(_DEFAULT)}"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of people and requests, from 0 on")
    parser.add_argument("--conversations", type=int, default=192)
    parser.add_argument("--measured", type=int, default=64, help="held-out requests, before and after")
    parser.add_argument("--config", default="personal-cpu", help="the recipe of the first version")
    parser.add_argument("--out", "-o", type=Path, default=Path("runs/personal-service"))
    try:
        return asyncio.run(_run(parser.parse_args(argv)))
    except ClawGymError as error:
        sys.exit(f"personal_service: {error}")


if __name__ == "__main__":
    sys.exit(main())
