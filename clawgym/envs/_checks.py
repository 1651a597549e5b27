"""Checks of the arguments of environments. Each raises ValueError with what was expected and what was given.

Checks run before anything starts: a refused action changes no episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from clawgym.registry import did_you_mean
from clawgym.rollout import RewardName

__all__ = ["autoreset_mode_of", "check_action", "check_options", "check_reward", "one_action_each"]

_SHOWN = 60


def check_reward(reward: object) -> None:
    """Check that ``reward`` is a :data:`~clawgym.rollout.RewardName`."""
    known = get_args(RewardName)
    if reward not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"reward={reward!r} is not a reward: use one of {names}.{did_you_mean(reward, known)}")


def autoreset_mode_of(mode: AutoresetMode | str) -> AutoresetMode:
    """Return the mode with this name or value: ``NEXT_STEP`` and ``NextStep`` are the same."""
    if isinstance(mode, AutoresetMode):
        return mode
    wanted = str(mode).replace("_", "").casefold()
    for known in AutoresetMode:
        if wanted == known.value.casefold():
            return known
    names = ", ".join(repr(known.name) for known in AutoresetMode)
    hint = did_you_mean(str(mode).upper(), (known.name for known in AutoresetMode))
    raise ValueError(f"autoreset_mode={mode!r} is not a mode: use one of {names}, or an AutoresetMode.{hint}")


def check_options(options: Mapping[str, Any] | None, known: Sequence[str], count: int) -> None:
    """Check that ``options`` of ``reset`` has only keys in ``known``, and at most ``count`` task ids."""
    for key in options or ():
        if key not in known:
            raise ValueError(
                f"reset() has no option {key!r}: use {' or '.join(map(repr, known))}.{did_you_mean(key, known)}"
            )
    ids = (options or {}).get("task_ids")
    if ids is None:
        return
    if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, str) or not len(ids):
        raise ValueError(f"options['task_ids'] must be a list of task ids; got {_shown(ids)}")
    if len(ids) > count:
        have = "1 environment" if count == 1 else f"{count} environments"
        raise ValueError(f"options['task_ids'] has {len(ids)} ids for {have}: give one for each, or fewer")


def check_action(space: gym.Space[Any], action: Any) -> None:
    """Check that ``action`` is in ``space``."""
    if not space.contains(action):
        raise ValueError(f"step() takes an action of {space}; got {_shown(action)}")


def one_action_each(
    actions: Any, ids: Sequence[int], single: gym.Space[Any], batched: gym.Space[Any] | None = None
) -> list[Any]:
    """Return one action of the space ``single`` for each environment in ``ids``.

    ``actions`` is a sequence of actions, or a dict of arrays in the space ``batched``.
    """
    count = len(ids)
    if isinstance(batched, gym.spaces.Dict) and isinstance(actions, Mapping):
        if not batched.contains(actions):
            raise ValueError(f"the actions are not in the batched action space {batched}; got {_shown(actions)}")
        return list(iterate(batched, actions))
    sequence = actions.ndim > 0 if isinstance(actions, np.ndarray) else isinstance(actions, Sequence)
    if not sequence or isinstance(actions, str | bytes):
        same = f"; for the same action in each: [{actions!r}] * {count}" if isinstance(actions, str) else ""
        raise ValueError(
            f"expected a sequence of {count} actions (a list, a tuple or an array), one for each environment; "
            f"got {_shown(actions)}{same}"
        )
    if len(actions) != count:
        raise ValueError(f"{len(actions)} actions for {count} environments: give one for each")
    for i, action in zip(ids, actions, strict=True):
        if not single.contains(action):
            raise ValueError(f"the action of environment {i} must be one of {single}; got {_shown(action)}")
    return list(actions)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"
