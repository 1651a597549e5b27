"""Task sets written in Python: one function makes the tasks, one checks what an agent left.

``docs/new-task.md`` starts with a whole one. The module of a task set is imported on the host, as any module that its
user names. To grade, its source is shipped to the grading sandbox, where :mod:`~clawgym.tasks.python._check` imports it
beside a stand-in for ClawGym (:mod:`~clawgym.tasks.python._stub`) and calls the check function.

Invariants: the verifier of a task is made of the module's text, the name of its check function and the expected values,
so the content hash changes with each of them and with nothing else of the host; no check runs outside a sandbox.
"""

from clawgym.tasks.python.authoring import PythonTasks, TaskDraft, task
from clawgym.tasks.python.modules import load_file, tasks_of

__all__ = ["PythonTasks", "TaskDraft", "load_file", "task", "tasks_of"]
