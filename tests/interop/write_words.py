"""Two tasks in Python, for the tests."""

from clawgym import TaskDraft, task


@task
def write_camel():
    return TaskDraft(
        instruction="Write the word camel to the file cider.txt.",
        check=camel,
        solution="echo camel > cider.txt",
        wrong={"another word": "echo wrong > cider.txt"},
    )


@task
def write_comet():
    return TaskDraft(
        instruction="Write the word comet to the file panda.txt.",
        check=comet,
        solution="echo comet > panda.txt",
        wrong={"another word": "echo wrong > panda.txt"},
    )


def camel(workspace):
    return {"word": said(workspace / "cider.txt") == "camel\n"}


def comet(workspace):
    return {"word": said(workspace / "panda.txt") == "comet\n"}


def said(path):
    return path.read_text() if path.exists() else ""
