"""Our tasks as a taskset of verifiers, for the tests."""

from clawgym.interop.verifiers import ClawGymEnv, ClawGymHarness, ClawGymTaskset

__all__ = ["ClawGymEnv", "ClawGymHarness", "ClawGymTaskset"]
