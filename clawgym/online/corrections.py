"""Replies that a user accepted, for imitation.

A candidate is trained on conversations of the version that answers. The further it has moved from that version, the
less the likelihood ratios of the policy gradient say, which is why ``rollout.staleness`` bounds it. What a user
accepted stays right: an accepted reply can be imitated at any time. It is also an answer to the messages before it that
got a wrong reply, without the corrections that came between, so that the next user need not give them. (This is context
distillation, arXiv 2209.15189, from samples.)

Invariants: a reply is imitated with the ids that were sampled. Turns with flaws or images are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from clawgym.records import Turn, prompt_ids
from clawgym.trainers.batching import MaskedSequence

__all__ = ["accepted_replies"]


def accepted_replies(turns: Sequence[Turn], rewards: Mapping[int, float]) -> Iterator[MaskedSequence]:
    """The accepted replies of a conversation: each after its own prompt, and after the prompt of each wrong reply that
    it follows directly.

    Args:
        turns: the turns of the conversation.
        rewards: turn -> its reward, above 0 if the reply was accepted and below 0 if it was wrong.
    """
    for index, turn in enumerate(turns):
        if rewards.get(index, 0.0) <= 0 or turn.finish_reason != "stop" or not _exact(turns, index):
            continue
        at: int | None = index
        while at is not None and (at == index or rewards.get(at, 0.0) < 0):
            prompt = prompt_ids(turns, at)
            mask = (0,) * len(prompt) + (1,) * len(turn.sampled_ids)
            yield MaskedSequence((*prompt, *turn.sampled_ids), mask)
            at = turns[at].parent


def _exact(turns: Sequence[Turn], index: int | None) -> bool:
    """Whether the ids of a turn and of all before it are those that were sampled, without images."""
    while index is not None:
        if turns[index].flaw is not None or turns[index].images or not turns[index].sampled_ids:
            return False
        index = turns[index].parent
    return True
