"""``check_vector_env``: checks a batched environment, as Gymnasium's ``check_env`` checks a single one."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

__all__ = ["check_vector_env"]


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def check_vector_env(env: Any, *, end_action: Any, action: Any) -> None:
    """Check that ``env`` keeps the contract of a ClawGym vector environment.

    Checked are types, batched spaces, shapes and dtypes, seeding, the declared ``AutoresetMode``, masks in ``info``,
    and ``send`` / ``recv`` if the environment has them.

    Args:
        env: a new environment that is both a ``gym.Env`` and a ``VectorEnv``. Make a new one afterwards; ``env`` is not
            closed.
        end_action: an action that ends an episode at once.
        action: an action that does not.

    Raises:
        AssertionError: a check failed; the message names it.
    """
    n = env.num_envs
    _expect(isinstance(env.unwrapped, gym.Env), "not a gym.Env, which gym.make requires")
    _expect(isinstance(env, VectorEnv), "not a VectorEnv, which gymnasium.wrappers.vector requires")
    _expect(isinstance(n, int) and n >= 1, f"num_envs is {n!r}, not a positive int")
    mode = env.metadata.get("autoreset_mode")
    _expect(isinstance(mode, AutoresetMode), "metadata['autoreset_mode'] is not an AutoresetMode")
    for name in ("observation", "action"):
        single, batched = getattr(env, f"single_{name}_space"), getattr(env, f"{name}_space")
        _expect(batched == batch_space(single, n), f"{name}_space is not the batch of single_{name}_space")
        _expect(batched.contains(batched.sample()), f"{name}_space does not contain its own sample")

    observation, info = env.reset(seed=5)
    _expect(env.observation_space.contains(observation), "reset: the observation is not in observation_space")
    _check_info(info, n)
    again, _ = env.reset(seed=5)
    _expect(_same(observation, again), "reset: the same seed gives different observations")
    env.reset(seed=[5 + i for i in range(n)])

    result = env.step([action] * n)
    _check_step(env, result, n)
    _expect(not (result[2] | result[3]).any(), "step: an ordinary action ended an episode")

    observation, reward, terminated, truncated, info = env.step([end_action] * n)
    _check_step(env, (observation, reward, terminated, truncated, info), n)
    _expect(bool((terminated | truncated).all()), "step: end_action did not end every episode")
    if mode is AutoresetMode.SAME_STEP:
        _expect("final_obs" in info and bool(info["_final_obs"].all()), "SAME_STEP: no final_obs in info")
        result = env.step([action] * n)
        _expect(bool((result[0]["step"] == 1).all()), "SAME_STEP: the step after the end ignored its action")
    elif mode is AutoresetMode.NEXT_STEP:
        result = env.step([end_action] * n)
        _check_step(env, result, n)
        _expect(not (result[2] | result[3]).any(), "NEXT_STEP: the step after the end must ignore its action")
        _expect(bool((result[1] == 0).all()), "NEXT_STEP: the reward of the step that resets must be 0")
    else:
        mask = np.zeros(n, dtype=np.bool_)
        mask[0] = True
        env.reset(options={"reset_mask": mask})
        env.reset()
    if hasattr(env, "send"):
        _check_async(env, action, n)


def _check_step(env: Any, result: Any, n: int) -> None:
    observation, reward, terminated, truncated, info = result
    _expect(env.observation_space.contains(observation), "step: the observation is not in observation_space")
    _expect(reward.shape == (n,) and reward.dtype == np.float64, f"step: reward is not a float64 array of shape ({n},)")
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        _expect(value.shape == (n,) and value.dtype == np.bool_, f"step: {name} is not a bool array of shape ({n},)")
    _expect(not (terminated & truncated).any(), "step: an episode is both terminated and truncated")
    _check_info(info, n)


def _check_info(info: dict[str, Any], n: int) -> None:
    errors = [str(error) for error in info.get("error", ()) if error]
    _expect(not errors, f"an episode ended with an error: {errors[:1]}")
    for key, value in info.items():
        _expect(len(value) == n, f"info[{key!r}] has {len(value)} rows, not {n}")
        if not key.startswith("_"):
            mask = info.get(f"_{key}")
            _expect(mask is not None and mask.dtype == np.bool_, f"info has no bool mask '_{key}'")


def _check_async(env: Any, action: Any, n: int) -> None:
    env.send([action] * n, range(n))
    try:
        env.send([action], [0])
    except gym.error.AlreadyPendingCallError:
        pass
    else:
        raise AssertionError("send: an environment that still works accepted another action")
    seen: list[int] = []
    while len(seen) < n:
        ids, observation, reward, *_ = env.recv(1)
        rows = {len(ids), len(reward), *map(len, observation.values())}
        _expect(rows == {len(ids)}, "recv: rows do not match env_ids")
        seen += ids.tolist()
    _expect(sorted(seen) == list(range(n)), "recv: not every environment answered exactly once")


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(np.array_equal(np.asarray(a[k]), np.asarray(b[k])) for k in a)
