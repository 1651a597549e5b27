from __future__ import annotations

import asyncio
import http.client
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from clawgym.online.versions import Versions
from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import Turn
from clawgym.records.run_folder import RunFolder, make_manifest
from clawgym.reporting import page
from clawgym.trainers.common.answers import advantages_file
from clawgym.viewer.server import Viewer, open_viewer

from .api_types import TYPES
from .runs import ATTACK, PICTURE, PNG, episode, open_run

STRIPPED = ATTACK.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")


@pytest.fixture(autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of this test alone for the indexes, and for the sockets of processes that can be watched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))


class Client:
    """Asks a viewer as its page does, and checks each answer against its type."""

    def __init__(self, viewer: Viewer, session: aiohttp.ClientSession) -> None:
        self.viewer = viewer
        self.session = session

    async def raw(self, address: str, status: int = 200, **options: Any) -> tuple[Any, bytes]:
        async with self.session.get(f"{self.viewer.origin}/{address}", **options) as answer:
            data = await answer.read()
            assert answer.status == status, (address, answer.status, data[:500])
            return answer.headers, data

    async def get(self, address: str, type: str) -> Any:
        data = json.loads((await self.raw(f"api/{address}"))[1])
        TYPES.check(data, type)
        return data

    async def fails(self, address: str, status: int) -> str:
        data = json.loads((await self.raw(f"api/{address}", status))[1])
        TYPES.check(data, "Failure")
        return data["error"]

    async def sources(self) -> dict[str, Any]:
        found = await self.get("sources", "Sources")
        return {source["name"]: source for source in found["sources"]}

    async def until(self, check: Callable[[], Awaitable[Any]]) -> Any:
        """What ``check`` gives once it is true: it is asked again at each event."""
        async with asyncio.timeout(60), self.session.get(f"{self.viewer.origin}/api/events") as events:
            while not (found := await check()):
                line = await events.content.readline()
                if line.startswith(b"data: "):
                    TYPES.check(json.loads(line[6:]), "LiveEvent")
            return found

    async def indexed(self, id: str, episodes: int) -> Any:
        """The answer about a run, once all its episodes are indexed and its figures are computed."""

        async def check() -> Any:
            run = await self.get(f"runs/{id}", "Run")
            ready = run["summary"] and run["summary"]["scores"]["episodes"] == episodes
            return run if ready and run["indexed"]["done"] == run["indexed"]["total"] else None

        return await self.until(check)


@asynccontextmanager
async def opened(*paths: Path, write: bool = False) -> AsyncIterator[Client]:
    jar = aiohttp.CookieJar(unsafe=True)
    async with open_viewer(paths, write=write) as viewer, aiohttp.ClientSession(cookie_jar=jar) as session:
        client = Client(viewer, session)
        await client.raw(viewer.url.removeprefix(f"{viewer.origin}/"))
        yield client


def make_run(path: Path, text: str = "hello", name: str = "first") -> Path:
    with open_run(path / name, ["a", "b", "c"]) as run:
        run.record(episode("a", {"x": 1.0, "y": 1.0}, text=text))
        run.record(episode("b", None))
        run.record(episode("b", {"x": 0.0, "y": 0.5}), attempt=1)
        run.record(episode("c", {"x": 0.0, "y": 1.0}))
    return path / name


