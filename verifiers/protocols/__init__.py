"""Verifier protocols: how the files of a verifier are mounted, run, and their result read."""

from __future__ import annotations

from clawgym.records import VerifierSpec
from clawgym.verifiers.protocols.base import Subject, VerifierProtocol, VerifierReport, file_of
from clawgym.verifiers.protocols.harbor import HarborTests
from clawgym.verifiers.protocols.reward_sh import AskingCheck, RewardScript, StandardCheck, standard_reward_sh
from clawgym.verifiers.protocols.tests import TESTS_REWARD_SH, StandardTests

__all__ = ["AskingCheck", "StandardCheck", "Subject", "VerifierReport", "VerifierProtocol", "protocol_of"]


def protocol_of(spec: VerifierSpec) -> VerifierProtocol:
    """How the files of ``spec`` are run, unless a grader (:mod:`clawgym.verifiers.graders`) has them run."""
    if spec.protocol == "harbor":
        return HarborTests()
    script = file_of(spec, RewardScript.entry)
    if script == TESTS_REWARD_SH.encode() and file_of(spec, "tests.json") is not None:
        return StandardTests()
    if script == standard_reward_sh() and file_of(spec, "check.py") is not None:
        return StandardCheck()
    return RewardScript()
