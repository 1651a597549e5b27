"""Fixtures for all tests. They use real sandboxes, never mocks."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from clawgym.agents.openclaw.install import installed
from clawgym.agents.programs.install import Installation
from clawgym.errors import AgentError, SandboxUnavailable
from clawgym.sandbox import Backend
from clawgym.sandbox import backend as make_backend

from .gate import pytest_runtest_makereport, pytest_sessionfinish, pytest_sessionstart, pytest_terminal_summary

__all__ = ["pytest_runtest_makereport", "pytest_sessionfinish", "pytest_sessionstart", "pytest_terminal_summary"]

# Tests must not fail because the machine is slow.
settings.register_profile("clawgym", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# `make test` chooses it with --hypothesis-profile=quick. It also bounds tests that ask for more examples themselves.
settings.register_profile("quick", settings.get_profile("clawgym"), max_examples=25)
settings.load_profile("clawgym")

CHECK = (
    "agents/openclaw/test_dense",
    "agents/openclaw/test_image.py",
    "agents/openclaw/test_install.py",
    "agents/openclaw/test_real_tasks.py",
    "agents/programs/test_install_programs.py::test_python_",
    "cli/test_cli.py::test_demo_ranks_three_agents_and_trains_a_model",
    "cli/test_openclaw.py",
    "cli/test_runs_verify.py",
    "engines/test_folders.py::test_wrong_sizes_in_settings_take_no_memory",
    "engines/test_packaged.py::test_real_model_",
    "engines/test_transformers.py::test_it_ends_with_the_interpreter",
    "engines/test_transformers.py::test_no_memory_fails_one_request_not_the_engine",
    "engines/test_vllm_real.py",
    "envs/test_many.py",
    "envs/test_openclaw.py",
    "evaluation/test_public_tasks.py",
    "fuzz/test_fuzz.py::test_new_inputs_find_nothing",
    "gateway/test_inside.py",
    "gateway/test_openclaw",
    "harbor_trials/",
    "interop/test_",
    "invariants/test_bounded_memory.py",
    "invariants/test_desktops_hold.py",
    "invariants/test_faults_sandbox.py",
    "invariants/test_faults_engine.py",
    "invariants/test_faults_gateway.py",
    "invariants/test_faults_host.py",
    "invariants/test_faults_loop.py",
    "invariants/test_gateway_kills.py",
    "invariants/test_hostile_workspaces.py",
    "invariants/test_ledger.py",
    "invariants/test_nothing_left.py",
    "invariants/test_pool_kills.py",
    "invariants/test_ray_nodes.py",
    "invariants/test_service_kills.py",
    "invariants/test_suites_hold.py",
    "invariants/test_tests_hold.py",
    "invariants/test_texts_of_others.py",
    "invariants/test_tools_hold.py",
    "invariants/test_training_",
    "live/test_live.py::test_a_browser_shows_markup_of_a_task_as_text",
    "online/test_elsewhere.py::test_a_trainer_on_another_machine",
    "online/test_gate.py",
    "online/test_redaction.py::test_a_megabyte_takes_seconds",
    "online/test_verl.py::test_a_killed_",
    "redteam/test_escape.py",
    "redteam/test_exploits.py",
    "sandbox/test_chroot.py",
    "sandbox/test_docker.py",
    "sandbox/test_ordinary_user.py",
    "sandbox/test_ray.py",
    "sandbox/test_what_is_shown.py",
    "tasks/packs/test_gui_",
    "tasks/packs/test_terminal_basic.py::test_checker_survives_garbage",
    "tasks/packs/test_terminal_basic.py::test_trivial_policies_score_low",
    "tasks/packs/test_terminal_basic.py::test_wrong_solutions_fail",
    "tasks/packs/test_toolcall_basic.py::test_wrong_solutions_fail",
    "tasks/swe/test_make.py",
    "tasks/swe/test_suites.py",
    "tasks/test_osworld_programs.py",
    "tasks/test_published_parity.py",
    "tasks/test_bfcl.py::test_checker_of_the_set_agrees_on_every_task",
    "tasks/test_tau2.py::test_evaluator_of_the_set_agrees",
    "test_docs.py::test_python_examples_run",
    "test_examples.py",
    "test_gate.py::test_broken_backend_",
    "test_gate.py::test_each_part_is_collected_once",
    "test_gate.py::test_skip_for_lack_",
    "test_gate.py::test_too_many_skips_fail_the_run_and_are_listed",
    "test_pinned_hashes.py::test_hashes_do_not_depend_on_the_machine",
    "test_site.py",
    "test_stored_0_1.py::test_new_run_starts_from_the_checkpoint",
    "test_tutorials.py::test_page",
    "test_wheel.py",
    "tools/test_real_server.py",
    "trainers/common/test_canary.py",
    "trainers/common/test_checkpoints.py",
    "trainers/common/test_collector.py",
    "trainers/local/test_personal.py",
    "trainers/local/test_precision.py",
    "trainers/local/test_programs.py",
    "trainers/local/test_train.py",
    "trainers/local/test_vision.py",
    "trainers/verl/test_end_to_end.py",
    "trainers/verl/test_host.py",
    "trainers/verl/test_learner.py",
    "trainers/verl/test_servers.py",
    "viewer/test_page",
)
"""Where the tests of `make check` are: the beginnings of their names, below ``tests/``. `make test` runs all others
but those marked ``alone``. A test belongs here if it takes long, or needs more than Python and Linux."""
CHECK_FIXTURES = frozenset({"docker_engine", "openclaw", "programs", "ray_cluster"})
"""Tests that use one of these fixtures belong to `make check` too, as do tests of sandbox backends other than
``namespace``."""


def belongs_to_check(item: pytest.Item) -> bool:
    """Whether `make check` runs this test, and `make test` does not."""
    name = item.nodeid.removeprefix("tests/")
    fixtures = CHECK_FIXTURES.intersection(getattr(item, "fixturenames", ()))
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()  # type: ignore[attr-defined]
    other = any(getattr(value, "name", value) in ("chroot", "docker", "kubernetes", "ray") for value in values)
    return name.startswith(CHECK) or bool(fixtures) or other


AGENTS = "agents/programs/test_programs.py"
"""Tests of installed agent programs, which `make agents` runs alone: they take gigabytes and minutes."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.nodeid.removeprefix("tests/").startswith(AGENTS):
        item.add_marker(pytest.mark.agents)
    elif belongs_to_check(item):
        item.add_marker(pytest.mark.check)


