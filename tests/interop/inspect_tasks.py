"""Tasks of Inspect AI, for the tests."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, exact, includes, scorer
from inspect_ai.util import sandbox


@scorer(metrics=[accuracy()])
def doubled():
    async def score(state, target):
        done = await sandbox().exec(["python3", "double.py", "21"])
        return Score(value={"runs": done.success, "right": done.stdout.strip() == "42"}, explanation=done.stderr)

    return score


@task
def questions():
    return Task(
        dataset=[
            Sample(id="capital", input="What is the capital of France? One word.", target="Paris"),
            Sample(id="sum", input="What is 20 + 22?", target="42"),
            Sample(id="letters", input="Which comes first?", choices=["A", "B"], target="A"),
        ],
        scorer=[exact(), includes()],
    )


@task
def programs():
    files = {"double.py": "import sys\nprint(int(sys.argv[1]) + 2)\n", "data/note.txt": "Make it double.\n"}
    samples = [Sample(id="repair", input="Repair double.py; data/note.txt says how.", files=files)]
    return Task(dataset=samples, scorer=doubled(), sandbox="docker")
