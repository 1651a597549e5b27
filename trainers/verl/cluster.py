"""The Ray cluster of a run: that of this process, or one on this machine that ends with it."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from clawgym.errors import MissingDependency, TrainingError
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.verl import reaper
from clawgym.trainers.verl.settings import CPU, environment, on_cpu

__all__ = ["cause_of", "cluster", "require"]

_START_ATTEMPTS = 5
"""Attempts to start Ray on this machine."""

_LONGEST_FOLDER = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Longest path of a cluster's folder, in bytes: a path of a unix socket has at most 107 on Linux."""


def require(config: TrainConfig) -> None:
    """Set the environment variables of a run and import Ray and verl, which read them.

    Raises :class:`~clawgym.errors.MissingDependency` without the extra ``verl``."""
    os.environ.update(environment(config))
    try:
        import ray  # noqa: F401
        import transfer_queue  # noqa: F401
        import verl  # noqa: F401

        if on_cpu(config):
            importlib.import_module(CPU)  # verl may have been imported before
    except ImportError as error:
        raise MissingDependency(f"trainer: verl needs verl ({error}): pip install 'clawgym[verl]'") from error


@contextlib.contextmanager
def cluster(config: TrainConfig) -> Iterator[None]:
    """Connect to the Ray cluster of this process (``RAY_ADDRESS``), or start one on this machine.

    Raises :class:`~clawgym.errors.TrainingError` if it does not start."""
    import ray
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    runtime: Any = get_ppo_ray_runtime_env()
    runtime["env_vars"] = {**runtime.get("env_vars", {}), **environment(config), "TRANSFER_QUEUE_ENABLE": "1"}
    options: dict[str, Any] = {"runtime_env": runtime, "log_to_driver": False, "logging_level": "error"}
    with contextlib.ExitStack() as stack:
        if not os.environ.get("RAY_ADDRESS"):
            # Otherwise Ray joins the cluster that was last started on this machine, even if it has ended.
            options |= {"address": "local", "include_dashboard": False}
            options["_temp_dir"] = stack.enter_context(_own_folder())
            if on_cpu(config):
                about = config.verl
                ranks = about.ranks + (about.rollout_ranks if about.mode == "separate_async" else 0)
                # Logical resources: verl requests more CPUs than it uses, and one GPU per rank.
                options |= {"num_cpus": 16 + 8 * ranks, "num_gpus": ranks, "object_store_memory": 500_000_000}
        stop = signal.getsignal(signal.SIGTERM)
        for attempt in range(_START_ATTEMPTS):
            try:
                ray.init(**options)
                break
            except Exception as error:  # Ray raises no narrower class; its processes may not be up within 30 seconds
                ray.shutdown()
                if attempt + 1 == _START_ATTEMPTS:
                    raise TrainingError(
                        f"Ray did not start ({cause_of(error)}): run `clawgym doctor --verl`; on a busy machine, try "
                        "again"
                    ) from error
        stack.callback(ray.shutdown)
        if threading.current_thread() is threading.main_thread():  # Ray has put a handler of its own in its place
            signal.signal(signal.SIGTERM, stop)
        yield


@contextlib.contextmanager
def _own_folder() -> Iterator[str]:
    """A folder for a cluster of this process. It is deleted, and what still uses it is killed, at the end of the block
    or of this process.

    Raises :class:`~clawgym.errors.TrainingError` if its path is too long for a unix socket in it."""
    folder = tempfile.mkdtemp(prefix="ray-", dir=os.environ.get("RAY_TMPDIR"))
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        os.rmdir(folder)
        raise TrainingError(
            f"Ray needs a folder whose path has at most {_LONGEST_FOLDER} bytes, for the sockets in it: {folder} is "
            "longer. Set RAY_TMPDIR to a folder with a shorter path, such as /tmp"
        )
    command = [sys.executable, "-I", reaper.__file__, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):  # its end closes the pipe, and waits
        yield folder


def cause_of(error: BaseException) -> str:
    """The last line of an error of Ray."""
    lines = [line for line in str(getattr(error, "cause", None) or error).splitlines() if line.strip()]
    text = lines[-1].strip() if lines else type(error).__name__
    return text.partition(" Some common causes")[0][:300]