def _bound_examples(item: pytest.Item, most: int) -> None:
    """Limit the examples of a Hypothesis test to ``most``, whatever its own settings are."""
    test = getattr(item, "obj", None)
    test = getattr(test, "__func__", test)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None and own.max_examples > most:
        test._hypothesis_internal_use_settings = settings(own, max_examples=most)


SLOW_MACHINE = (
    "agents/",
    "cli/",
    "desktop/",
    "engines/",
    "envs/",
    "evaluation/",
    "gateway/test_openclaw",
    "live/",
    "live/test_live.py::test_a_browser_shows_markup_of_a_task_as_text",
    "online/test_openclaw",
    "redteam/test_escape.py",
    "redteam/test_exploits.py",
    "reporting/",
    "rollout/",
    "tasks/packs/",
    "tasks/test_desktops.py",
    "tasks/test_math_rows.py",
    "tasks/test_osworld.py",
    "tasks/test_osworld_programs.py",
    "tasks/worlds/test_sites.py",
    "tasks/curation/test_web.py",
    "test_docs.py",
    "test_examples.py",
    "test_tutorials.py",
    "tools/",
    "trainers/",
)
"""Tests with browsers, OpenClaw, training and other whole programs. On a slow machine one in thousands times out, so
these are run once more if they fail; the summary shows the cause."""
SECURITY = re.compile(
    r"/tests/(invariants|verifiers|fuzz)/|attack|/test_(escape|exploits|inside|regrade|runs_verify|conformance_\w+|hostile_\w+)\.py$"
)
"""Security tests among these. They must never fail, so they are not run again."""

