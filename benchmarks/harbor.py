"""ClawGym beside Harbor: how fast its environment starts, and whether the rewards are the same.

    python benchmarks/harbor.py speed IMAGE --python VENV/bin/python     # Docker and ClawGym by turns
    python benchmarks/harbor.py parity --python VENV/bin/python          # 50 exported tasks
    python benchmarks/harbor.py parity --python VENV/bin/python --folder HARBOR_TASKS

``VENV`` is a virtual environment of Python 3.12 with ``pip install harbor`` and this checkout.

``speed`` needs a Docker engine with Docker Compose (v2) and an image in it, with bash and a working folder. The same
image is put into the image store. Both environments are started and stopped by turns, from Harbor's own classes, first
alone and then several at once. Then ``harbor run`` plays the oracle with each. The memory of an environment is what
MemAvailable loses while several run.

``parity`` plays every task with its solution, with nothing, and with each of its wrong solutions: by ``harbor run`` in
ClawGym's environment, and by ``clawgym eval``. It prints the rewards that differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

OURS = "clawgym.harbor:Environment"
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "0", "CLAWGYM_LOG": "error"}
TEST = '#!/bin/bash\n[ "$(cat out.txt)" = hi ]\necho $((1 - $?)) > /logs/verifier/reward.txt\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    speed = commands.add_parser("speed")
    speed.add_argument("image", help="an image of the Docker engine")
    speed.add_argument("--rounds", type=int, default=10)
    speed.add_argument("--together", type=int, default=8, help="environments at once")
    speed.add_argument("--trials", type=int, default=16, help="trials of each harbor run")
    parity = commands.add_parser("parity")
    parity.add_argument("--tasks", type=int, default=50)
    parity.add_argument("--folder", type=Path, help="Harbor tasks; without it, tasks of terminal-basic are exported")
    for command in (speed, parity):
        command.add_argument("--python", default=sys.executable, help="a Python with harbor and clawgym")
        command.add_argument("--at-once", type=int, default=8, help="trials at once")
    measure = commands.add_parser("measure")  # what runs in that Python
    measure.add_argument("task", type=Path)
    measure.add_argument("rounds", type=int)
    measure.add_argument("together", type=int)
    args = parser.parse_args()
    if args.command == "measure":
        asyncio.run(measured(args.task, args.rounds, args.together))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            (speeds if args.command == "speed" else rewards)(args, Path(scratch))


# -- speed


def speeds(args: argparse.Namespace, scratch: Path) -> None:
    clawgym = str(Path(args.python).with_name("clawgym"))
    subprocess.run(["docker", "save", args.image, "-o", scratch / "image.tar"], check=True)
    subprocess.run([clawgym, "images", "add", scratch / "image.tar", "--name", args.image], check=True)
    task = scratch / "tasks/write-hi"
    written = {
        "task.toml": f'[environment]\ndocker_image = "{args.image}"\ncpus = 1\nmemory_mb = 512\n',
        "instruction.md": "Write hi to out.txt.\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": "#!/bin/bash\necho hi > out.txt\n",
    }
    for name, text in written.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    (task / "environment").mkdir()
    command = [args.python, "-P", __file__, "measure", str(task), str(args.rounds), str(args.together)]
    subprocess.run(command, check=True, env=os.environ | QUIET)
    print(f"\nharbor run -a oracle, {args.trials} trials, {args.at_once} at once")
    for kind in ("docker", OURS):
        begun = time.monotonic()
        found = played(args, task.parent, "oracle", kind, scratch / f"jobs-{kind[:6]}", args.trials)
        solved = sum(reward == 1.0 for reward in found.values())
        seconds = [timed(result) for result in results(scratch / f"jobs-{kind[:6]}")]
        print(
            f"{label(kind):8} {solved}/{args.trials} solved, {time.monotonic() - begun:6.1f} s in all, "
            f"median seconds of a trial {median(one['trial'] for one in seconds):5.2f}, "
            f"of its start {median(one['environment_setup'] for one in seconds):5.2f}"
        )


def label(kind: str) -> str:
    return "clawgym" if kind == OURS else kind


def timed(result: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a trial and of its environment's start, by Harbor's own clock."""
    from datetime import datetime

    def length(part: Mapping[str, str]) -> float:
        ended, began = (datetime.fromisoformat(part[name]) for name in ("finished_at", "started_at"))
        return (ended - began).total_seconds()

    return {"trial": length(result), "environment_setup": length(result["environment_setup"])}


