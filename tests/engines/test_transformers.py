"""The transformers engine samples exactly as a plain forward pass, however requests are batched."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from clawgym.engines import _crew  # noqa: E402
from clawgym.engines.protocol import GenerateRequest, Image, Sampling, TokenEngine  # noqa: E402
from clawgym.engines.tiny import make_tiny_model  # noqa: E402
from clawgym.engines.transformers import TransformersEngine  # noqa: E402
from clawgym.errors import ContextLengthExceeded, EngineError  # noqa: E402

from .exact import assert_exact, log_softmax, sampled, until  # noqa: E402

VOCAB = 704


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


@pytest_asyncio.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(folder)
    yield made
    await made.aclose()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed} {length}")
    return [rng.randrange(VOCAB) for _ in range(length)]


async def test_it_is_a_token_engine(engine: TransformersEngine, folder: Path) -> None:
    assert isinstance(engine, TokenEngine)
    assert engine.tokenizer == str(folder)
    assert engine.context_window == 32768
    manifest = engine.identity()
    assert manifest["name"] == "transformers"
    assert manifest["dtype"] == "float32"


@pytest.mark.parametrize("length", [1, 9, 300])
async def test_greedy_is_generate(engine: TransformersEngine, plain: Any, length: int) -> None:
    prompt = prompt_of(length)
    got = await sampled(engine, prompt, temperature=0, max_tokens=40)
    want = plain.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert got.ids == want[0].tolist()[length:]
    assert_exact(plain, prompt, got, 0)
    assert got.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
async def test_logprobs_are_those_of_a_plain_forward(
    engine: TransformersEngine, plain: Any, temperature: float
) -> None:
    prompts = [prompt_of(n) for n in (1, 5, 40, 260, 700)]
    results = await asyncio.gather(*(sampled(engine, p, temperature=temperature, max_tokens=60) for p in prompts))
    for prompt, got in zip(prompts, results, strict=True):
        assert len(got.ids) == 60
        assert_exact(plain, prompt, got, temperature)


async def test_log_probs_ignore_top_k_and_top_p(engine: TransformersEngine, plain: Any) -> None:
    prompt = prompt_of(12)
    few, half, both = await asyncio.gather(
        sampled(engine, prompt, top_k=3, max_tokens=50),
        sampled(engine, prompt, top_p=0.5, max_tokens=50),
        sampled(engine, prompt, top_k=20, top_p=0.3, temperature=0.8, max_tokens=50),
    )
    assert_exact(plain, prompt, few)
    assert_exact(plain, prompt, half)
    assert_exact(plain, prompt, both, 0.8)
    rows = log_softmax(plain, prompt + few.ids)[len(prompt) - 1 : -1]
    assert all(token in row.topk(3).indices for token, row in zip(few.ids, rows, strict=True))
    rows = log_softmax(plain, prompt + half.ids)[len(prompt) - 1 : -1].exp()
    for token, row in zip(half.ids, rows, strict=True):
        assert float(row[row > row[token]].sum()) < 0.5 + 1e-4


async def test_a_session_computes_only_what_is_new(engine: TransformersEngine, plain: Any) -> None:
    history, before = prompt_of(200), 0
    for turn in range(4):
        got = await sampled(engine, history, max_tokens=30)
        assert_exact(plain, history, got)
        known = 0 if turn == 0 else before + 29  # the last id sampled was never fed
        assert got.cached == known // 16 * 16
        before = len(history)
        history = history + got.ids + prompt_of(25, turn)
    branch = history[:150] + prompt_of(30, 9)
    got = await sampled(engine, branch, max_tokens=10)
    assert got.cached == 144
    assert_exact(plain, branch, got)


async def test_a_group_computes_its_prompt_once(engine: TransformersEngine, plain: Any) -> None:
    prompt = prompt_of(1200)
    group = await asyncio.gather(*(sampled(engine, prompt, max_tokens=5, seed=i) for i in range(8)))
    assert sorted(g.cached for g in group) == [0] + 7 * [1199 // 16 * 16]
    assert len({tuple(g.ids) for g in group}) > 1
    for got in group:
        assert_exact(plain, prompt, got)


@pytest.mark.parametrize(
    "settings", [{"prefill_chunk": 7}, {"kv_tokens": 1}, {"max_batch": 2}, {"context_window": 400}]
)
async def test_small_settings_change_nothing_that_is_sampled(
    folder: Path, plain: Any, settings: dict[str, int]
) -> None:
    prompts = [prompt_of(n) for n in (1, 20, 100, 300)]
    wide, narrow = TransformersEngine(folder), TransformersEngine(folder, **settings)
    try:
        for engine in (wide, narrow):
            results = await asyncio.gather(*(sampled(engine, p, max_tokens=30, seed=i) for i, p in enumerate(prompts)))
            for prompt, got in zip(prompts, results, strict=True):
                assert_exact(plain, prompt, got)
            if engine is wide:
                first = results
        assert [g.ids for g in results] == [g.ids for g in first]
    finally:
        await wide.aclose()
        await narrow.aclose()


async def test_seed_gives_the_same_ids_in_any_batch(engine: TransformersEngine) -> None:
    prompt = prompt_of(30)
    alone = await sampled(engine, prompt, seed=7, max_tokens=40)
    others = [sampled(engine, prompt_of(n, 1), max_tokens=3 * n) for n in range(1, 20)]
    crowded, *_ = await asyncio.gather(sampled(engine, prompt, seed=7, max_tokens=40), *others)
    again, other, unseeded, unseeded_too = await asyncio.gather(
        sampled(engine, prompt, seed=7, max_tokens=40),
        sampled(engine, prompt, seed=8, max_tokens=40),
        sampled(engine, prompt, max_tokens=40),
        sampled(engine, prompt, max_tokens=40),
    )
    assert alone.ids == crowded.ids == again.ids
    assert len({tuple(s.ids) for s in (alone, other, unseeded, unseeded_too)}) == 4


async def test_turns_of_one_seed_draw_their_own_numbers(engine: TransformersEngine) -> None:
    """The likelihoods of this model are nearly equal, so an id says which number was drawn."""
    first, later = prompt_of(9), prompt_of(30)
    drawn = [
        [(await sampled(engine, prompt, seed=seed, max_tokens=1)).ids[0] for seed in range(100)]
        for prompt in (first, later)
    ]
    assert abs(np.corrcoef(drawn)[0, 1]) < 0.4  # four standard errors


async def test_ends(engine: TransformersEngine, folder: Path) -> None:
    prompt = prompt_of(10)
    free = await sampled(engine, prompt, seed=1, max_tokens=30)
    stop = free.ids[12]
    first = free.ids.index(stop)
    stopped = await sampled(engine, prompt, seed=1, max_tokens=30, stop_ids=frozenset({stop}))
    assert stopped.finish_reason == "stop"
    assert stopped.ids == free.ids[: first + 1]
    one = await sampled(engine, prompt, max_tokens=1)
    assert (len(one.ids), one.finish_reason) == (1, "length")
    small = TransformersEngine(folder, context_window=32)
    try:
        full = await sampled(small, prompt)
        assert (len(full.ids), full.finish_reason) == (22, "length")
        assert len((await sampled(small, prompt_of(31), max_tokens=9)).ids) == 1
        with pytest.raises(ContextLengthExceeded, match="32 tokens and the context window is 32"):
            await sampled(small, prompt_of(32))
    finally:
        await small.aclose()


async def test_tokens_come_as_they_are_sampled(engine: TransformersEngine) -> None:
    assert (await sampled(engine, prompt_of(5), max_tokens=50)).pieces > 1  # how many depends on who else computes


@pytest.mark.parametrize(
    ("prompt", "wrong", "message"),
    [
        ([], {}, "at least one message"),
        ([3, VOCAB], {}, "prompt id 704 is not in the vocabulary of 704"),
        ([-1], {}, "prompt id -1"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": -0.5}, "top_p"),
        ([1], {"top_p": 1.5}, "top_p"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"adapter": "x"}, "no adapter 'x'"),
        ([1], {"json_schema": {}}, "does not constrain"),
    ],
)
async def test_invalid_requests_are_refused(
    engine: TransformersEngine, prompt: list[int], wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        await sampled(engine, prompt, **wrong)
    assert (caught.value.status, caught.value.retryable) == (400, False)
    assert len((await sampled(engine, [1], max_tokens=2)).ids) == 2


async def test_images_are_refused(engine: TransformersEngine) -> None:
    with pytest.raises(EngineError, match="no images"):
        await anext(aiter(engine.generate(GenerateRequest([1], Sampling(), images=[Image("0" * 64, b"")]))))


async def test_closed_iterator_frees_its_memory(folder: Path, plain: Any) -> None:
    engine = TransformersEngine(folder, max_batch=2)
    try:
        left = [
            engine.generate(GenerateRequest(prompt_of(9, i), Sampling())) for i in range(5)
        ]  # to the end of the window
        await anext(left[0])
        await anext(left[1])
        pending = [asyncio.ensure_future(anext(i)) for i in left[2:]]
        await until(lambda: engine.occupancy()["waiting"] == 3)
        assert engine.occupancy()["running"] == 2
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for iterator in left:
            await iterator.aclose()
        await until(lambda: engine.occupancy()["running"] == engine.occupancy()["waiting"] == 0)
        assert engine.occupancy()["held"] == 0
        got = await sampled(engine, prompt_of(9), max_tokens=5)
        assert_exact(plain, prompt_of(9), got)
    finally:
        await engine.aclose()


async def test_sleep_waits_for_what_runs_and_frees_what_is_kept(folder: Path, plain: Any) -> None:
    engine = TransformersEngine(folder)
    try:
        prompt = prompt_of(40)
        running = asyncio.ensure_future(sampled(engine, prompt, max_tokens=60))
        await until(lambda: engine.occupancy()["running"] == 1)
        await engine.sleep()
        assert engine.occupancy() == {"waiting": 0, "running": 0, "held": 0, "kept": 0}
        assert len((await running).ids) == 60
        assert_exact(plain, prompt, await sampled(engine, prompt, max_tokens=9))
        assert engine.occupancy()["kept"] > 0
    finally:
        await engine.aclose()


async def test_memory_does_not_grow(folder: Path) -> None:
    engine = TransformersEngine(folder, kv_tokens=2000)
    try:
        for round_ in range(20):
            await asyncio.gather(
                *(sampled(engine, prompt_of(10 + 7 * i, round_), max_tokens=1 + i % 5) for i in range(30))
            )
            there = engine.occupancy()
            assert there["kept"] <= 2000
        await until(lambda: engine.occupancy()["running"] == 0)
        assert engine.occupancy()["held"] == 0
        gc.collect()
        names = ("Request", "Stream", "Piece")
        ours = [o for o in gc.get_objects() if str(type(o).__module__).startswith("clawgym.engines.")]
        assert sum(type(o).__name__ in names for o in ours) < 40
    finally:
        await engine.aclose()


async def test_closing_ends_waiting_requests(folder: Path) -> None:
    engine = TransformersEngine(folder, max_batch=1)
    waiting = [asyncio.ensure_future(sampled(engine, prompt_of(3, i))) for i in range(3)]
    await until(lambda: engine.occupancy()["running"] == 1)
    await engine.aclose()
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, EngineError)
    with pytest.raises(EngineError, match="make a new one"):
        await sampled(engine, [1])
    await engine.aclose()


async def test_a_model_that_breaks_ends_every_wait(folder: Path) -> None:
    engine = TransformersEngine(folder)

    def broken(*_: Any) -> None:
        raise RuntimeError("a wire came loose")

    running = asyncio.ensure_future(sampled(engine, prompt_of(3), max_tokens=300))
    await until(lambda: engine.occupancy()["running"] == 1)
    # Weights are changed when the first has finished; the others wait for it.
    change = engine.update_weights(lambda model: model.get_input_embeddings().register_forward_pre_hook(broken), 1)
    after = [sampled(engine, prompt_of(3, i)) for i in range(3)]
    first, _, *rest = await asyncio.gather(running, change, *after, return_exceptions=True)
    assert len(first.ids) == 300
    for result in rest:
        assert isinstance(result, EngineError)
        assert "a wire came loose" in str(result)
    with pytest.raises(EngineError, match="a wire came loose"):
        await sampled(engine, [1])
    with pytest.raises(EngineError, match="a wire came loose"):
        await engine.update_weights(lambda _: None, 2)
    await engine.aclose()


async def test_damaged_weights_are_named(engine: TransformersEngine, plain: Any) -> None:
    good = {n: p.clone() for n, p in plain.state_dict().items()}
    bad = {n: p * float("nan") for n, p in good.items()}
    await engine.update_weights(bad, 1)
    with pytest.raises(EngineError, match="not finite"):
        await sampled(engine, prompt_of(40), max_tokens=3)
    await engine.update_weights(good, 2)
    got = await sampled(engine, prompt_of(40), max_tokens=3)
    assert_exact(plain, prompt_of(40), got)


def test_two_loops_one_after_the_other(folder: Path) -> None:
    engine = TransformersEngine(folder)
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        abandoned = engine.generate(GenerateRequest(prompt_of(4), Sampling()))
        loop.run_until_complete(anext(aiter(abandoned)))
    assert len(asyncio.run(sampled(engine, prompt_of(4), max_tokens=9)).ids) == 9
    asyncio.run(engine.aclose())


NO_MEMORY = """
    import asyncio, resource, sys, torch
    torch.set_num_threads(1)
    from clawgym.engines.protocol import GenerateRequest, Sampling
    from clawgym.engines.transformers import TransformersEngine
    from clawgym.errors import EngineError

    async def main():
        engine = TransformersEngine(sys.argv[1], kv_tokens=10**9)
        async def run(length, most):
            asked = GenerateRequest([5] * length, Sampling(max_tokens=most))
            return [i async for t in engine.generate(asked) for i in t.ids]
        await run(100, 3)
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + 100 * 2**20,) * 2)
        small = asyncio.ensure_future(run(50, 40))
        try:
            await run(32000, 3)
        except EngineError as error:
            print("REFUSED", error.retryable, error)
        print(len(await small), len(await run(100, 3)))
        await engine.aclose()

    asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and /proc")
