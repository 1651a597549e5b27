"""GEM: our environments as its environments, and its environments behind ``gym.make``.

    env = GemEnv("ClawGym/terminal-v0", tasks="terminal-basic:train")           # its wrappers and batches over ours
    gym.make("clawgym.interop.gem:gem-v0", game="game:GuessTheNumber-v0-hard")          # an environment of GEM

Needs the package ``gem-llm``.

Invariant: rewards and ends are those of the other side.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym

from clawgym.envs.spaces import AnyText
from clawgym.errors import MissingDependency, SnapshotRefused

try:
    import gem  # pyright: ignore[reportMissingImports]
    import gem.envs  # pyright: ignore[reportMissingImports]  # makes its names known
except ImportError as error:
    raise MissingDependency(f"GEM is needed ({error}): pip install gem-llm") from error

__all__ = ["GemEnv", "GymOfGem", "register"]


class GemEnv(gem.Env):
    """An environment of ours. Observations are text: the instruction, then what each action shows.

    Args:
        env: an id of ``gym.make`` whose actions are text, such as ``ClawGym/terminal-v0``.
        seed: the seed of the first ``reset`` that has none.
        options: options of ``gym.make``, such as ``tasks`` and ``reward``.
    """

    def __init__(self, env: str = "ClawGym/terminal-v0", *, seed: int | None = None, **options: Any) -> None:
        super().__init__()
        self._spawn = partial(GemEnv, env, **options)
        self._env = gym.make(env, render_mode="ansi", **options)
        self._seed = seed

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        seed, self._seed = self._seed if seed is None else seed, None
        _, info = self._env.reset(seed=seed)
        return self._seen(), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, info = self._env.step(action)
        return self._seen().removeprefix(f"$ {action}\n"), float(reward), terminated, truncated, info

    def _seen(self) -> str:
        return str(self._env.render())

    def sample_random_action(self) -> str:
        return self._env.action_space.sample()

    def spawn(self, same_state: bool = False, **options: Any) -> GemEnv:
        """Make another environment like this one. Raises SnapshotRefused for ``same_state``."""
        if same_state:
            raise SnapshotRefused("a new environment cannot have the state of this one: use snapshot() of gym.make")
        return self._spawn(**options)

    def close(self) -> None:
        self._env.close()


def register(id: str, env: str = "ClawGym/terminal-v0", **options: Any) -> None:
    """Make :class:`GemEnv` with these arguments known to ``gem.make`` and ``gem.make_vec`` as ``id``."""
    gem.register(id, GemEnv, env=env, **options)


class GymOfGem(gym.Env[str, str]):
    """An environment of GEM, which runs in this process. Actions and observations are text.

    Args:
        game: its name in GEM.
        options: options of ``gem.make``.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012  # Gymnasium's own declaration

    def __init__(self, game: str, *, render_mode: str | None = None, **options: Any) -> None:
        self.render_mode = render_mode
        self.action_space = AnyText(1 << 20)
        self.observation_space = AnyText(1 << 24)
        self._env = gem.make(game, **options)
        self._text = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._text, info = self._env.reset(seed=seed)
        return self._text, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._text, reward, terminated, truncated, info = self._env.step(action)
        return self._text, float(reward), bool(terminated), bool(truncated), info

    def render(self) -> Any:
        return self._text if self.render_mode == "ansi" else None


gym.register("gem-v0", "clawgym.interop.gem:GymOfGem")
