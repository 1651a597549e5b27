"""The exact tokens of a pool in the types of other trainers, read back through their own code.

Needs the packages ``agentlightning`` and ``skyrl`` with what its generators import, and ``areal`` for its own checks.
"""

from __future__ import annotations

import importlib
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typing_extensions

from clawgym.errors import TraceError
from clawgym.interop.traces import Trace, areal_trajectories, lightning_spans, skyrl_output, traces
from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import TrainingSequence, prompt_ids

from ..pool.histories import chain, store
from ..pool.test_exchange import CHAT, DEFINED, IMAGE

pytest.importorskip("agentlightning", reason="needs Agent Lightning and SkyRL: clawgym interop check traces")

Held = Callable[..., None]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """Three episodes to train on, of two groups: the first is one sequence, the second two, the third has subagents."""
    with Pool(tmp_path / "pool.db") as made:
        group = made.open_group(task_id="t", size=2)
        for sample, turns in enumerate((chain(1, 4), chain(2, 3) + chain(9, 1, parent=1))):
            store(made, turns, group=group, task_id="t", sample=sample, outcome=("solved", "failed")[sample])
        mixed = chain(3, 2) + chain(4, 1, role="subagent")
        mixed[1] = replace(mixed[1], policy_version=None, finish_reason="length")
        third = made.open_episode(task_id="u")
        made.append([(third, n, one) for n, one in enumerate(mixed)])
        made.close_episode(third, EpisodeEnd(outcome="truncated", reward=0.25))
        # Nothing of these may be trained on.
        store(made, chain(5, 2), outcome="infra", task_id="v")
        store(made, [replace(one, flaw="stripped") for one in chain(6, 2)], task_id="w")
        store(made, chain(7, 1), outcome=None, task_id="x")
        made.curate(store(made, chain(8, 1), task_id="y"), trainable=False)
        yield made


def expected(pool: Pool) -> list[tuple[Trace, TrainingSequence]]:
    return [(trace, sequence) for trace in traces(pool) for sequence in trace.sequences()]


def test_which_episodes(pool: Pool) -> None:
    found = list(traces(pool))
    assert [(trace.reward, len(trace.sequences())) for trace in found] == [(1.0, 1), (0.0, 2), (0.25, 1), (1.0, 0)]
    assert found[0].group == found[1].group != found[2].group


def test_images_are_refused(pool: Pool) -> None:
    pool.put_images([IMAGE, DEFINED])
    trace = Trace("e", "g", tuple(CHAT), 1.0)
    assert any(turn.images for turn in CHAT)
    for call in (lightning_spans, lambda one: areal_trajectories([one]), lambda one: skyrl_output([one])):
        with pytest.raises(TraceError, match="images"):
            call(trace)


# -- Agent Lightning


def triplets(trace: Trace) -> list[Any]:
    from agentlightning import TracerTraceToTriplet

    return TracerTraceToTriplet().adapt(lightning_spans(trace))


def test_lightning_triplets_have_the_ids(pool: Pool, record_property: Held) -> None:
    turns = 0
    for trace in list(traces(pool))[:3]:
        found = triplets(trace)
        trained = [n for n, turn in enumerate(trace.turns) if turn.role == "main"]
        assert len(found) == len(trained)
        for triplet, index in zip(found, trained, strict=True):
            turn = trace.turns[index]
            assert triplet.prompt["token_ids"] == list(prompt_ids(trace.turns, index))
            assert triplet.response["token_ids"] == list(turn.sampled_ids)
            assert [one["logprob"] for one in triplet.response["logprobs"]] == list(turn.logprobs)
            assert triplet.metadata["response"].get("policy_version") == turn.policy_version
            turns += 1
        assert [triplet.reward for triplet in found] == [None] * (len(found) - 1) + [trace.reward]
    record_property(
        "held",
        f"Agent Lightning: `TracerTraceToTriplet` makes triplets of the spans of {turns} turns with the same ids, "
        "log-probs, policy versions and rewards",
    )
    (nothing,) = [trace for trace in traces(pool) if not trace.sequences()]
    assert triplets(nothing) == []


async def test_lightning_store_keeps_the_spans(pool: Pool, record_property: Held) -> None:
    from agentlightning import InMemoryLightningStore, TracerTraceToTriplet, find_final_reward

    store_of_spans = InMemoryLightningStore()
    for trace in list(traces(pool))[:3]:
        rollout = await store_of_spans.start_rollout(input={"task": trace.id})
        where = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        for span in lightning_spans(trace, **where):
            await store_of_spans.add_span(span)
        spans = await store_of_spans.query_spans(rollout.rollout_id)
        assert TracerTraceToTriplet().adapt(spans) == triplets(trace)
        assert find_final_reward(spans) == trace.reward
    record_property("held", "Agent Lightning: spans that went through its store give the same triplets and rewards")


# -- SkyRL


@pytest.fixture(scope="module", autouse=True)
def _skyrl() -> Iterator[None]:
    """Lets SkyRL be imported: before Python 3.12, pydantic takes a TypedDict of ``typing_extensions`` only."""
    if sys.version_info >= (3, 12):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
        importlib.import_module("skyrl.train.generators")
    yield