def test_no_memory_fails_one_request_not_the_engine(tmp_path: Path) -> None:
    wide = make_tiny_model(tmp_path / "wide", layers=6, heads=8, kv_heads=8)  # 12 KiB a token
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NO_MEMORY), str(wide)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1:] == ["40 3"], done.stdout + done.stderr
    assert "REFUSED True no memory left for a sequence of 32000 tokens" in done.stdout


def test_it_ends_with_the_interpreter(folder: Path) -> None:
    code = (
        "import sys; from clawgym.engines.transformers import TransformersEngine; "
        "engine = TransformersEngine(sys.argv[1]); print('made')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "made\n"), done.stderr


# Random schedules

TREE = [prompt_of(n, n) for n in (1, 17, 64, 130)]


@st.composite
def schedules(draw: st.DrawFn) -> list[dict[str, Any]]:
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        parts = draw(st.lists(st.sampled_from(TREE), min_size=1, max_size=3))
        requests.append(
            {
                "prompt": [i for part in parts for i in part],
                "wait": draw(st.integers(0, 20)),
                "max_tokens": draw(st.sampled_from([1, 2, 15, 60])),
                "temperature": draw(st.sampled_from([0.0, 0.5, 1.0])),
                "seed": draw(st.integers(0, 3)),
                "leave_after": draw(st.sampled_from([None, None, None, 1, 7])),
            }
        )
    return requests


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    schedule=schedules(),
    chunk=st.sampled_from([3, 64, 512]),
    rows=st.sampled_from([1, 3, 64]),
    threads=st.sampled_from([1, 3]),
)
def test_any_schedule_is_exact(
    folder: Path, plain: Any, schedule: list[dict[str, Any]], chunk: int, rows: int, threads: int
) -> None:
    async def one(engine: TransformersEngine, request: dict[str, Any]) -> None:
        for _ in range(request["wait"]):
            await asyncio.sleep(0.001)
        chosen = {k: request[k] for k in ("max_tokens", "temperature", "seed")}
        if request["leave_after"] is None:
            got = await sampled(engine, request["prompt"], **chosen)
            assert len(got.ids) == request["max_tokens"]
            assert got.cached < len(request["prompt"])
            assert_exact(plain, request["prompt"], got, request["temperature"])
        else:
            async with contextlib.aclosing(
                engine.generate(GenerateRequest(request["prompt"], Sampling(**chosen)))
            ) as tokens:
                seen = 0
                async for piece in tokens:
                    seen += len(piece.ids)
                    if seen >= request["leave_after"]:
                        break

    async def main() -> None:
        engine = TransformersEngine(folder, prefill_chunk=chunk, max_batch=rows, kv_tokens=3000, threads=threads)
        try:
            await asyncio.gather(*(one(engine, r) for r in schedule))
            await until(lambda: engine.occupancy()["running"] == 0)
            assert engine.occupancy()["held"] == 0
        finally:
            await engine.aclose()

    with mock.patch.object(_crew, "WORTH", 1.0):  # so that steps of this small model are divided
        asyncio.run(main())
    torch.set_num_threads(1)
