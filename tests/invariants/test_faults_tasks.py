"""A task folder that is changed under a run: what is graded is what the run manifest pins, or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import pytest

import clawgym  # noqa: F401  # registers the ids
from clawgym.agents import OracleAgent, ScriptAgent
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.errors import RunFolderError, TaskError
from clawgym.evaluation.runner import EvalConfig, evaluate
from clawgym.records import Outcome, Task, TaskFile
from clawgym.records.run_folder import RunFolder
from clawgym.sandbox import Backend
from clawgym.tasks.formats import read, write

from ..rollouts import episode_of
from ..verifiers.tasks_for_tests import task
from .faults import LIMITS, SOLVE, check_whole

INPUT, CHECKER, SOLUTION = "input_files/input/numbers.txt", "reward/check.py", "solution/solve.sh"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = task(limits=LIMITS, solution=(TaskFile("solve.sh", SOLVE.encode()),))
    write([made], tmp_path / "bench")
    return tmp_path / "bench" / "sum"


def loaded(folder: Path) -> Task:
    """The task with its hash taken, as a run manifest takes it."""
    made = read(folder.parent).tasks[0]
    assert made.content_hash
    return made


def edit(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def replace_with_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


class Editing(ScriptAgent):
    """Solves the task, while somebody changes its folder."""

    def __init__(self, change: Callable[[], None]) -> None:
        super().__init__(SOLVE.encode(), "editing")
        self._change = change

    async def run(self, context: AgentContext) -> AgentReport:
        self._change()
        return await super().run(context)


@pytest.mark.parametrize("name", [INPUT, CHECKER])
@pytest.mark.parametrize("change", [edit, Path.unlink, replace_with_a_folder])
async def test_before_an_attempt(backend: Backend, folder: Path, name: str, change: Callable[[Path], None]) -> None:
    made = loaded(folder)
    change(folder / name)
    episode = await episode_of(made, OracleAgent(), backend)
    assert episode.outcome is Outcome.INFRA, episode.outcome
    assert (episode.cause or "").startswith("task: ")
    assert Path(name).name in episode.error
    assert "restore it, or" in episode.error or "restore the file" in episode.error
    assert episode.task_hash == made.content_hash


async def test_while_an_attempt_is_at_work(backend: Backend, folder: Path) -> None:
    """It goes on with what it began with: the checker of that hash, the inputs of that hash."""
    made = loaded(folder)

    def change() -> None:
        (folder / CHECKER).write_text("print('{\"made\": 0.0}')")
        (folder / INPUT).write_text("40 2\n")

    episode = await episode_of(made, Editing(change), backend)
    assert episode.outcome is Outcome.SOLVED, episode.cause
    episode = await episode_of(loaded(folder), Editing(lambda: shutil.rmtree(folder)), backend)
    assert episode.outcome is Outcome.FAILED, "the new checker gives nothing"


async def test_a_solution_that_vanishes(backend: Backend, folder: Path) -> None:
    made = loaded(folder)
    (folder / SOLUTION).unlink()
    episode = await episode_of(made, OracleAgent(), backend)
    assert (episode.outcome, episode.error.endswith("restore the file")) == (Outcome.INFRA, True)


async def test_a_file_added_after_reading_is_not_used(backend: Backend, folder: Path) -> None:
    made = loaded(folder)
    (folder / "input_files" / "input" / "more.txt").write_text("7\n")
    counts = "ls input > /tmp/n; mkdir output; echo $(( $(wc -l < /tmp/n) * 6 )) > output/sum.txt"
    assert (await episode_of(made, ScriptAgent(counts.encode(), "x"), backend)).outcome is Outcome.SOLVED


async def test_between_two_sequences_of_a_run(backend: Backend, folder: Path, tmp_path: Path) -> None:
    """The run ends with the episode missing; put back, the same call finishes it; kept, it is refused by name."""
    before = (folder / CHECKER).read_bytes()
    agent = Editing(lambda: edit(folder / CHECKER))

    def config(agent: ScriptAgent) -> EvalConfig:
        return EvalConfig(read(folder.parent), agent, backend, tmp_path / "run", samples=2, concurrency=1)

    summary = await evaluate(config(agent), retry_seconds=0)
    assert summary.missing == ("sum#1",)
    assert summary.outcomes == {"solved": 1}
    assert all("check.py was changed" in cause for cause in summary.infra_causes)
    rows = RunFolder.read(tmp_path / "run").rows
    with pytest.raises(RunFolderError, match=r"tasks\.sum\.hash.*restore the changed tasks"):
        await evaluate(config(agent))
    (folder / CHECKER).write_bytes(before)
    assert (await evaluate(config(Editing(lambda: None)))).complete
    run = RunFolder.read(tmp_path / "run")
    assert run.rows[: len(rows)] == rows
    assert {row["task_hash"] for row in run.rows} == {run.manifest.tasks["sum"]["hash"]}


def reword(bench: Path) -> None:
    entry = bench / "sum" / "data_entry.json"
    entry.write_text(entry.read_text().replace("Write the sum", "Write a sum"))


def another_task(bench: Path) -> None:
    write([task(id="other")], bench.parent / "x")
    (bench.parent / "x" / "other").rename(bench / "other")


async def test_between_a_run_and_its_continuation(backend: Backend, folder: Path, tmp_path: Path) -> None:
    def config() -> EvalConfig:
        return EvalConfig(read(folder.parent), OracleAgent(), backend, tmp_path / "run")

    await evaluate(config())
    before = RunFolder.read(tmp_path / "run").rows
    bench, kept = folder.parent, tmp_path / "kept"
    shutil.copytree(bench, kept)
    changes: dict[str, Callable[[Path], None]] = {
        "sum.hash": lambda bench: edit(bench / "sum" / INPUT),
        "sum.verifier": lambda bench: edit(bench / "sum" / CHECKER),
        "instruction": reword,
        "added": lambda bench: (bench / "sum" / "input_files" / "more.txt").touch(),
        "deleted": lambda bench: (bench / "sum" / INPUT).unlink(),
        "tasks.other": another_task,
    }
    for name, change in changes.items():
        change(bench)
        with pytest.raises(RunFolderError, match=name if "." in name else "sum.hash") as refused:
            await evaluate(config())
        assert str(refused.value).endswith("restore the changed tasks, or choose another --out")
        shutil.rmtree(bench)
        shutil.copytree(kept, bench)
    assert (await evaluate(config())).complete
    check_whole(RunFolder.read(tmp_path / "run"), 1, before)


def test_an_environment_says_so_and_can_be_reset(folder: Path) -> None:
    env = gym.make("ClawGym/terminal-v0", tasks=read(folder.parent))
    _, info = env.reset(seed=0)
    assert "error" not in info
    content = (folder / INPUT).read_bytes()
    edit(folder / INPUT)
    _, info = env.reset(seed=0)
    assert "was changed" in info["error"]
    *_, terminated, truncated, info = env.step(SOLVE)
    assert (terminated, truncated, info["outcome"]) == (False, True, "infra")
    (folder / INPUT).write_bytes(content)
    env.reset(seed=0)
    env.step(SOLVE)
    assert env.step("submit")[4]["outcome"] == "solved"
    env.close()


def test_a_task_that_was_never_readable_is_refused(folder: Path) -> None:
    made = read(folder.parent).tasks[0]
    (folder / INPUT).unlink()
    with pytest.raises(TaskError, match=r"numbers\.txt: cannot be read .* restore the file"):
        made.frozen()
