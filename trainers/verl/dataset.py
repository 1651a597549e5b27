"""The dataset that verl draws prompts from: an endless sequence of group numbers.

Invariant: the number of a group determines its task and its seeds
(:class:`~clawgym.trainers.common.collector.GroupPlayer`). A resumed run therefore needs only the count of drawn groups,
and the order of tasks does not depend on the number of machines or on replaced groups.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

__all__ = ["GroupNumbers"]


class GroupNumbers(Dataset[dict[str, Any]]):
    """Item n is the number n."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __len__(self) -> int:
        return 2**31 - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        # The gateway renders prompts, turn by turn; verl only needs the field.
        return {"raw_prompt": [], "index": number, "data_source": "clawgym"}
