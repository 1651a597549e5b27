"""Stands in for the package clawgym where the module of a task set is imported in a sandbox."""


class TaskDraft:
    """Nothing is made here."""

    def __init__(self, *args, **kwargs):
        pass


def task(function=None, **options):
    """Leave the function as it is: nobody calls it here."""
    return function if function is not None else lambda wrapped: wrapped
