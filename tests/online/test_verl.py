"""A service that trains on two ranks of verl, on CPUs: killed and resumed, it makes the versions of the local one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("verl")

import psutil  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from clawgym.engines.tiny import make_tiny_model  # noqa: E402
from clawgym.errors import TrainingError  # noqa: E402
from clawgym.gateway.render import Renderer  # noqa: E402
from clawgym.online.config import ServiceFolder, load_service_config  # noqa: E402
from clawgym.online.training import VersionTrainer  # noqa: E402
from clawgym.online.versions import Versions  # noqa: E402
from clawgym.pool import EpisodeEnd, Pool  # noqa: E402
from clawgym.pool.states import PROCESS_REWARD  # noqa: E402
from clawgym.records import Outcome, Turn  # noqa: E402
from clawgym.records.judge import Judgement  # noqa: E402

LR, TOLERANCE = 1e-3, 1e-5
"""An update moves a weight by about the learning rate. Two summation orders differ by much less."""
SETTINGS = [
    "redact=false", "held_out=0", "gate.on=false", "training.rollout.groups=2", "training.algorithm.old=recompute",
    "training.distillation.hints=1", f"training.optimizer.lr={LR}", "training.compute.micro_tokens=512",
]  # fmt: skip
RANKS = ["training.trainer=verl", "training.verl.engine=transformers", "training.verl.ranks=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", spread=0.05)


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> ServiceFolder:
    """A service with four judged conversations, for two steps. Half of the replies are liked; each has a hint."""
    made = ServiceFolder(tmp_path / "service")
    made.create(load_service_config(None, str(model), SETTINGS))
    Versions.create(made.versions, model)
    renderer = Renderer(model)
    with Pool(made.pool) as pool:
        for number in range(4):
            id = pool.open_episode(channel="live:user")
            asked: Any = {"role": "user", "content": f"Tell me about {number} rivers."}
            reply = tuple(range(20 + number, 26 + number))
            pool.append(
                [(id, 0, Turn(renderer.prompt([asked]), reply, (-6.4,) * 6, 0, messages=(asked,),
                              reply={"role": "assistant", "content": "Hm."}))]
            )  # fmt: skip
            said = Judgement((1 if number % 2 else -1,), ("",), "test", "0", ("Name the longest one first.",))
            pool.set_turn_rewards(id, {0: float(said.votes[0] or 0)}, name=PROCESS_REWARD, about={0: said.about()})
            pool.close_episode(id, EpisodeEnd(outcome=Outcome.SOLVED))
    return made


def copied(folder: ServiceFolder, model: Path, name: str, settings: Sequence[str] = ()) -> ServiceFolder:
    """A service with the same conversations."""
    made = ServiceFolder(folder.path.with_name(name))
    shutil.copytree(folder.path, made.path)
    made.create(load_service_config(None, str(model), [*SETTINGS, *settings]))
    return made


class Loop:
    """The training loop of a service, as the service runs it."""

    def __init__(self, folder: ServiceFolder, ray: str) -> None:
        self._log = folder.path / "train.log"
        command = [sys.executable, "-m", "clawgym.online.loops", "train", str(folder.path)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": ray}
        )

    def wait(self, there: Callable[[], bool]) -> list[psutil.Process]:
        """Wait for it; returns the processes of Ray that run then."""
        while not there():
            assert self.process.poll() is None, self._log.read_text()[-3000:]
            time.sleep(0.02)
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self, left: Sequence[psutil.Process]) -> None:
        """End it by SIGKILL: nothing of it is left."""
        self.process.kill()
        self.process.wait()
        assert left
        assert psutil.wait_procs(left, timeout=30)[1] == []


@contextmanager
def short_folder() -> Iterator[str]:
    """A folder for Ray, whose sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="claw-", dir="/tmp", ignore_cleanup_errors=True) as where:
        yield where


@pytest.mark.timeout(1500)
async def test_a_killed_trainer_on_ranks_makes_the_versions_of_the_local_one(
    model: Path, folder: ServiceFolder
) -> None:
    """Killed in its first step and in its second one, and then stopped."""
    local, ranked = copied(folder, model, "local"), copied(folder, model, "ranked", RANKS)
    with Pool(local.pool) as pool:
        trainer = VersionTrainer(local, pool)
        assert await trainer.step()
        assert await trainer.step()
        assert not await trainer.step()
    plan = ranked.training / "plan.json"

    def under_way(step: int) -> bool:
        return plan.exists() and json.loads(plan.read_bytes())["step"] == step

    with short_folder() as ray:
        for step in range(2):
            loop = Loop(ranked, ray)
            loop.kill(loop.wait(lambda step=step: under_way(step)))
            assert len(Versions(ranked.versions).all()) == step + 1, "it was killed in time"
        loop = Loop(ranked, ray)
        left = loop.wait(lambda: len(Versions(ranked.versions).all()) == 3 and not plan.exists())
        loop.process.terminate()
        assert loop.process.wait(timeout=120) == 0, (ranked.path / "train.log").read_text()[-3000:]
        assert psutil.wait_procs(left, timeout=30)[1] == []
        assert list(Path(ray).iterdir()) == []

    with Pool(ranked.pool) as pool:
        assert pool.stats()["channels"]["live:user"]["groups"] == {"consumed": 4}
    ours, theirs = (Versions(one.versions).all()[1:] for one in (local, ranked))
    assert [one.sessions for one in theirs] == [one.sessions for one in ours], "each conversation is trained on once"
    before: dict[str, Any] | None = None
    for one, other in zip(ours, theirs, strict=True):
        assert other.parent == one.parent
        assert other.about["metrics"]["opd/turns_taught"] == 2
        assert sorted(file.name for file in other.folder.iterdir()) == sorted(f.name for f in one.folder.iterdir())
        for name in ("tokenizer.json", "chat_template.jinja"):
            assert (one.folder / name).exists() == (other.folder / name).exists()
        wanted, found = (load_file(v.folder / "adapter_model.safetensors") for v in (one, other))
        assert wanted.keys() == found.keys()
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=TOLERANCE)
        if before is not None:
            assert max(float((found[name] - before[name]).abs().max()) for name in found) > LR / 2
        before = found


def test_what_ranks_do_not_support_is_refused() -> None:
    for setting, why in (
        ("training.model.quantize=4bit", "training.model.quantize: not supported by trainer: verl"),
        ("training.distillation.loss=topk", "training.distillation.loss: not supported by trainer: verl"),
        ("training.compute.device=cuda", "training.verl.engine: not supported by trainer: verl"),
        ("training.algorithm.imitation=1", "training.algorithm.imitation: not supported by trainer: verl"),
    ):
        with pytest.raises(TrainingError, match=why):
            load_service_config(None, "model", [*RANKS, setting])