async def measured(task: Path, rounds: int, together: int) -> None:
    from harbor.environments.docker.docker import DockerEnvironment
    from harbor.models.task.task import Task
    from harbor.models.trial.paths import TrialPaths

    from clawgym.harbor import Environment

    logging.disable(logging.WARNING)
    kinds = {"docker": DockerEnvironment, "clawgym": Environment}
    count = 0

    def make(kind: str, scratch: str) -> Any:
        nonlocal count
        count += 1
        paths = TrialPaths(Path(scratch) / f"trial-{count}")
        paths.mkdir()
        config = Task(task).config.environment
        return kinds[kind](task / "environment", task.name, f"bench-{os.getpid()}-{count}__env", paths, config)

    async def one(
        kind: str, scratch: str, together: asyncio.Barrier | None = None, looked: asyncio.Event | None = None
    ) -> tuple[float, float, float]:
        environment = make(kind, scratch)
        begun = time.monotonic()
        await environment.start(force_build=False)
        started = time.monotonic()
        done = await environment.exec("echo hi")
        ran = time.monotonic()
        assert (done.stdout or "").strip() == "hi", done
        if together is not None and looked is not None:
            await together.wait()
            await looked.wait()
        stopping = time.monotonic()
        await environment.stop(delete=True)
        return started - begun, ran - started, time.monotonic() - stopping

    with tempfile.TemporaryDirectory() as scratch:
        first = {kind: await one(kind, scratch) for kind in kinds}
        alone: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind in kinds:
                alone[kind].append(await one(kind, scratch))
        print(f"seconds, median of {rounds}      start     one command    stop      first start")
        for kind, found in alone.items():
            middle = [median(column) for column in zip(*found, strict=True)]
            print(f"{kind:20} {middle[0]:12.3f} {middle[1]:12.3f} {middle[2]:12.3f} {first[kind][0]:12.3f}")
        ratios = [median(column[i] for column in alone["docker"]) for i in (0, 2)]
        ours = [median(column[i] for column in alone["clawgym"]) for i in (0, 2)]
        print(f"Docker takes {ratios[0] / ours[0]:.0f} times as long to start, {ratios[1] / ours[1]:.0f} to stop")
        print(f"\n{together} at once       all started    memory of one")
        for kind in kinds:
            started, looked = asyncio.Barrier(together + 1), asyncio.Event()
            before, begun = available(), time.monotonic()
            async with asyncio.TaskGroup() as group:
                for _ in range(together):
                    group.create_task(one(kind, scratch, started, looked))
                await started.wait()
                took, lost = time.monotonic() - begun, before - available()
                looked.set()
            print(f"{kind:20} {took:8.2f} s   {lost / together:8.1f} MiB")


def available() -> float:
    """MemAvailable, in MiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no MemAvailable in /proc/meminfo: use Linux")


# -- rewards


def rewards(args: argparse.Namespace, scratch: Path) -> None:
    tasks = args.folder or exported(args, scratch / "tasks")
    wrong = with_wrong_solutions(tasks, scratch / "wrong")
    clawgym = str(Path(args.python).with_name("clawgym"))
    differ = 0
    parts = [("solutions", tasks, "oracle", "oracle"), ("nothing", tasks, "nop", "noop")]
    parts += [("wrong solutions", wrong, "oracle", "oracle")] if wrong.is_dir() else []
    for what, folder, theirs, ours in parts:
        harbor = played(args, folder, theirs, OURS, scratch / f"jobs-{what}", 1)
        out = scratch / f"run-{what}"
        command = [clawgym, "eval", str(folder), "--agent", ours, "--out", str(out), "-j", str(args.at_once)]
        subprocess.run(
            command, check=True, env=os.environ | QUIET, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
        mine = {row["task_id"]: (row["result"] or {}).get("official", row["outcome"]) for row in rows}
        same = [name for name in mine if _equal(harbor.get(name), mine[name])]
        differ += len(mine) - len(same)
        numbers = [value for value in mine.values() if isinstance(value, float | int)]
        mean = f"mean reward {sum(numbers) / len(numbers):.3f}" if numbers else "no reward"
        print(f"{what:16} {len(same)} of {len(mine)} the same, {mean}", flush=True)
        for name in sorted(mine.keys() - set(same)):
            print(f"  {name}: Harbor {harbor.get(name)}, ClawGym {mine[name]}")
    print(f"{differ} rewards differ")


def _equal(theirs: Any, ours: Any) -> bool:
    return isinstance(theirs, float) and isinstance(ours, float | int) and abs(theirs - ours) < 1e-6


def exported(args: argparse.Namespace, folder: Path) -> Path:
    """The first tasks of terminal-basic, one half held out, as Harbor folders."""
    code = (
        "import sys, clawgym; from pathlib import Path; from clawgym.tasks.formats.harbor import write_task\n"
        "out, most = Path(sys.argv[1]), int(sys.argv[2]); out.mkdir(); left = most\n"
        "for split, n in (('heldout', (most + 1) // 2), ('train', most // 2)):\n"
        "    for task in clawgym.load(f'terminal-basic:{split}').tasks[:n]: write_task(task, out / task.id)\n"
    )
    subprocess.run([args.python, "-P", "-c", code, folder, str(args.tasks)], check=True)
    return folder


def with_wrong_solutions(tasks: Path, folder: Path) -> Path:
    """A copy of each task for each wrong solution, which takes the place of the solution."""
    for task in sorted(path for path in tasks.iterdir() if (path / "wrong").is_dir()):
        for script in sorted((task / "wrong").glob("*.sh")):
            copy = folder / f"{task.name}--{script.stem}"
            shutil.copytree(task, copy, ignore=shutil.ignore_patterns("solution", "wrong"))
            (copy / "solution").mkdir()
            shutil.copy(script, copy / "solution/solve.sh")
    return folder


# -- harbor run


def played(
    args: argparse.Namespace, tasks: Path, agent: str, kind: str, jobs: Path, attempts: int
) -> dict[str, float | str]:
    """Name of the task -> reward, or the name of the exception. With several attempts: of each trial."""
    harbor = str(Path(args.python).with_name("harbor"))
    command = [harbor, "run", "-p", str(tasks), "-a", agent, "--env", kind, "-o", str(jobs), "-q"]
    command += ["-k", str(attempts), "-n", str(args.at_once)]
    done = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"harbor run failed: {(done.stdout + done.stderr)[-2000:]}")
    found: dict[str, float | str] = {}
    for result in results(jobs):
        name = Path(result["task_id"]["path"]).name if attempts == 1 else result["trial_name"]
        verified, failed = result["verifier_result"], result["exception_info"]
        given = (verified or {}).get("rewards") or {}
        reward = given.get("reward", fmean(given.values()) if given else float("nan"))
        found[name] = failed["exception_type"] if failed else float(reward)
    return found


def results(jobs: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(jobs.glob("*/*/result.json"))]


if __name__ == "__main__":
    main()