async def test_answers_about_a_run(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with opened(tmp_path) as client:
        id = (await client.sources())["first"]["id"]
        run = await client.indexed(id, 3)
        assert [(c["name"], c["failed"], c["graded"], c["share"]) for c in run["checks"]] == [
            ("x", 2, 3, 2 / 3),
            ("y", 1, 3, 1 / 3),
        ]
        assert run["state"] == "complete"
        assert run["summary"]["infra_faults"] == {"endpoint": 1}
        source = (await client.sources())["first"]
        assert (source["run"]["episodes"], source["run"]["cost_usd"], source["state"]) == (3, 1.5, "complete")
        listed = await client.get(f"runs/{id}/episodes?check=x&sort=-official", "Page<EpisodeLine>")
        assert (listed["total"], listed["all"], [one["task"] for one in listed["items"]]) == (2, 3, ["c", "b"])
        found = await client.get(f"runs/{id}/episodes/b.0", "Episode")
        assert [one["outcome"] for one in found["history"]] == ["infra", "failed"]
        assert found["checks_list"][1] == {"name": "y", "score": 0.5, "seen": "y: 0.5"}
        assert any("No workspace is stored between the calls" in note for note in found["notes"])
        turns = await client.get(f"runs/{id}/episodes/b.0/turns?offset=1&limit=5", "Page<Step>")
        assert (turns["total"], len(turns["items"])) == (3, 2)
        assert turns["items"][0]["calls"][0]["changes"] == [
            {"path": "a.txt", "diff": "@@ -0,0 +1,2 @@\n+one\n+two", "whole": True}
        ]
        (change,) = turns["items"][1]["calls"][0]["changes"]
        assert change == {"path": "a.txt", "diff": "@@ -1,2 +1,2 @@\n one\n-two\n+three", "whole": False}
        last = await client.get(f"runs/{id}/episodes/b.0/turns?offset=2&limit=1", "Page<Step>")
        assert last["items"][0]["calls"][0]["changes"] == [change], "earlier pages count"
        headers, data = await client.raw(found["pictures"][0]["src"].removeprefix("/"))
        assert (headers["Content-Type"], data) == ("image/png", PNG)
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "no token ids" in await client.fails(f"runs/{id}/episodes/b.0/tokens?turn=0", 404)
        assert "choose one of its list" in await client.fails(f"runs/{id}/episodes/zz.0", 404)
        assert "whole number" in await client.fails(f"runs/{id}/episodes?limit=9999", 400)
        assert "there is no such run" in await client.fails("runs/none", 404)


async def test_token_ids_of_a_transcript(tmp_path: Path) -> None:
    turns = [
        Turn(context_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.5,), policy_version=4),
        Turn(context_ids=(5,), sampled_ids=(6, 7), logprobs=(-1.0, -2.0), parent=0, policy_version=4),
    ]
    with open_run(tmp_path / "run", "a") as run:
        run.record(episode("a", {"x": 1.0}, turns=turns))
    async with opened(tmp_path) as client:
        id = (await client.sources())["run"]["id"]
        steps = (await client.get(f"runs/{id}/episodes/a.0/turns", "Page<Step>"))["items"]
        assert [(step["turn"], step["policy_version"]) for step in steps] == [(None, None), (0, 4), (1, 4)]
        tokens = await client.get(f"runs/{id}/episodes/a.0/tokens?turn=1", "Tokens")
        assert (tokens["before"], [one["id"] for one in tokens["context"]]) == (3, [5])
        assert [(one["id"], one["logprob"]) for one in tokens["sampled"]] == [(6, -1.0), (7, -2.0)]


async def test_search_finds_steps_of_all_runs(tmp_path: Path) -> None:
    make_run(tmp_path, "the walrus sleeps")
    make_run(tmp_path, "a walrus", "second")
    async with opened(tmp_path) as client:
        for name in ("first", "second"):
            await client.indexed((await client.sources())[name]["id"], 3)
        found = await client.get("search?q=walrus", "Page<SearchHit>")
        assert found["total"] == 4
        hit = next(one for one in found["items"] if one["step"] == 1 and one["run"] == "first")
        assert hit["parts"][:2] == [["the ", False], ["walrus", True]]
        pages = [
            (await client.get(f"search?q=walrus&offset={n}&limit=1", "Page<SearchHit>"))["items"] for n in range(4)
        ]
        assert [one for page in pages for one in page] == found["items"]
        one = await client.get(f"search?q=walrus&source={hit['source']}", "Page<SearchHit>")
        assert {each["run"] for each in one["items"]} == {"first"}


