"""The Hugging Face Hub: a checkpoint of a training run, with a card that says what it was made of.

Invariants: nothing is uploaded in which a secret is seen; weights are safetensors, never a pickle, and never a state of
the optimiser; a card shows no path of this machine; the same files pushed again make no commit.
"""

from clawgym.hub._checkpoint import Checkpoint, HubError, read_checkpoint
from clawgym.hub._secrets import find_secrets
from clawgym.hub.push import Plan, Pushed, Upload, plan_push, push

__all__ = [
    "Checkpoint",
    "HubError",
    "Plan",
    "Pushed",
    "Upload",
    "find_secrets",
    "plan_push",
    "push",
    "read_checkpoint",
]
