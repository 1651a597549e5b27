"""An engine that follows the version that answers: no pause, no mixture, and a rollback holds for the next request."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from clawgym.engines.protocol import GenerateRequest, Sampling  # noqa: E402
from clawgym.engines.tiny import make_tiny_model  # noqa: E402
from clawgym.engines.transformers import TransformersEngine  # noqa: E402
from clawgym.errors import EngineError, ServiceError  # noqa: E402
from clawgym.online.serving import KEPT, VersionedEngine, pinned  # noqa: E402
from clawgym.online.versions import Versions  # noqa: E402

from ..engines.exact import assert_exact, sampled  # noqa: E402

PROMPT = [9, 300, 400, 20, 33]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def tuned(model: Path, into: Path, seed: int) -> Any:
    """Save an adapter; returns the model with it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    plain = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    made = peft.get_peft_model(plain, config).eval()
    made.save_pretrained(into)
    return made


@pytest_asyncio.fixture
async def served(model: Path, tmp_path: Path) -> AsyncIterator[tuple[VersionedEngine, Versions]]:
    versions = Versions.create(tmp_path / "versions", model)
    engine = VersionedEngine(TransformersEngine(model), versions)
    yield engine, versions
    await engine.aclose()


async def test_the_next_reply_has_the_promoted_version(
    served: tuple[VersionedEngine, Versions], model: Path, tmp_path: Path
) -> None:
    engine, versions = served
    assert (await sampled(engine, PROMPT, max_tokens=8)).versions == {0}
    expected = {}
    for seed in (1, 2):
        expected[seed] = tuned(model, tmp_path / str(seed), seed)
        versions.add(partial(shutil.copytree, tmp_path / str(seed), dirs_exist_ok=True), parent=0, sessions=[])
        assert (await sampled(engine, PROMPT, max_tokens=8)).versions == {seed - 1}, "a candidate does not answer"
        versions.promote(seed, "better")
        got = await sampled(engine, PROMPT, max_tokens=8)
        assert got.versions == {seed} == {engine.policy_version}
        assert_exact(expected[seed], PROMPT, got)
    code = f"""
from pathlib import Path
from clawgym.online.versions import Versions
Versions(Path({str(versions.path)!r})).roll_back("by hand")
"""
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=True)
    got = await sampled(engine, PROMPT, max_tokens=8)
    assert got.versions == {1}
    assert_exact(expected[1], PROMPT, got)


async def test_streams_end_with_the_version_they_began_with(
    served: tuple[VersionedEngine, Versions], model: Path, tmp_path: Path
) -> None:
    """More promotions than adapters are kept, while replies run: none fails, and none has two versions."""
    engine, versions = served
    tuned(model, tmp_path / "lora", 1)
    copy = partial(shutil.copytree, tmp_path / "lora", dirs_exist_ok=True)
    last = KEPT + 3
    begun = [asyncio.Event() for _ in range(last + 1)]

    async def reply(number: int) -> set[int | None]:
        found: set[int | None] = set()
        async for tokens in engine.generate(GenerateRequest(PROMPT, Sampling(max_tokens=100, seed=number))):
            found.add(tokens.policy_version)
            begun[number].set()
        return found

    running = [asyncio.create_task(reply(0))]
    await begun[0].wait()
    for number in range(1, last + 1):
        versions.add(copy, parent=number - 1, sessions=[])
        versions.promote(number, "better")
        running.append(asyncio.create_task(reply(number)))
        await begun[number].wait()
    assert await asyncio.gather(*running) == [{number} for number in range(last + 1)]


async def test_a_pinned_request_is_answered_by_its_version(
    served: tuple[VersionedEngine, Versions], model: Path, tmp_path: Path
) -> None:
    """The gate samples with a candidate, and a judge with the first version, while another one answers."""
    engine, versions = served
    expected = tuned(model, tmp_path / "lora", 3)
    copy = partial(shutil.copytree, tmp_path / "lora", dirs_exist_ok=True)
    versions.add(copy, parent=0, sessions=[])
    got = await sampled(engine, PROMPT, max_tokens=8, adapter=pinned(1))
    assert_exact(expected, PROMPT, got)
    assert (await sampled(engine, PROMPT, max_tokens=8)).versions == {0}
    versions.promote(1, "better")
    assert (await sampled(engine, PROMPT, max_tokens=8, adapter=pinned(0))).versions == {0}
    with pytest.raises(EngineError, match="no adapter 'policy': name a version"):
        await sampled(engine, PROMPT, max_tokens=8, adapter="policy")
    with pytest.raises(ServiceError, match="there is no version 7"):
        await sampled(engine, PROMPT, max_tokens=8, adapter=pinned(7))


async def test_measurements_run_one_at_a_time_while_users_wait(served: tuple[VersionedEngine, Versions]) -> None:
    engine, _ = served

    def stream(adapter: str | None) -> Any:
        return engine.generate(GenerateRequest(PROMPT, Sampling(max_tokens=400, seed=0), adapter=adapter))

    user = stream(None)
    await anext(user)
    measurements = [stream(pinned(0)) for _ in range(3)]
    first = [asyncio.ensure_future(anext(one)) for one in measurements]
    assert (await asyncio.wait_for(first[0], 60)).ids
    assert not first[1].done()
    assert not first[2].done()
    first[2].cancel()  # gives up while it waits
    await measurements[0].aclose()
    assert (await asyncio.wait_for(first[1], 60)).ids  # one ended, so the next one runs
    more = stream(pinned(0))
    last = asyncio.ensure_future(anext(more))
    await asyncio.sleep(0)
    assert not last.done()
    await user.aclose()
    assert (await asyncio.wait_for(last, 60)).ids  # no user waits
    await measurements[1].aclose()
    await more.aclose()
