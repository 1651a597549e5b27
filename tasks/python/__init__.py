"""Task sets written in Python: one function makes tasks, another checks the agent's workspace.

docs/tutorials/write-a-task.md starts with a complete example. The module of a task set is imported on the host. For
grading, its source is copied to the grading sandbox, where :mod:`~clawgym.tasks.python._check` imports it with a stub
of ClawGym (:mod:`~clawgym.tasks.python._stub`) and calls the check function.

Invariants: a task's verifier consists of the module's text, the name of the check function and the expected values, so
its content hash depends on these and on nothing else of the host. Checks run only in a sandbox.
"""

from clawgym.tasks.python.authoring import PythonTasks, TaskDraft, task
from clawgym.tasks.python.modules import load_file, tasks_of

__all__ = ["PythonTasks", "TaskDraft", "load_file", "task", "tasks_of"]
