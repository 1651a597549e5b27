"""The pages of docs/tutorials and docs/start run from top to bottom, and print what they show."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from clawgym.engines.packaged import packaged_folder
from clawgym.errors import EngineError
from clawgym.tasks import scaffold

from .engines.fake_openai import WORDS, FakeOpenAI, Streamed, fake_openai, reply
from .pages import Page, agrees, blocks, commands, files

__all__ = ["fake_openai"]

pytestmark = pytest.mark.timeout(900)

DOCS = Path(__file__).parent.parent / "docs"
SHORT = (
    "start/first-loop",
    "start/first-score",
    "start/install",
    "tutorials/collect-tokens",
    "tutorials/plug-in-an-agent",
    "tutorials/read-an-audit",
    "tutorials/write-a-task",
    "tutorials/write-an-environment",
)
TRAINING = ("start/first-training", "tutorials/train-a-model")
WITH_OPENCLAW = ("tutorials/run-openclaw",)
SERVING = ("start/first-assistant",)
NOTHING_TO_RUN = ("start/numbers",)
BRIEFLY = "--set budget.steps=1 --set sft.steps=10 --set tasks.validation.count=8 --set tasks.heldout.count=8"
"""The pages on training say that these options try all commands within minutes. The tests train with them."""


@pytest.fixture
def endpoint(fake_openai: FakeOpenAI) -> FakeOpenAI:
    """A model that says OK to everything."""

    async def says_ok(request: dict[str, Any]) -> Streamed | web.Response:
        return Streamed(WORDS) if request.get("stream") else await reply("OK")(request)

    fake_openai.default = says_ok
    return fake_openai


async def run(name: str, tmp_path: Path, endpoint: FakeOpenAI, **options: Any) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    page = Page(DOCS / f"{name}.md", folder, endpoint.base_url, **options)
    await asyncio.to_thread(page.run)


def test_every_page_is_run() -> None:
    pages = {
        f"{path.parent.name}/{path.stem}" for part in ("start", "tutorials") for path in (DOCS / part).glob("*.md")
    }
    assert pages == {*SHORT, "tutorials/benchmark", *TRAINING, *WITH_OPENCLAW, *SERVING, *NOTHING_TO_RUN}


@pytest.mark.parametrize("name", SHORT)
async def test_page_runs(name: str, tmp_path: Path, endpoint: FakeOpenAI) -> None:
    await run(name, tmp_path, endpoint)


async def test_page_on_benchmarks_runs(tmp_path: Path, endpoint: FakeOpenAI) -> None:
    """With 8 of the 42 tasks, so the figures differ from those shown. The page before it shows some of them too."""
    await run("tutorials/benchmark", tmp_path, endpoint, add={r"clawgym eval (?!.*--limit)": "--limit 8"})


@pytest.mark.parametrize("name", TRAINING)
async def test_page_with_training_runs(name: str, tmp_path: Path, endpoint: FakeOpenAI) -> None:
    assert BRIEFLY in (DOCS / f"{name}.md").read_text()
    await run(name, tmp_path, endpoint, add={"clawgym train": BRIEFLY})


@pytest.mark.usefixtures("openclaw")
@pytest.mark.parametrize("name", WITH_OPENCLAW)
async def test_page_with_openclaw_runs(name: str, tmp_path: Path, endpoint: FakeOpenAI) -> None:
    await run(name, tmp_path, endpoint)


@pytest.mark.parametrize("name", SERVING)
async def test_page_with_a_service_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    try:
        packaged_folder("smollm2-135m")
    except EngineError as error:
        pytest.skip(f"the model cannot be fetched ({error})")
    folder = tmp_path / "page"
    folder.mkdir()
    page = Page(DOCS / f"{name}.md", folder)
    page.text = page.text.replace(" 40\n", " 2\n")  # rounds
    page.changed = True
    await asyncio.to_thread(page.run)


def test_numbers_are_those_of_the_pages_that_made_them() -> None:
    made = "".join((DOCS / name).read_text() for name in ("start/first-score.md", "tutorials/benchmark.md"))
    for block in blocks((DOCS / "start/numbers.md").read_text()):
        for line in block.text.splitlines():
            assert line.split() in [known.split() for known in made.splitlines()] or "official" in line, line


def test_file_of_tasks_new_is_shown() -> None:
    assert files((DOCS / "tutorials/write-a-task.md").read_text())["add_up.py"] == scaffold.PYTHON


PAGE = """\
```python title="x.py"
value = 1
```

