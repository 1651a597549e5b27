"""Push checkpoints, results, task sets, traces and boards to the Hugging Face Hub, and pull them.

Invariants: nothing is uploaded if a secret is found in it. Only safetensors weights are uploaded, no pickles and no
optimiser states. A card contains no paths of this machine. Pushing the same files again makes no commit. What is pulled
is bounded and checked, and lies below one folder.
"""

from clawgym.hub._board import plan_board
from clawgym.hub._checkpoint import Checkpoint, HubError, read_checkpoint
from clawgym.hub._model import plan_checkpoint
from clawgym.hub._pull import Pulled, plan_pull, pull
from clawgym.hub._results import plan_results
from clawgym.hub._tasks import plan_tasks
from clawgym.hub._traces import plan_traces
from clawgym.hub._upload import Pushed, Upload, UploadPlan, push

__all__ = [
    "Checkpoint",
    "HubError",
    "Pulled",
    "Pushed",
    "Upload",
    "UploadPlan",
    "plan_board",
    "plan_checkpoint",
    "plan_pull",
    "plan_results",
    "plan_tasks",
    "plan_traces",
    "pull",
    "push",
    "read_checkpoint",
]
