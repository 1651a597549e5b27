"""Tasks: readers and writers of their formats, named sets of them, and packs of our own."""

from __future__ import annotations

from clawgym.tasks.formats import TaskFormat, read, read_task, write
from clawgym.tasks.sets import available, load, names

__all__ = ["TaskFormat", "available", "load", "names", "read", "read_task", "write"]