async def test_a_run_grows_while_it_is_shown(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", "ab") as run:
        run.record(episode("a", {"x": 1.0}))
        async with opened(tmp_path) as client:
            id = (await client.sources())["run"]["id"]
            assert (await client.indexed(id, 1))["state"] == "running"
            run.record(episode("b", {"x": 0.0}))
            assert (await client.indexed(id, 2))["outcomes"] == ["failed", "solved"]
            run.close()
            with open_run(tmp_path / "later", "a"):

                async def later() -> Any:
                    return (await client.sources()).get("later")

                assert (await client.until(later))["state"] in ("running", "unknown")


async def test_interrupted_damaged_and_empty_paths(tmp_path: Path) -> None:
    with open_run(tmp_path / "interrupted", "ab") as run:
        run.record(episode("a", {"x": 1.0}))
    with open_run(tmp_path / "torn", "a") as run:
        run.record(episode("a", {"x": 1.0}))
        with (tmp_path / "torn/results.jsonl").open("ab") as file:
            file.write(b'{"key": "a#0", "task_id": "a", "sample": 0, "outcome": "solved", "result": 7}\n{"half')
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/receipt.json").write_text('{"kind": "eval", "tasks": 5}')
    async with opened(tmp_path, tmp_path / "missing") as client:
        sources = await client.sources()
        assert sources["damaged"]["state"] == "damaged"
        assert "restore it" in await client.fails(f"runs/{sources['damaged']['id']}", 404)
        assert (await client.indexed(sources["interrupted"]["id"], 1))["state"] == "incomplete"
        run = await client.indexed(sources["torn"]["id"], 1)
        assert run["notes"] == ["1 damaged lines of results.jsonl are left out."]
        (problem,) = (await client.get("sources", "Sources"))["problems"]
        assert "missing: No such file" in problem
    (tmp_path / "empty").mkdir()
    async with opened(tmp_path / "empty") as client:
        assert await client.sources() == {}
        assert (await client.get("search?q=a", "Page<SearchHit>"))["items"] == []
        assert (await client.get("live", "Live"))["runs"] == []


async def test_hostile_text_is_data_and_visible(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", [ATTACK, "=1+2"]) as run:
        run.record(episode(ATTACK, {ATTACK: 0.0}, text=ATTACK))
        run.record(episode("=1+2", {"x": 1.0}))
    async with opened(tmp_path) as client:
        id = (await client.sources())["run"]["id"]
        run = await client.indexed(id, 2)
        assert run["checks"][0]["name"] == STRIPPED
        page = await client.get(f"runs/{id}/episodes?sort=order", "Page<EpisodeLine>")
        assert page["items"][0]["task"] == STRIPPED
        turns = await client.get(f"runs/{id}/episodes/{page['items'][0]['name']}/turns", "Page<Step>")
        assert turns["items"][1]["text"] == STRIPPED
        headers, data = await client.raw(f"api/runs/{id}/episodes?format=csv")
        assert headers["Content-Type"].startswith("text/csv")
        assert b"\n=1+2" not in data
        assert b",'=1+2," in data
        assert (await client.raw(f"api/runs/{id}/episodes?format=jsonl"))[1].count(b"\n") == 2


async def test_links_and_oversize_files_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawgym.reporting.transcripts.LARGEST_TRANSCRIPT", 200)
    secret = tmp_path / "secret.json"
    secret.write_text("a secret")
    run = make_run(tmp_path / "in")
    picture = run / "pictures" / f"{PICTURE.sha256}.png"
    picture.unlink()
    picture.symlink_to(secret)
    log = run / "episodes/a.0/verifier.log"
    log.unlink()
    log.symlink_to(secret)
    (tmp_path / "in/link").symlink_to(make_run(tmp_path / "outside", name="other"))
    async with opened(tmp_path / "in") as client:
        sources = await client.sources()
        assert set(sources) == {"first"}
        id = sources["first"]["id"]
        assert "link" in await client.fails(f"runs/{id}/pictures/{PICTURE.sha256}.png", 404)
        assert "no such address" in await client.fails(f"runs/{id}/pictures/..%2f..%2fsecret.json", 404)
        shown = await client.get(f"runs/{id}/episodes/a.0", "Episode")
        assert shown["verifier_log"] == ""
        assert "larger than 200 bytes" in " ".join(shown["notes"])


def ask(viewer: Viewer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One request with exactly these headers."""
    host = viewer.origin.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in ({"Host": host} | headers).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


async def test_only_the_page_on_this_machine_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "asset", lambda name: f"/* {name} */")
    make_run(tmp_path)
    async with open_viewer([tmp_path]) as viewer:

        async def asked(*given: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
            return await asyncio.to_thread(ask, viewer, *given, **headers)

        secret = viewer.url.rstrip("/").rpartition("/")[2]
        assert len(secret) >= 32
        for path in ("/", "/api/sources", "/app.js", f"/{secret[:-1]}/", "/api/events"):
            status, headers, data = await asked(path)
            assert status == 403, path
            assert b"first" not in data
        status, headers, _ = await asked(f"/{secret}/runs/x?sort=task")
        assert (status, headers["location"]) == (303, "/runs/x?sort=task")
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        held = {"Cookie": cookie.partition(";")[0]}
        assert (await asked(f"/{secret}//evil.example"))[1]["location"] == "/evil.example"
        for path in ("/", "/runs/anything/else"):
            status, headers, data = await asked(path, **held)
            assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert b"<script>" not in data
        status, headers, data = await asked("/api/sources", **held)
        assert status == 200
        assert headers["content-type"] == "application/json; charset=utf-8"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        for host in ("evil.example", "localhost", f"evil.example:{viewer.origin.rpartition(':')[2]}"):
            assert (await asked("/api/sources", Host=host, **held))[0] == 421
        assert (await asked("/api/sources", Cookie=f"{held['Cookie']}x"))[0] == 403
        for method in ("POST", "PUT", "DELETE"):
            assert (await asked("/api/sources", method, **held))[0] == 403
            status, _, _ = await asked("/api/sources", method, Origin=viewer.origin, **held)
            assert status == 405
    async with open_viewer([tmp_path]) as other:
        assert other.url.rstrip("/").rpartition("/")[2] != secret


def make_service(path: Path) -> Versions:
    path.mkdir()
    (path / "service.json").write_text("{}")
    (path / "gate").mkdir()
    figures = {"turns": {"n": 3, "mean": 0.1, "lower": -0.1, "upper": None, "needed": 0.0}}
    compared = {"version": 1, "verdict": "candidate", "reasons": ["more are needed"], "figures": figures}
    (path / "gate/latest.json").write_text(json.dumps(compared))
    (path / "model").mkdir()
    versions = Versions.create(path / "versions", path / "model")
    versions.add(lambda folder: (folder / "w").write_text("1"), parent=0, sessions=["s"])
    return versions


@pytest.mark.parametrize("write", [False, True])
async def test_versions_change_only_with_the_flag_and_from_the_page(tmp_path: Path, write: bool) -> None:
    versions = make_service(tmp_path / "served")
    async with opened(tmp_path, write=write) as client:
        id = (await client.sources())["served"]["id"]
        shown = await client.get(f"online/{id}", "Online")
        assert (shown["serving"], shown["writable"], shown["versions"][1]["can_promote"]) == (0, write, True)
        assert shown["comparison"]["figures"][0]["low"] == -0.1
        url, own = f"{client.viewer.origin}/api/online/{id}", {"Origin": client.viewer.origin}
        for headers in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
            async with client.session.post(f"{url}/promote", json={"version": 1}, headers=headers) as answer:
                assert answer.status == 403
        async with client.session.post(f"{url}/promote", json={"version": 1}, headers=own) as answer:
            assert answer.status == (200 if write else 403)
            data = await answer.json()
        assert versions.serving.number == int(write)
        if write:
            TYPES.check(data, "Online")
            assert (data["serving"], data["events"][0]["reason"]) == (1, "by hand, in the viewer")
            for body in ("[]", '{"version": true}', "{", '{"version": "1"}'):
                async with client.session.post(f"{url}/rollback", data=body, headers=own) as answer:
                    assert answer.status == 400
            async with client.session.post(f"{url}/rollback", json={"version": None}, headers=own) as answer:
                assert (answer.status, (await answer.json())["serving"]) == (200, 0)
            async with client.session.post(f"{url}/promote", json={"version": 1}, headers=own) as answer:
                assert "only a candidate" in (await answer.json())["error"]


async def test_answers_about_a_pool(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    first = Turn(
        context_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.5,), policy_version=0,
        messages=({"role": "user", "content": ATTACK},), reply={"content": "", "tool_calls": [call]},
    )  # fmt: skip
    second = Turn(
        context_ids=(4,), sampled_ids=(5, 6), logprobs=(-1.0, -2.0), policy_version=1, parent=0,
        messages=({"role": "tool", "tool_call_id": "c", "content": "a.txt"},), reply={"content": "done"},
    )  # fmt: skip
    aside = Turn(
        context_ids=(9,), sampled_ids=(8,), logprobs=(-1.0,), role="subagent",
        messages=({"role": "user", "content": "aside"},), reply={"content": "so"},
    )  # fmt: skip
    with Pool(tmp_path / "pool.db") as pool:
        group = pool.open_group(task_id="t", size=2)
        for sample, reward in enumerate((1.0, 0.0)):
            id = pool.open_episode(task_id="t", task_hash="h" * 8, sample=sample, seed=1, agent="a", group=group)
            pool.append([(id, n, turn) for n, turn in enumerate((first, second, aside))])
            pool.set_turn_rewards(id, {1: 0.5}, about={1: {"judge": "j", "votes": [1, None], "hints": ["try"]}})
            pool.close_episode(id, EpisodeEnd(outcome="solved", reward=reward))
        before = (tmp_path / "pool.db").read_bytes()
        async with opened(tmp_path) as client:
            id = (await client.sources())["pool.db"]["id"]
            shown = await client.get(f"pools/{id}", "Pool")
            assert shown["channels"][0]["episodes"] == {"solved": 2}
            assert {one["version"]: one["tokens"] for one in shown["versions"]} == {None: 2, 0: 2, 1: 4}
            (one,) = (await client.get(f"pools/{id}/groups", "Page<PoolGroup>"))["items"]
            assert one["rewards"] == [1.0, 0.0]
            listed = await client.get(f"pools/{id}/episodes?group={one['id']}&limit=1&q=t", "Page<PoolEpisodeLine>")
            assert (listed["total"], len(listed["items"])) == (2, 1)
            seq = listed["items"][0]["seq"]
            assert (await client.get(f"pools/{id}/episodes?channel=none", "Page<PoolEpisodeLine>"))["total"] == 0
            shown = await client.get(f"pools/{id}/episodes/{seq}", "PoolEpisode")
            assert shown["advantage"]["centred"] == -0.5
            assert shown["rewards_by_turn"] == [{"step": 2, "name": "judge", "value": 0.5}]
            steps = (await client.get(f"pools/{id}/episodes/{seq}/turns", "Page<Step>"))["items"]
            assert [(step["source"], step["turn"]) for step in steps] == [
                ("user", None), ("agent", 0), ("agent", 1), ("user", None), ("agent", 2)
            ]  # fmt: skip
            assert steps[0]["text"] == STRIPPED
            assert steps[1]["observations"][0]["text"] == "a.txt"
            assert steps[2]["rewards"][0]["votes"] == [1, None]
            tokens = await client.get(f"pools/{id}/episodes/{seq}/tokens?turn=1", "Tokens")
            assert tokens["before"] == 3
            assert [(t["id"], t["trained"], round(t["advantage"], 3)) for t in tokens["sampled"]] == [
                (5, True, -0.707), (6, True, -0.707)
            ]  # fmt: skip
            assert tokens["advantages"] == {"step": None, "spread": None}
            assert "computed here" in shown["notes"][0]
            tree = await client.get(f"pools/{id}/episodes/{seq}/sequences", "SequenceTree")
            assert tree["sequences"] == [{"turns": [0, 1], "trained": [0, 1], "ids": 6, "trained_ids": 3}]
            assert "no episode 99" in await client.fails(f"pools/{id}/episodes/99", 404)
            assert "no such thing" in await client.fails(f"pools/{id}/pictures/{'0' * 64}", 404)
        assert (tmp_path / "pool.db").read_bytes() == before
        assert pool.fetch("trainer", step=4) is not None
        (tmp_path / "advantages").mkdir()
        stored = advantages_file(tmp_path, 4)
        stored.write_text(json.dumps({shown["id"]: {"1": [0.5, -1, 2]}}))
        async with opened(tmp_path) as client:
            shown = await client.get(f"pools/{id}/episodes/{seq}", "PoolEpisode")
            assert shown["trained"] == {
                "step": 4,
                "turns": [{"turn": 1, "step": 2, "mean": 0.5, "least": -1.0, "most": 2.0}],
            }
            assert shown["notes"] == []
            tokens = await client.get(f"pools/{id}/episodes/{seq}/tokens?turn=1", "Tokens")
            assert [token["advantage"] for token in tokens["sampled"]] == [0.5, 0.5]
            assert tokens["advantages"] == {"step": 4, "spread": [-1.0, 2.0]}
            tokens = await client.get(f"pools/{id}/episodes/{seq}/tokens?turn=0", "Tokens")
            assert [token["advantage"] for token in tokens["sampled"]] == [None], "this turn was not trained on"
            stored.write_text('{"' + shown["id"] + '": [[')
            assert (await client.get(f"pools/{id}/episodes/{seq}", "PoolEpisode"))["trained"] is None
            stored.unlink()
            stored.parent.rmdir()
    files = {path.name for path in tmp_path.iterdir()}
    async with opened(tmp_path) as client:  # nobody writes it any more
        await client.get(f"pools/{id}", "Pool")
    assert {path.name for path in tmp_path.iterdir()} == files, "nothing is made beside a pool"


async def test_answers_about_a_training(tmp_path: Path) -> None:
    folder = tmp_path / "trained"
    config = {"method": "rl", "optimizer": {"lr": 0.1}}
    with open_run(folder, "a") as run:
        manifest = make_manifest("train", None, agent={"engine": {"model": "m"}}, config=config)
        run.write_json("receipt.json", manifest.to_dict())
    rows = [{"step": n, "time": 1.0, "actor/entropy": 0.5 if n else float("nan"), "mine": n} for n in range(2_500)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "[]\nhalf")
    score = {"step": 1, "split": "heldout", "score": 0.5, "low": 0.4, "high": 0.6, "greedy": True, "episodes": 4}
    (folder / "evaluations.jsonl").write_text(json.dumps(score) + "\n" + '{"step": "x"}\n')
    (folder / "config.yaml").write_text("a: 1\nguards:\n  max_kl: 1.0\n  min_entropy: 0.6\nz: 2\n")
    spans = [{"step": 1, "loop": "serving", "start": 10.0, "end": 14.0}, {"step": 1, "loop": 5, "start": 12, "end": 20}]
    (folder / "timeline.jsonl").write_text("".join(json.dumps(span) + "\n" for span in [*spans, {"step": 2}]))
    (folder / "checkpoints/000001").mkdir(parents=True)
    (folder / "checkpoints/best").write_text("000001")
    async with opened(tmp_path) as client:
        source = (await client.sources())["trained"]
        assert (source["training"]["steps"], source["training"]["score"]["score"], source["state"]) == (
            2499,
            0.5,
            "complete",
        )
        shown = await client.get(f"training/{source['id']}", "Training")
        assert (len(shown["steps"]), shown["steps"][-1], shown["metrics"]["mine"][-1]) == (2000, 2499, 2499)
        assert shown["checkpoints"] == [{"name": "000001", "step": 1, "best": True, "last": False}]
        assert [(span["loop"], span["start"], span["end"]) for span in shown["timeline"]] == [
            ("serving", 0, 4),
            ("5", 2, 10),
        ]
        guards = {guard["name"]: guard["fired"] for guard in shown["guards"]}
        assert guards == {"max_kl": [], "min_entropy": list(range(1, 2_500))}
        assert [chart["main"] for chart in shown["charts"]] == [True, False]
        assert "1 damaged lines of metrics.jsonl" in " ".join(shown["notes"])
        assert (await client.raw(f"api/training/{source['id']}?format=csv"))[1].count(b"\n") == 2001


async def test_compare_and_board(tmp_path: Path) -> None:
    for name, score in (("bad", 0.0), ("good", 1.0)):
        with open_run(tmp_path / name, "abcdefghijklmnop") as run:
            for id in "abcdefghijklmnop":
                run.record(episode(id, {"x": score, "y": 1.0}))
    make_run(tmp_path, name="small")
    async with opened(tmp_path) as client:
        ids = {name: source["id"] for name, source in (await client.sources()).items()}
        for name in ("bad", "good"):
            await client.indexed(ids[name], 16)
        shown = await client.get(f"compare?a={ids['bad']}&b={ids['good']}", "Compare")
        assert (shown["scores"]["strict"]["verdict"], shown["refused"]) == ("better", "")
        assert shown["checks"] == [{"name": "x", "a": 1.0, "b": 0.0}, {"name": "y", "a": 0.0, "b": 0.0}]
        assert shown["by_task"][0]["episodes"] == ["a.0", "a.0"]
        refused = await client.get(f"compare?a={ids['bad']}&b={ids['small']}", "Compare")
        assert "at least 6" in refused["refused"]
        assert "there is no such run" in await client.fails(f"compare?a={ids['bad']}&b=none", 404)
        (board,) = [one for one in (await client.sources()).values() if one["kind"] == "board"]
        shown = await client.get(f"boards/{board['id']}?by=official", "Board")
        assert [(one["rank"], one["folder"], one["run"]) for one in shown["entries"]] == [
            (1, "good", ids["good"]), (2, "bad", ids["bad"])
        ]  # fmt: skip
        assert "cannot rank" in await client.fails(f"boards/{board['id']}?by=luck", 400)


async def test_an_episode_of_a_run_and_of_a_pool_are_linked(tmp_path: Path) -> None:
    with Pool(tmp_path / "pool.db") as pool:
        sessions = [pool.open_episode(task_id="a", task_hash="h" * 8, sample=0, seed=1, agent="a") for _ in range(2)]
        for session in sessions:
            pool.close_episode(session, EpisodeEnd(outcome="solved", reward=1.0))
    with open_run(tmp_path / "first", ["a", "b"]) as run:
        run.record(replace(episode("a", {"x": 1.0}), session=sessions[1]))
        run.record(replace(episode("b", {"x": 1.0}), session="elsewhere"))
    async with opened(tmp_path) as client:
        sources = await client.sources()
        run_id, pool_id = sources["first"]["id"], sources["pool.db"]["id"]
        found = await client.get(f"runs/{run_id}/episodes/a.0", "Episode")
        assert found["pool"] == {"source": pool_id, "seq": 2}
        assert (await client.get(f"runs/{run_id}/episodes/b.0", "Episode"))["pool"] is None
        same = await client.get(f"pools/{pool_id}/episodes/2", "PoolEpisode")
        assert same["run"] == {"source": run_id, "name": "a.0"}
        other = await client.get(f"pools/{pool_id}/episodes/1", "PoolEpisode")
        assert other["run"] is None, "of the same task and sample, but another session"


async def test_answers_about_an_experiment(tmp_path: Path) -> None:
    config = {"bench": "personal", "rollout": {"groups": 2}}
    for name in ("good", "new", "damaged"):
        with RunFolder.open(tmp_path / name, make_manifest("bench", config=config)):
            pass
    score = {"value": 0.5, "low": 0.4, "high": 0.6}
    at = {"score": score, "right": score, "content": score, "rules": {"short": 0.5}}
    cell = {
        "method": "opd", "seed": 0, "rules": ["short"], "before": at, "after": at, "change": score,
        "stable_after": None, "first_replies": [0.0, 1.0, 1.0, 1.0], "ended": ATTACK,
    }  # fmt: skip
    (tmp_path / "good/results.json").write_text(json.dumps({"hints": None, "cells": [cell]}))
    (tmp_path / "damaged/results.json").write_text(json.dumps({"cells": [cell | {"first_replies": "no"}]}))
    async with opened(tmp_path) as client:
        sources = await client.sources()
        found = await client.get(f"experiments/{sources['good']['id']}", "Experiment")
        assert found["charts"][0]["lines"][0]["y"] == [0.5, 1.0]
        assert found["tables"][2]["rows"] == [["opd, seed 0", "0.00 1.00 1.00 1.00", STRIPPED]]
        assert (await client.get(f"experiments/{sources['new']['id']}", "Experiment"))["charts"] == []
        assert "results.json is damaged" in await client.fails(f"experiments/{sources['damaged']['id']}", 404)


async def test_answers_about_an_audit_and_an_attack(tmp_path: Path) -> None:
    for kind in ("audit", "attack"):
        with open_run(tmp_path / kind, "a") as run:
            run.write_json("receipt.json", make_manifest(kind).to_dict())
    row = {"task": "a", "floor": 1.0, "solution": "pass", "flaws": {"free": "touch 1"}}
    earned = {"mean": 1.0, "max": 1.0, "above_0": 1, "above_half": 1, "crashed": 0}
    audit = {"complete": True, "kept": 0, "tasks": [row], "flaws": {"free": 1}, "policies": {"touch": earned}}
    (tmp_path / "audit/audit.json").write_text(json.dumps(audit))
    rate = {
        "exploit": "e",
        "task_class": "subprocess",
        "harness": "stock",
        "tasks": 2,
        "earned": 1,
        "official": 1,
        "full": 0,
    }
    rate |= {"gain": 0.5, "official_gain": 0.5, "allowed": False, "rate": 0.5, "earned_on": ["a"]}
    (tmp_path / "attack/attack.json").write_text(json.dumps({"rates": [rate], "exploits": {"e": "tries"}}))
    async with opened(tmp_path) as client:
        sources = await client.sources()
        shown = await client.get(f"audits/{sources['audit']['id']}", "Audit")
        assert [flaw["name"] for flaw in shown["flaws"] if flaw["tasks"]] == ["free"]
        tasks = await client.get(f"audits/{sources['audit']['id']}/tasks?flaw=free", "Page<AuditTask>")
        assert tasks["items"][0]["broken"]
        shown = await client.get(f"attacks/{sources['attack']['id']}", "Attack")
        assert (shown["rates"][0]["grader"], shown["state"]) == ("original grader", "incomplete")
        (tmp_path / "audit/audit.json").write_text(json.dumps(audit | {"tasks": [{"task": 1}]}))
        assert "is damaged" in await client.fails(f"audits/{sources['audit']['id']}/tasks", 404)


async def test_removed_runs_disappear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawgym.viewer.catalog._FIND_SECONDS", 0.5)
    run = make_run(tmp_path)
    async with opened(tmp_path) as client:
        id = (await client.sources())["first"]["id"]
        await client.indexed(id, 3)
        shutil.rmtree(run)

        async def gone() -> bool:
            return not await client.sources()

        assert await client.until(gone)
        assert "there is no such run" in await client.fails(f"runs/{id}", 404)


async def test_search_for_sources_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path
    for _ in range(12):
        deep = deep / "down"
    make_run(deep)
    make_run(tmp_path / "near")
    async with opened(tmp_path) as client:
        assert set(await client.sources()) == {"first"}
        assert "too deep" in (await client.get("sources", "Sources"))["problems"][0]
    monkeypatch.setattr("clawgym.viewer.sources._ENTRIES", 1)
    async with opened(tmp_path) as client:
        assert "too many files" in (await client.get("sources", "Sources"))["problems"][0]
