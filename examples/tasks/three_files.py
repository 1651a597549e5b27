"""A task in Python: used by ``torch_policy_gradient.py``."""

from clawgym import TaskDraft, task


@task
def three_files():
    return TaskDraft(
        instruction="Make the files a, b and c, each from those before it.",
        check=check,
        solution="echo one > a; cat a a > b; cat a b > c",
        wrong={"nothing in them": "touch a b c", "only a": "echo one > a"},
    )


def check(workspace):
    lines = dict.fromkeys("abc", 0)
    for name in lines:
        if (workspace / name).exists():
            lines[name] = (workspace / name).read_text().count("one")
    return {"a": lines["a"] == 1, "b": lines["b"] == 2, "c": lines["c"] == 3}
