"""What verl draws prompts from: the numbers of groups, one after the other, without end.

Invariant: which task a group has, and with which seeds, follows from its number alone
(:class:`~clawgym.trainers.common.collector.Groups`); so a run that goes on needs to know nothing but how many it has
drawn, and the order does not change where tasks are played on other machines, or groups are drawn in place of others.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

__all__ = ["GroupNumbers"]


class GroupNumbers(Dataset[dict[str, Any]]):
    """The n-th row is the number n."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __len__(self) -> int:
        return 2**31 - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        # verl counts prompts by their texts; ours are rendered by the gateway, turn by turn.
        return {"raw_prompt": [], "index": number, "data_source": "clawgym"}