=== "One"

    ```console
    $ cat x.py
    value = 1
    $ echo $VALUE > here
    ```

=== "Two"

    ```bash
    cat x.py >> x.py.copy
    export VALUE=2
    ```

```python
print(open("here").read())
```

```text
...
```

<!-- exit 3 -->
```console
$ cat <<'END' && exit 3
> one
END
> one
```
"""


def page(text: str, folder: Path) -> Page:
    folder.joinpath("page.md").write_text(text)
    home = folder / "home"
    home.mkdir()
    return Page(folder / "page.md", home)


def test_runner_runs_blocks_in_order(tmp_path: Path) -> None:
    made = page(PAGE, tmp_path)
    made.run()
    assert [block.tab for block in blocks(PAGE)] == ["", "One", "Two", "", "", ""]
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["here", "x.py"]
    assert made.ran == 5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cat x.py\n", "cat y.py\n"),  # fails
        ("    value = 1\n", "    value = 2\n"),  # prints something else
        (">> x.py.copy", ">> no/such/folder"),  # in another tab
        ('open("here")', 'open("there")'),
        ("...\n", "two\n"),
        ("exit 3 -->", "exit 4 -->"),
        ('```python title="x.py"', "```yaml"),  # neither run nor a file
    ],
)
def test_runner_notices_errors(old: str, new: str, tmp_path: Path) -> None:
    assert old in PAGE
    with pytest.raises(AssertionError):
        page(PAGE.replace(old, new), tmp_path).run()


def test_commands_of_a_session() -> None:
    assert commands("$ a \\\n  b\nout\n$ c <<'X'\ntext\nX\n") == [("a \\\n  b", "out\n"), ("c <<'X'\ntext\nX", "")]


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\n...\nc\n", "a\nb\nb\nc\n", True),
        ("a\n...\nc\n", "a\nb\n", False),
        ("a ... c\n", "a   b   c\n", True),
        ("took 3 s, 1m27s\n", "took 45 s, 3s\n", True),
        ("3 solved\n", "4 solved\n", False),
        ("4/42  strict 25.0% [4.6, 69.9]  2 running\nend\n", "end\n", True),
    ],
)
def test_outputs_agree(shown: str, printed: str, same: bool) -> None:
    assert agrees(shown, printed) is same


def test_ends_of_outputs_agree() -> None:
    assert agrees("loss 4.8, 3 tasks\n", "loss 1.25, 4 tasks\n", ends=True)
    assert not agrees("loss 4.8\n", "error 4.8\n", ends=True)
    assert agrees("begin 1\nb\nend\n", "begin 2\nc\nd\nend\n", ends=True)
    assert agrees("(80% power): strict 1,\nofficial 2\n", "(80% power): strict\n10, official 2\n", ends=True)
    assert not agrees("begin\n...\nend\n", "begin\nend 1\n", ends=True)


def test_words_stand_for_a_model(tmp_path: Path) -> None:
    made = page("", tmp_path)
    made.endpoint = "http://x/v1"
    filled = made._filled("eval --model MODEL --base-url http://127.0.0.1:8000/v1")
    assert filled == "eval --model fake-MODEL --base-url http://x/v1 --limit 6"
    assert not re.search("MODEL|URL", made._filled("eval --model OTHER --base-url URL").replace("fake-OTHER", ""))
