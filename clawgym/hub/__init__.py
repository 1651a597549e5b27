"""Upload a checkpoint of a training run to the Hugging Face Hub, with a model card.

Invariants: nothing is uploaded if a secret is found in it. Only safetensors weights are uploaded, no pickles and no
optimiser states. The card contains no paths of this machine. Pushing the same files again makes no commit.
"""

from clawgym.hub._checkpoint import Checkpoint, HubError, read_checkpoint
from clawgym.hub.push import Pushed, Upload, UploadPlan, plan_push, push

__all__ = [
    "Checkpoint",
    "HubError",
    "UploadPlan",
    "Pushed",
    "Upload",
    "plan_push",
    "push",
    "read_checkpoint",
]
