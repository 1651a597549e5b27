"""Tasks: readers and writers of task formats, task sets by name, and the packs of this library."""

from __future__ import annotations

from clawgym.tasks.formats import TaskFormat, read, read_task, write
from clawgym.tasks.sets import available, load, names

__all__ = ["TaskFormat", "available", "load", "names", "read", "read_task", "write"]