def test_skyrl_output_is_valid(pool: Pool, record_property: Held) -> None:
    from skyrl.train.generators.base import GeneratorOutput
    from skyrl.train.generators.utils import concatenate_generator_outputs

    outputs = [skyrl_output([trace]) for trace in list(traces(pool))[:3]]
    assert outputs[0].keys() <= GeneratorOutput.__annotations__.keys()
    joined = concatenate_generator_outputs(outputs, step_wise=True)  # validates, too
    rows = expected(pool)
    for n, (_, sequence) in enumerate(rows):
        assert joined["prompt_token_ids"][n] + joined["response_ids"][n] == list(sequence.ids)
        mask = [0] * len(joined["prompt_token_ids"][n]) + joined["loss_masks"][n]
        assert mask == list(sequence.mask)
        kept = zip(joined["rollout_logprobs"][n], joined["loss_masks"][n], strict=True)
        assert [logprob for logprob, one in kept if one] == list(sequence.logprobs)
    assert joined["rewards"] == [1.0, 0.0, 0.0, 0.25]
    assert joined["is_last_step"] == [True, False, True, True]
    assert joined["stop_reasons"] == ["stop", "stop", "stop", "length"]
    record_property(
        "held",
        f"SkyRL: `concatenate_generator_outputs` accepts and keeps {len(rows)} sequences with the same ids, masks, "
        "log-probs and rewards",
    )
    ids = [one.to_string() for one in skyrl_output(traces(pool))["trajectory_ids"]]
    group = next(traces(pool)).group
    assert ids[:3] == [f"{group}_0", f"{group}_1", f"{group}_1"]
    assert len(set(ids)) == 3
    with pytest.raises(TraceError, match="no training sequence"):
        skyrl_output([])


def test_skyrl_makes_tensors_of_it(pool: Pool, record_property: Held) -> None:
    import torch
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    class Tokenizer:
        pad_token_id = 0

    output = skyrl_output(traces(pool))
    rewards = [
        [0.0] * (len(ids) - 1) + [one] for ids, one in zip(output["response_ids"], output["rewards"], strict=True)
    ]
    names = ("prompt_token_ids", "response_ids")
    tensors = convert_prompts_responses_to_batch_tensors(
        Tokenizer(), *(output[name] for name in names), rewards, output["loss_masks"], output["rollout_logprobs"]
    )
    sequences, attention, _, _, masks, logprobs = tensors[:6]
    for n, (_, sequence) in enumerate(expected(pool)):
        assert sequences[n][attention[n].bool()].tolist() == list(sequence.ids)
        assert int(masks[n].sum()) == len(sequence.logprobs)
        assert logprobs[n][masks[n].bool()].tolist() == torch.tensor(sequence.logprobs).tolist()
    record_property("held", "SkyRL: the tensors of its trainer have the same ids, masks and log-probs (float32)")


# -- AReaL


def test_areal_tensors(pool: Pool) -> None:
    import torch

    found = areal_trajectories(traces(pool))
    for row, (trace, sequence) in zip(found, expected(pool), strict=True):
        trained = row["loss_mask"][0].bool()
        assert {tuple(value.shape) for name, value in row.items() if name != "rewards"} == {(1, len(sequence.ids))}
        assert row["input_ids"][0].tolist() == list(sequence.ids)
        assert row["loss_mask"][0].tolist() == list(sequence.mask)
        assert row["logprobs"][0][trained].tolist() == torch.tensor(sequence.logprobs).tolist()
        versions = [-1 if one is None else one for one in sequence.policy_versions]
        assert row["versions"][0][trained].tolist() == versions
        assert not row["logprobs"][0][~trained].any()
        assert set(row["versions"][0][~trained].tolist()) <= {-1}
        assert row["rewards"].tolist() == [trace.reward]


def test_areal_makes_the_same_tensors(pool: Pool, record_property: Held) -> None:
    """AReaL's own type of a turn has the same tensors, and its check and its batch accept ours."""
    pytest.importorskip("areal", reason="needs AReaL: clawgym interop check traces")
    import torch
    from areal.api import ModelResponse
    from areal.experimental.openai.types import InteractionWithTokenLogpReward
    from areal.infra.workflow_executor import check_trajectory_format
    from areal.utils.data import concat_padded_tensors

    found = areal_trajectories(traces(pool))
    for row, (trace, sequence) in zip(found, expected(pool), strict=True):
        assert check_trajectory_format(row, batch_size=1, expected_keys=set(found[0]))
        last = None
        for index in sorted(set(sequence.turn_of)):
            turn = trace.turns[index]
            version = -1 if turn.policy_version is None else turn.policy_version
            response = ModelResponse(
                input_tokens=list(prompt_ids(trace.turns, index)),
                output_tokens=list(turn.sampled_ids),
                output_logprobs=list(turn.logprobs),
                output_versions=[version] * len(turn.sampled_ids),
            )
            last = InteractionWithTokenLogpReward(response, trace.reward, last, chat_template_type="concat")
        assert last is not None
        theirs = last.to_tensor_dict()
        assert theirs.keys() == row.keys()
        for name, value in theirs.items():
            assert torch.equal(value.to(row[name].dtype), row[name]), name
    batch = concat_padded_tensors(found)
    for n, row in enumerate(found):
        kept = batch["attention_mask"][n].bool()
        for name in ("input_ids", "loss_mask", "logprobs", "versions"):
            assert batch[name][n][kept].tolist() == row[name][0].tolist(), name
        assert batch["rewards"][n].tolist() == row["rewards"][0].tolist()
    record_property(
        "held",
        f"AReaL: `InteractionWithTokenLogpReward` makes the same tensors of the turns of {len(found)} sequences, and "
        "`check_trajectory_format` and `concat_padded_tensors` accept ours",
    )
