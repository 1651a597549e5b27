"""The teacher is the policy with a hint; it scores exactly the sampled ids, or there is none."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from clawgym.engines.protocol import GenerateRequest, Sampling
from clawgym.engines.transformers import TransformersEngine
from clawgym.gateway.render import Renderer
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.records import Turn, prompt_ids
from clawgym.rewards.hints import (
    HintedTurn,
    NoTeacher,
    Teacher,
    choose,
    hinted_prompt,
    teach,
    tools_of,
    with_hint,
)
from clawgym.rewards.scoring import Scored, ScoreRequest, TorchScorer

from ..gateway.scripted import ScriptedEngine

HINT = "Read the whole file before you change a line."
TOOLS = [
    {"type": "function", "function": {"name": "bash", "description": "run", "parameters": {"type": "object"}}},
]
"""Their keys are not in the order of the alphabet, in which the gateway keeps them."""


@dataclass
class Played:
    """A conversation through a real gateway."""

    turns: tuple[Turn, ...]
    tools: list[dict[str, Any]]


async def play(engine: Any, folder: Path, *, tools: bool, system: bool, temperature: float = 1.0) -> Played:
    import openai

    with Pool(folder / f"{random.getrandbits(40)}.db") as pool:
        async with Gateway(engine, pool) as gateway:
            await gateway.listen()
            session = await gateway.open_session()
            messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if system else []
            more: dict[str, Any] = {"tools": TOOLS} if tools else {}
            url = gateway.base_url(session)
            async with openai.AsyncOpenAI(base_url=url, api_key=session.secret, max_retries=0) as client:
                for number in range(3):
                    messages.append({"role": "user", "content": f"Question {number}: how many files are there?"})
                    answer = await client.chat.completions.create(
                        model="policy", messages=messages, max_tokens=24, seed=number, temperature=temperature, **more
                    )
                    reply = answer.choices[0].message.model_dump(exclude_none=True)
                    messages.append({"role": "assistant", "content": reply.get("content", "")})
        turns = pool.turns(session.id)
        return Played(turns, tools_of(pool, turns, 0))


@pytest.fixture(scope="module")
def renderer(model_folder: Path) -> Renderer:
    return Renderer(model_folder)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def played(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Played]:
    """Conversations that the tiny model took part in."""
    folder = tmp_path_factory.mktemp("played")
    engine = TransformersEngine(model_folder, context_window=4096, kv_tokens=8192)
    try:
        return {
            "plain": await play(engine, folder, tools=False, system=False),
            "tools": await play(engine, folder, tools=True, system=True),
            "warm": await play(engine, folder, tools=True, system=False, temperature=1.7),
        }
    finally:
        await engine.aclose()


@pytest.mark.parametrize("which", ["plain", "tools", "warm"])
async def test_without_a_hint_the_teacher_gives_the_rollouts_own_logprobs(
    played: dict[str, Played], model: Any, which: str
) -> None:
    turns = played[which].turns
    assert [turn.parent for turn in turns] == [None, 0, 1]
    scorer = TorchScorer(model, chunk=5)
    for index, turn in enumerate(turns):
        temperature = turn.sampling["temperature"]
        (scored,) = await scorer.score([ScoreRequest(prompt_ids(turns, index), turn.sampled_ids, 3, temperature)])
        np.testing.assert_allclose(scored.logprobs, turn.logprobs, atol=1e-5, rtol=0)
        assert scored.top_ids.shape == scored.top_logprobs.shape == (len(turn.sampled_ids), 3)


@pytest.mark.parametrize("which", ["plain", "tools", "warm"])
async def test_a_hint_changes_the_logprobs_and_nothing_else(
    played: dict[str, Played], model: Any, renderer: Renderer, which: str
) -> None:
    turns, tools = played[which].turns, played[which].tools
    for index, turn in enumerate(turns):
        (taught,) = await teach([HintedTurn(turns, index, [HINT], tools)], renderer, TorchScorer(model), top_k=4)
        assert isinstance(taught, Teacher)
        assert taught.logprobs.shape == (len(turn.sampled_ids),)
        assert np.abs(taught.logprobs - np.array(turn.logprobs)).max() > 1e-3
        prompt = hinted_prompt(turns, index, HINT, renderer, tools)
        assert prompt is not None
        # By hand: a plain forward pass over the very ids.
        with torch.no_grad():
            logits = (
                model(torch.tensor([[*prompt, *turn.sampled_ids]])).logits[0].float() / turn.sampling["temperature"]
            )
        wanted = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(turn.sampled_ids)[:, None])[:, 0]
        np.testing.assert_allclose(taught.logprobs, wanted.numpy(), atol=1e-5, rtol=0)


def without(prompt: tuple[int, ...], hint: tuple[int, ...]) -> tuple[int, int]:
    """How many ids the two begin and end with alike."""
    head = next((n for n, (a, b) in enumerate(zip(prompt, hint, strict=False)) if a != b), min(len(prompt), len(hint)))
    rest = min(len(prompt), len(hint)) - head
    tail = next((n for n in range(rest) if prompt[-1 - n] != hint[-1 - n]), rest)
    return head, tail


@pytest.mark.parametrize("which", ["plain", "tools"])
async def test_the_hinted_prompt_is_the_stored_one_but_for_the_last_message_of_the_user(
    played: dict[str, Played], renderer: Renderer, which: str
) -> None:
    turns, tools = played[which].turns, played[which].tools
    for index in range(3):
        stored, hinted = prompt_ids(turns, index), hinted_prompt(turns, index, HINT, renderer, tools)
        assert hinted is not None
        text = renderer._backend.decode(list(hinted), skip_special_tokens=False)
        before, hint, after = text.partition(f"\n\n[hint] {HINT}")
        assert hint
        assert before.endswith("how many files are there?")
        assert before + after == renderer._backend.decode(list(stored), skip_special_tokens=False)
        head, tail = without(stored, hinted)
        assert head + tail >= len(stored) - 1  # the sign before the hint may be joined with what follows
        if index:  # what was sampled before stays as it was
            whole = prompt_ids(turns, index - 1) + turns[index - 1].sampled_ids
            assert hinted[: len(whole)] == whole


async def test_tools_whose_keys_were_kept_in_another_order_do_no_harm(
    played: dict[str, Played], renderer: Renderer
) -> None:
    """The pool has the tools as the agent sent them; other stores sort keys."""
    one = played["tools"]
    assert renderer.prompt(list(one.turns[0].messages), one.tools) == one.turns[0].context_ids
    resorted = json.loads(json.dumps(one.tools, sort_keys=True))
    assert renderer.prompt(list(one.turns[0].messages), resorted) != one.turns[0].context_ids
    hinted = hinted_prompt(one.turns, 0, HINT, renderer, resorted)
    asked = [*one.turns[0].messages[:-1], with_hint(one.turns[0].messages[-1], HINT)]
    assert hinted == renderer.prompt(asked, TOOLS)
    # Where no message ends before the user's, nothing shows that they can be joined.
    warm = played["warm"]
    alone = [replace(warm.turns[0], messages=warm.turns[0].messages)]
    assert hinted_prompt(alone, 0, HINT, renderer, warm.tools) is not None  # the tools are a system message here
    bare = played["plain"].turns
    changed = replace(bare[0], context_ids=(bare[0].context_ids[0], *bare[0].context_ids))
    assert hinted_prompt([changed], 0, HINT, renderer) is None


async def test_a_message_that_is_not_what_was_stored_has_no_teacher(
    played: dict[str, Played], renderer: Renderer
) -> None:
    """What comes before the message may differ, as long as the message itself does not."""
    one = played["tools"]
    first, ids = one.turns[0], one.turns[0].context_ids
    end = max(n for n, token in enumerate(ids[:-6]) if token in renderer.stop_ids)
    assert ids[end + 1 :] == renderer.prompt(list(first.messages), one.tools)[-len(ids[end + 1 :]) :]
    for place in range(end + 1, len(ids)):
        other = replace(first, context_ids=(*ids[:place], 600 if ids[place] != 600 else 601, *ids[place + 1 :]))
        assert hinted_prompt([other], 0, HINT, renderer, one.tools) is None
    before = replace(first, context_ids=(600, *ids[1:]))
    hinted = hinted_prompt([before], 0, HINT, renderer, one.tools)
    assert hinted is not None
    assert hinted[: end + 1] == before.context_ids[: end + 1]


async def test_the_hint_may_be_in_an_earlier_message_than_the_last(model_folder: Path, renderer: Renderer) -> None:
    """After results of tools the last words of the user are further up; the ids between stay the stored ones."""
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    first = ({"role": "user", "content": "Count."},)
    results = ({"role": "tool", "tool_call_id": "c1", "content": "3 files"},)
    sampled = (40, 41, 42, min(renderer.stop_ids))
    context = renderer.prompt(list(first))
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    turns = [
        Turn(context, sampled, (-1.0,) * 4, messages=first, reply=reply),
        Turn(renderer.increment(sampled, list(results)), (50, 51), (-1.0,) * 2, parent=0, messages=results),
    ]
    hinted = hinted_prompt(turns, 1, HINT, renderer)
    assert hinted == (*renderer.prompt([with_hint(first[0], HINT)]), *sampled, *turns[1].context_ids)


SIGNS = ["<|im_end|>", "<|im_start|>", "<think>", "<tool_call>", " ", "\n", "a", "é", "1"]
WORDS = st.one_of(st.text(min_size=1), st.lists(st.sampled_from(SIGNS), min_size=1).map("".join))


@given(hint=WORDS, question=WORDS, tail=st.lists(st.integers(9, 600), min_size=1, max_size=8))
def test_no_hint_and_no_sample_moves_a_boundary(renderer: Renderer, hint: str, question: str, tail: list[int]) -> None:
    """Whatever the texts are, the ids after the hinted message are the stored ones, and no hint ends a message."""
    system = {"role": "system", "content": "s"}
    messages = [system, {"role": "user", "content": question}]
    turn = Turn(renderer.prompt(messages), tuple(tail), (-1.0,) * len(tail), messages=tuple(messages))
    hinted = hinted_prompt([turn], 0, hint, renderer)
    assert hinted is not None
    ends = [n for n, token in enumerate(hinted) if token in renderer.stop_ids]
    stored = [n for n, token in enumerate(turn.context_ids) if token in renderer.stop_ids]
    assert len(ends) == len(stored) == 2
    assert hinted[: ends[0] + 1] == turn.context_ids[: stored[0] + 1]
    assert hinted[ends[1] :] == turn.context_ids[stored[1] :]


async def test_ids_that_their_text_would_not_give_are_scored_as_they_are(
    model_folder: Path, tmp_path: Path, model: Any, renderer: Renderer
) -> None:
    """Sampled in another spelling, as models do: a teacher that read the text would read other ids."""
    engine = ScriptedEngine(model_folder, lambda _, n: "the report of the files is done number", spell=random.Random(5))
    one = await play(engine, tmp_path, tools=False, system=True)
    for index, turn in enumerate(one.turns):
        text = renderer._backend.decode(list(turn.sampled_ids), skip_special_tokens=False)
        read_again = renderer._backend.encode(text, add_special_tokens=False).ids
        assert len(read_again) < len(turn.sampled_ids)
        (taught,) = await teach([HintedTurn(one.turns, index, [HINT])], renderer, TorchScorer(model))
        assert isinstance(taught, Teacher)
        prompt = hinted_prompt(one.turns, index, HINT, renderer)
        assert prompt is not None
        with torch.no_grad():
            rows = model(torch.tensor([[*prompt, *turn.sampled_ids]])).logits[0].float().log_softmax(-1)
        wanted = [float(rows[len(prompt) - 1 + n, token]) for n, token in enumerate(turn.sampled_ids)]
        np.testing.assert_allclose(taught.logprobs, wanted, atol=1e-5, rtol=0)


async def test_missing_teacher_has_a_cause(played: dict[str, Played], renderer: Renderer) -> None:
    turns = list(played["plain"].turns)
    scorer = Fixed()

    async def cause(hints: Sequence[str] = (HINT,), **changes: Any) -> str:
        given = [replace(turns[0], **changes), *turns[1:]]
        (found,) = await teach([HintedTurn(given, 0, hints)], renderer, scorer)
        assert isinstance(found, NoTeacher)
        return found.cause

    assert await cause(hints=()) == "no-hint"
    assert await cause(flaw="mixed-versions") == "flaw"
    assert await cause(sampled_ids=(), logprobs=()) == "no-sample"
    assert await cause(sampling={"temperature": 0}) == "greedy"
    assert await cause(images=("ab",)) == "images"
    assert await cause(context_ids=turns[0].context_ids[1:]) == "context"
    assert await cause(messages=()) == "context"
    assert scorer.calls == 0
    assert await cause() == "not-finite"
    above = replace(turns[0], images=("ab",))
    (below,) = await teach([HintedTurn([above, *turns[1:]], 1, [HINT])], renderer, scorer)
    assert below == NoTeacher("images")


class Fixed:
    """Scores that were given, in order; then none that is a number."""

    def __init__(self, *scores: Scored) -> None:
        self.scores = list(scores)
        self.calls = 0

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        self.calls += len(requests)
        return [self.scores.pop(0) if self.scores else Scored.nothing(request) for request in requests]


def tops(*rows: Sequence[int], value: float = -1.0) -> Scored:
    ids = np.array(rows)
    return Scored(np.full(len(ids), value), ids, np.full(ids.shape, value))


STUDENT = tops([1, 2, 3, 4], [5, 6, 7, 8])
NEAR = tops([4, 3, 2, 1], [0, 0, 0, 9], value=-0.1)  # 4 and 0 of 4
FAIR = tops([9, 9, 3, 9], [5, 9, 7, 6], value=-0.2)  # 1 and 3 of 4


def test_hints_are_chosen_by_overlap() -> None:
    which, overlap = choose(STUDENT, [NEAR, FAIR])
    assert overlap.tolist() == [[1.0, 0.0], [0.25, 0.75]]
    assert which.tolist() == [0, 0]  # 0.5 and 0.5: the first
    assert choose(STUDENT, [FAIR, NEAR, STUDENT])[0].tolist() == [2, 2]
    assert choose(STUDENT, [NEAR, FAIR], "token")[0].tolist() == [0, 1]
    assert choose(STUDENT, [NEAR, FAIR], "shortest", lengths=[20, 12])[0].tolist() == [1, 1]
    with pytest.raises(ValueError, match="choose sequence"):
        choose(STUDENT, [NEAR], "longest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="score all alike"):
        choose(STUDENT, [tops([1, 2], [3, 4])])
    with pytest.raises(ValueError, match="one candidate at least"):
        choose(STUDENT, [])
    with pytest.raises(ValueError, match="one for each"):
        choose(STUDENT, [NEAR, FAIR], "shortest")


async def test_the_chosen_hint_teaches_each_token(played: dict[str, Played], renderer: Renderer) -> None:
    turn = replace(played["plain"].turns[0], sampled_ids=(11, 12), logprobs=(-1.0, -1.0))
    about: dict[str, Any] = {"top_k": 4}
    hints = ["A long hint about the matter.", "A short one."]
    asked = [HintedTurn([turn], 0, hints)]
    (taught,) = await teach(asked, renderer, Fixed(NEAR, FAIR, STUDENT), how="token", **about)
    assert isinstance(taught, Teacher)
    assert taught.logprobs.tolist() == [-0.1, -0.2]
    assert taught.hint_of.tolist() == [0, 1]
    assert taught.top_ids.tolist() == [[4, 3, 2, 1], [5, 9, 7, 6]]
    (shortest,) = await teach(asked, renderer, Fixed(NEAR, FAIR, STUDENT), how="shortest", **about)
    assert isinstance(shortest, Teacher)
    assert (shortest.logprobs.tolist(), shortest.hints) == ([-0.2, -0.2], tuple(hints))
    lost = Scored(np.array([-0.1, np.inf]), NEAR.top_ids, NEAR.top_logprobs)
    (one,) = await teach(asked, renderer, Fixed(lost, FAIR), **about)
    assert isinstance(one, Teacher)
    assert one.hints == (hints[1],)
    assert np.isnan(one.overlap).all()


async def test_more_than_a_model_was_made_for_has_no_score(model: Any) -> None:
    window = model.config.max_position_embeddings
    scored, fits = await TorchScorer(model).score(
        [ScoreRequest([1] * (window - 1), [2, 3], 2), ScoreRequest([1] * (window - 1), [2])]
    )
    assert np.isnan(scored.logprobs).all()
    assert (scored.logprobs.shape, scored.top_ids.shape, scored.top_logprobs.shape) == ((2,), (2, 2), (2, 2))
    assert np.isfinite(fits.logprobs).all()


async def test_scores_do_not_depend_on_the_size_of_the_pieces(model: Any) -> None:
    dice = random.Random(2)
    prompt, sampled = [dice.randrange(600) for _ in range(30)], [dice.randrange(600) for _ in range(17)]
    asked = [ScoreRequest(prompt, sampled, 5)]
    (whole,), (small,) = await TorchScorer(model).score(asked), await TorchScorer(model, chunk=1).score(asked)
    np.testing.assert_allclose(whole.logprobs, small.logprobs, atol=1e-6)
    assert whole.top_ids.tolist() == small.top_ids.tolist()
    assert (np.diff(whole.top_logprobs) <= 0).all()
    none, everything = await TorchScorer(model).score(
        [ScoreRequest(prompt, sampled), ScoreRequest(prompt, sampled, 10**6)]
    )
    assert none.top_ids.shape == (17, 0)
    np.testing.assert_allclose(np.exp(everything.top_logprobs).sum(-1), 1.0, atol=1e-4)
    for prompt_, sampled_, temperature in (([], [1], 1.0), ([1], [], 1.0), ([1], [1], 0.0)):
        with pytest.raises(ValueError, match="as it was sampled"):
            ScoreRequest(prompt_, sampled_, temperature=temperature)
    for wrong in ({"tokens": 0}, {"chunk": 0}):
        with pytest.raises(ValueError, match="must be 1 or more"):
            TorchScorer(model, **wrong)
    assert await TorchScorer(model).score([]) == []


@pytest.mark.parametrize("tokens", [1, 100, 300, 10**6])
async def test_batches_are_bounded_and_change_no_score(model: Any, tokens: int) -> None:
    dice = random.Random(tokens)

    def some(most: int) -> list[int]:
        return [dice.randrange(9, 600) for _ in range(dice.randint(1, most))]

    asked = [ScoreRequest(some(80), some(20), n % 4, 0.7 + n % 3 / 2) for n in range(24)]
    sizes: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, given: sizes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    together = await TorchScorer(model, tokens=tokens).score(asked)
    hook.remove()
    assert all(rows * width <= max(tokens, width) for rows, width in sizes)
    assert sum(rows for rows, _ in sizes) == 24
    assert (len(sizes) == 24) == (tokens == 1)
    for request, found in zip(asked, together, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *request.sampled_ids]])
        with torch.no_grad():
            rows = (model(ids).logits[0].float() / request.temperature).log_softmax(-1)[
                -len(request.sampled_ids) - 1 : -1
            ]
        alone = rows.gather(1, torch.tensor(request.sampled_ids)[:, None])[:, 0]
        np.testing.assert_allclose(found.logprobs, alone.numpy(), atol=1e-5, rtol=0)
        best = rows.topk(request.top_k)
        assert found.top_ids.tolist() == best.indices.tolist()
        np.testing.assert_allclose(found.top_logprobs, best.values.numpy(), atol=1e-5, rtol=0)


async def test_turns_are_taught_together_as_alone(played: dict[str, Played], model: Any, renderer: Renderer) -> None:
    asked = [
        HintedTurn(one.turns, index, hints, one.tools)
        for one in played.values()
        for index, hints in enumerate(([HINT], [], ["List the files first.", HINT]))
    ]
    together = await teach(asked, renderer, TorchScorer(model), top_k=4)
    for one, found in zip(asked, together, strict=True):
        (alone,) = await teach([one], renderer, TorchScorer(model, tokens=1), top_k=4)
        if not one.hints:
            assert found == alone == NoTeacher("no-hint")
            continue
        assert isinstance(found, Teacher)
        assert isinstance(alone, Teacher)
        assert (found.hints, found.hint_of.tolist()) == (alone.hints, alone.hint_of.tolist())
        np.testing.assert_allclose(found.logprobs, alone.logprobs, atol=1e-5, rtol=0)
        np.testing.assert_allclose(found.top_logprobs, alone.top_logprobs, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(found.overlap, alone.overlap)


async def test_the_module_that_an_engine_samples_from_may_be_its_own_teacher(model_folder: Path) -> None:
    module: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    engine = TransformersEngine(module, tokenizer=model_folder, context_window=4096, kv_tokens=8192)
    try:
        for seed in range(2):  # scoring in between changes nothing for the engine
            prompt, ids, logprobs = list(range(20, 50)), [], []
            async for tokens in engine.generate(GenerateRequest(prompt, Sampling(max_tokens=12, seed=seed))):
                ids += tokens.ids
                logprobs += tokens.logprobs
            (scored,) = await TorchScorer(module).score([ScoreRequest(prompt, ids)])
            np.testing.assert_allclose(scored.logprobs, logprobs, atol=1e-5, rtol=0)
    finally:
        await engine.aclose()


async def test_a_model_in_training_is_scored_in_evaluation_and_given_back_as_it_was(model_folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attention_dropout=0.5)
    model.train()
    asked = [ScoreRequest([1, 2, 3], [4, 5])]
    (first,), (second,) = [await TorchScorer(model).score(asked) for _ in range(2)]
    assert model.training
    assert first.logprobs.tolist() == second.logprobs.tolist()
    assert all(parameter.grad is None for parameter in model.parameters())