LONGEST = (
    "test_tutorials.py",
    "test_examples.py",
    "envs/test_openclaw.py",
    "trainers/verl/test_end_to_end.py",
    "online/test_verl.py",
    "redteam/test_escape.py",
    "agents/openclaw/test_openclaw.py",
    "invariants/test_training_parts_killed.py",
    "trainers/local/test_programs.py",
    "invariants/test_nothing_left.py",
    "invariants/test_faults_engine.py",
    "invariants/test_ray_nodes.py",
    "invariants/test_service_kills.py",
    "sandbox/test_ordinary_user.py",
    "cli/test_cli.py",
    "tasks/packs/test_terminal_basic.py",
    "tasks/packs/test_toolcall_basic.py",
    "evaluation/test_audit.py",
    "evaluation/test_regrade.py",
    "engines/test_transformers.py",
)
"""The longest tests. They start first, so that no worker waits for one of them at the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.as_posix()
        return next((n for n, longest in enumerate(LONGEST) if name.endswith(longest)), len(LONGEST))

    items.sort(key=place)
    for item in items:
        if item.config.getoption("--hypothesis-profile", None) == "quick":
            _bound_examples(item, settings.get_profile("quick").max_examples)
        name = item.path.as_posix()
        if any(f"/tests/{slow}" in name for slow in SLOW_MACHINE) and not SECURITY.search(name):
            item.add_marker(pytest.mark.slow_machine)
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=1))


@contextlib.asynccontextmanager
async def usable(name: str) -> AsyncIterator[Backend]:
    """The backend of this name; skips where it cannot work."""
    made = make_backend(name)
    try:
        await made.probe()
    except SandboxUnavailable as error:
        await made.aclose()
        pytest.skip(f"{name}: {error}")
    yield made
    await made.aclose()


@pytest_asyncio.fixture(scope="module")
async def backend() -> AsyncIterator[Backend]:
    """The namespace backend, shared by the tests of a module. Each test makes its own sandboxes."""
    async with usable("namespace") as made:
        yield made


@contextlib.contextmanager
def ray_nodes(count: int, head_cpus: int = 2) -> Iterator[Any]:
    """A Ray cluster of ``count`` nodes on this machine (:class:`ray.cluster_utils.Cluster`)."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-")  # not below pytest's: a unix socket's path must be short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        # Where it notes its address: Ray makes that folder for a default temp_dir only, and two workers would share it.
        patch.setenv("RAY_TMPDIR", folder)
        os.mkdir(os.path.join(folder, "ray"))
        node = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": head_cpus, "temp_dir": folder})
        try:
            for _ in range(count - 1):
                cluster.add_node(**node)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster of two nodes; this process is connected to it."""
    ray = pytest.importorskip("ray")
    with ray_nodes(2) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
        ray.shutdown()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, with a tokenizer and a chat template."""
    from clawgym.engines.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def benchmark(name: str) -> ModuleType:
    """Import a program of ``benchmarks/`` as a module."""
    spec = importlib.util.spec_from_file_location(
        f"benchmarks.{name}", Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[f"benchmarks.{name}"] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def openclaw() -> Installation:
    """The real OpenClaw, as installed by `make openclaw`."""
    try:
        return installed()
    except AgentError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def clawgym_data() -> Path:
    """The folder that holds ``clawgym_train`` and ``clawgym_eval``."""
    root = os.environ.get("CLAWGYM_DATA")
    if not root:
        pytest.skip("CLAWGYM_DATA does not point at a copy of the public tasks")
    for folder in (Path(root), Path(root) / "data", Path(root) / "RL" / "data"):
        if (folder / "clawgym_train").is_dir():
            return folder
    pytest.fail(f"CLAWGYM_DATA={root}: no clawgym_train in it")
