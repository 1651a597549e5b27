"""Training on another machine: the trainer is another process, with a folder of its own and a TLS address."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

import openai  # noqa: E402

from clawgym.errors import ServiceError, ServiceUnreachable  # noqa: E402
from clawgym.online.config import ServiceFolder  # noqa: E402
from clawgym.online.elsewhere import RemotePool, RemoteVersions, ServiceLink  # noqa: E402
from clawgym.online.service import Service, open_service  # noqa: E402
from clawgym.online.training import VersionTrainer, train_elsewhere  # noqa: E402
from clawgym.online.versions import Versions  # noqa: E402
from clawgym.pool import Pool  # noqa: E402

from .conftest import Client, judged  # noqa: E402

T = TypeVar("T")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", where / "key.pem", "-out", where / "cert.pem"],
        check=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return where / "cert.pem"


@asynccontextmanager
async def serving(folder: ServiceFolder, certificate: Path, **where: Any) -> AsyncIterator[Service]:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, certificate.with_name("key.pem"))
    async with open_service(folder, loops=("train",), train_elsewhere=True, tls=tls, **where) as service:
        yield service


async def talk(service: Service, folder: ServiceFolder, certificate: Path, count: int = 2) -> None:
    """Conversations with a thumb each, judged."""
    trust = ssl.create_default_context(cafile=certificate)
    async with openai.AsyncOpenAI(
        base_url=service.base_url,
        api_key=service.keys.make("user"),
        max_retries=0,
        http_client=httpx.AsyncClient(verify=trust),
    ) as client:
        for number in range(count):
            user = Client(client)
            await user.say(f"Tell me about {number} rivers.")
            await user.tell("feedback", score=(1, -1)[number % 2])
            await user.tell("end")
    await judged(folder)


def link(service: Service, folder: ServiceFolder, certificate: Path, key: str | None = None) -> ServiceLink:
    key = folder.training_key.read_text().strip() if key is None else key
    return ServiceLink(service.base_url.removesuffix("/v1"), key, certificate)


def training_client(service: Service, folder: ServiceFolder, certificate: Path) -> httpx.AsyncClient:
    """With the key for training."""
    return httpx.AsyncClient(
        base_url=service.base_url.removesuffix("/v1") + "/training/",
        headers={"Authorization": f"Bearer {folder.training_key.read_text().strip()}"},
        verify=ssl.create_default_context(cafile=certificate),
    )


async def apart(work: Callable[[], T]) -> T:
    """In a thread, as the service answers on this loop."""
    return await asyncio.to_thread(work)


async def test_a_trainer_on_another_machine(folder: ServiceFolder, certificate: Path, tmp_path: Path) -> None:
    """By the command, which is killed, and resumes; the service is restarted meanwhile."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        Path(sys.executable).with_name("clawgym"), "serve", "train", f"https://127.0.0.1:{port}", "--ca", certificate,
        "--key-file", folder.training_key, "--dir", tmp_path / "trainer", "--set",
        "training.compute.micro_tokens=512",
    ]  # fmt: skip

    async def version(number: int, trainer: asyncio.subprocess.Process) -> None:
        while service.versions.serving.number < number:
            assert trainer.returncode is None, "the trainer ended"
            await asyncio.sleep(0.05)

    async with serving(folder, certificate, port=port) as service:
        await talk(service, folder, certificate)
        trainer = await asyncio.create_subprocess_exec(*command)
        await asyncio.wait_for(version(1, trainer), 120)
        trainer.kill()
        await trainer.wait()
        made = service.versions[1]
        assert (made.parent, len(made.sessions)) == (0, 2)
        assert sorted(file.name for file in made.folder.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        trainer = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        await talk(service, folder, certificate)
        await asyncio.wait_for(version(2, trainer), 120)
    assert trainer.stderr is not None
    while b"Waiting: https://127.0.0.1" not in await asyncio.wait_for(trainer.stderr.readline(), 60):
        pass
    async with serving(folder, certificate, port=port) as service:
        assert service.versions.serving.number == 2
        await talk(service, folder, certificate)
        await asyncio.wait_for(version(3, trainer), 120)
        trainer.send_signal(signal.SIGTERM)
        await asyncio.wait_for(trainer.communicate(), 60)
        with Pool(folder.pool) as pool:
            assert pool.stats()["channels"]["live:user"]["groups"] == {"consumed": 6}
            used = [session for one in service.versions.all() for session in one.sessions]
            assert len(used) == len(set(used)) == 6, "each conversation is trained on once"
    assert not (folder.training / "state.json").exists()


async def test_calls_of_the_pool_give_what_the_pool_gives(folder: ServiceFolder, certificate: Path) -> None:
    async with serving(folder, certificate) as service:
        await talk(service, folder, certificate)
        remote = RemotePool(link(service, folder, certificate))
        about: dict[str, Any] = {"channel": "live:user", "groups": 2, "min_episodes": 1, "lease_seconds": 100.0}
        with Pool(folder.pool) as pool:
            batch = await apart(lambda: remote.fetch("a", 0, **about))
            assert batch is not None
            own = pool.fetch("a", 0, **about)
            assert own is not None
            assert batch == replace(own, lease_until=batch.lease_until)
            assert await apart(lambda: remote.fetch("a", 1, **about)) is None
            for id in [member.episode.id for group in batch.groups for member in group.episodes]:
                assert await apart(lambda id=id: remote.turns(id)) == pool.turns(id)
                assert await apart(lambda id=id: remote.about_turn_rewards(id)) == pool.about_turn_rewards(id)
            assert (await apart(remote.stats))["channels"] == pool.stats()["channels"]
            await apart(lambda: remote.ack("a", 0))
            assert pool.stats()["batches"] == {"acked": 1}
        with pytest.raises(ServiceUnreachable, match="no image 0000"):
            await apart(lambda: remote.image("0" * 64))


async def test_a_trainer_reads_no_held_out_conversations(
    folder: ServiceFolder, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate measures with them. Nor does it read what the service asks itself."""
    monkeypatch.setattr("clawgym.online.conversations.channel_of", lambda source, held_out: f"held-out:{source}")
    async with serving(folder, certificate) as service:
        await talk(service, folder, certificate)
        with Pool(folder.pool) as pool:
            held = [episode.id for episode in pool.episodes(channel="held-out:user")]
            assert pool.stats()["channels"]["held-out:user"]["groups"] == {"ready": 2}, "it could be fetched"
        fetch = {"consumer": "a", "step": 0, "min_episodes": 1}
        asked: list[tuple[str, dict[str, Any]]] = [
            *(("fetch", {**fetch, "channel": name}) for name in ("held-out:user", "internal", "train", "", ["live:"])),
            ("fetch", fetch), *((name, {"id": id}) for name in ("turns", "about_turn_rewards") for id in held),
        ]  # fmt: skip
        async with training_client(service, folder, certificate) as client:
            for method, given in asked:
                answer = await client.post(f"pool/{method}", json=given)
                assert answer.status_code == 403, (method, given)
                assert "not for training: ask for live:SOURCE" in answer.json()["error"]["message"]
        with Pool(folder.pool) as pool:
            assert pool.stats()["channels"]["held-out:user"]["groups"] == {"ready": 2}


async def test_a_lost_folder_of_the_trainer_repeats_nothing(
    folder: ServiceFolder, certificate: Path, tmp_path: Path
) -> None:
    """A new one starts with the weights that answer."""
    async with serving(folder, certificate) as service:

        async def step(name: str) -> VersionTrainer:
            at = ServiceFolder(tmp_path / name)
            found = link(service, folder, certificate)

            def work() -> VersionTrainer:
                at.create(found.config())
                trainer = VersionTrainer(at, RemotePool(found), RemoteVersions(at.versions, found))
                while asyncio.run(trainer.step()):
                    pass
                return trainer

            return await apart(work)

        for _ in range(2):
            await talk(service, folder, certificate)
            await step("first")
        assert service.versions.serving.number == 2
        await talk(service, folder, certificate)
        await step("second")
        made = service.versions.serving
        used = [session for one in service.versions.all() for session in one.sessions]
        assert (made.number, made.parent) == (3, 2)
        assert len(used) == len(set(used)) == 6


async def test_the_keys_of_clients_and_of_the_trainer_are_different(folder: ServiceFolder, certificate: Path) -> None:
    async with serving(folder, certificate) as service:
        key, user = folder.training_key.read_text().strip(), service.keys.make("user")
        assert folder.training_key.stat().st_mode & 0o777 == 0o600
        trust = ssl.create_default_context(cafile=certificate)
        base = service.base_url.removesuffix("/v1")
        async with httpx.AsyncClient(verify=trust) as client:

            async def status(method: str, path: str, secret: str | None, body: bytes = b"{}") -> int:
                headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
                return (await client.request(method, f"{base}{path}", headers=headers, content=body)).status_code

            calls = [("GET", "config"), ("POST", "pool/stats"), ("GET", "versions"), ("POST", "versions"),
                     ("GET", "versions/0/adapter_config.json")]  # fmt: skip
            for method, path in calls:
                for secret in (None, "x", user, folder.keys.name):
                    assert await status(method, f"/training/{path}", secret) == 401, (path, secret)
            assert await status("GET", "/v1/models", key) == 401
            for path in (
                "pool/erase", "pool/close", "pool/__init__", "pool/episodes", "pool/revoke", "pool/curate",
            ):  # fmt: skip
                assert await status("POST", f"/training/{path}", key) == 404, path
            assert await status("POST", "/training/pool/turns", key, b'{"more": 1}') == 400
            assert await status("POST", "/training/pool/fetch", key, b'{"consumer": "a", "step": 0, "wait": 9}') == 400
            assert await status("POST", "/training/pool/stats", key, b"[" * 100_000) in (400, 413)
            assert await status("POST", "/training/pool/turns", key, b'{"id": "nobody"}') == 404
            for path in (
                "versions/0/adapter_config.json", "versions/1/..%2f..%2ftraining.key", "versions/-1/x",
                f"versions/9{'9' * 5000}/adapter_config.json",
            ):  # fmt: skip
                assert await status("GET", f"/training/{path}", key) == 404, path
            assert (await client.get(f"{base}/training/versions/..%2flog.jsonl")).status_code in (401, 404)
    async with open_service(folder, loops=()) as service:
        async with httpx.AsyncClient() as client:
            url = service.base_url.removesuffix("/v1") + "/training/config"
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.get(url, headers=headers)).status_code == 404, "only with train_elsewhere"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}\n", b'{"parent": 0, "sessions": [], "about": {}}\n', b"x" * 100_000 + b"\n",
        b'{"parent": 0, "sessions": [], "about": {}}\n99999999999999\n', b'{"parent": 9, "sessions": [], "about": {}}\n'
        b"2\n{}2\nab", b'{"parent": 0, "sessions": [], "about": {}}\n-5\n', b'{"parent": 0, "sessions": [], "about": '
        b'{}}\n2\n{}2\na',
    ],
    ids=["nothing", "empty", "no-files", "long", "huge", "no-parent", "negative", "short"],
)  # fmt: skip
async def test_half_a_version_is_none(folder: ServiceFolder, certificate: Path, body: bytes) -> None:
    async with serving(folder, certificate) as service:
        found = link(service, folder, certificate)
        with pytest.raises(ServiceError):
            await apart(lambda: found.call("POST", "versions", body))
        assert [version.number for version in service.versions.all()] == [0]
        assert sorted(file.name for file in folder.versions.iterdir()) == ["lock", "log.jsonl"]


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


async def test_an_odd_record_leaves_the_service_working(folder: ServiceFolder, certificate: Path) -> None:
    record = b'{"parent": %s, "sessions": %s, "about": {"step": 3, "metrics": %s}}\n2\n{}2\nab'
    nested = [b"[" * 60_000, b"[" * 100_000, b'{"a":' * 10_000, deep(30_000), deep(900), deep(300)]
    odd = [*nested, *(record % (b"0", b"[]", one) for one in nested), *(record % (b"0", one, b"{}") for one in nested)]
    odd += [record % (b"0", b"[]", one) for one in (b'{"a": NaN}', b'{"a": 1e999}', b'{"a": {}}', b'{"\\ud800": 1}')]
    odd += [record % (b"0", one, b"{}") for one in (b"[1]", b'"abc"', b"null")]
    odd += [record % (one, b"[]", b"{}") for one in (b"0.0", b"false", b'"0"', b"[]", b"1" * 5000)]
    async with serving(folder, certificate) as service, training_client(service, folder, certificate) as client:
        for body in odd:
            answer = await client.post("versions", content=body)
            assert (answer.status_code, "send it again" in answer.text) == (400, True), body[:80]
        assert (await client.post("versions", content=record % (b"0", b"[]", b'{"a": 1}'))).json() == {"version": 1}
        assert Versions(folder.versions)[1].about == {"step": 3, "metrics": {"a": 1.0}}


async def test_deep_json_leaves_the_service_working(folder: ServiceFolder, certificate: Path) -> None:
    async with serving(folder, certificate) as service, training_client(service, folder, certificate) as trainer:
        owner = httpx.AsyncClient(
            base_url="http://localhost",
            headers={"Authorization": f"Bearer {folder.token.read_text().strip()}"},
            transport=httpx.AsyncHTTPTransport(uds=str(folder.socket)),
        )
        user = httpx.AsyncClient(
            base_url=service.base_url,
            headers={"Authorization": f"Bearer {service.keys.make('user')}"},
            verify=ssl.create_default_context(cafile=certificate),
        )
        doors = (
            (trainer, ("pool/stats", "pool/fetch", "pool/turns")),
            (user, ("feedback", "private", "end", "chat/completions", "messages", "responses")),
            (owner, ("sessions", "groups", "sessions/x/turns", "sessions/x/close", "weights/release")),
        )
        async with owner, user:
            for client, paths in doors:
                for path in paths:
                    for body in (b"[" * 100_000, b"[" * 10_000, deep(5000), b'{"id":%s}' % deep(300), b'{"a":' * 3000):
                        answer = await client.post(path, content=body)
                        assert answer.status_code in (400, 413), (path, body[:9], answer.text)
            assert (await user.get("models")).status_code == 200
            assert (await owner.get("stats")).status_code == 200
        await talk(service, folder, certificate)


async def test_a_trainer_is_told_what_is_wrong(folder: ServiceFolder, certificate: Path, tmp_path: Path) -> None:
    stop = asyncio.Event()
    async with serving(folder, certificate) as service:
        found = link(service, folder, certificate)
        with pytest.raises(ServiceError, match="a service is in it: give another --dir"):
            await train_elsewhere(folder, found, stop)
        with pytest.raises(ServiceError, match="belongs to the service"):
            await apart(lambda: found.config(["training.optimizer.lr=1"]))
        assert (await apart(lambda: found.config(["training.compute.threads=2"]))).training.compute.threads == 2
        wrong = link(service, folder, certificate, key="wrong")
        with pytest.raises(ServiceUnreachable, match="not the key for training"):
            await apart(wrong.config)
        stranger = ServiceLink(service.base_url.removesuffix("/v1"), "key")
        with pytest.raises(ServiceUnreachable, match="certificate"):
            await apart(stranger.config)
        mirror = await apart(lambda: RemoteVersions(tmp_path / "copy", found))
        with pytest.raises(ServiceError, match="only the service changes its versions"):
            mirror.promote(0, "by hand")
    with pytest.raises(ServiceUnreachable, match="--train-elsewhere"):
        await apart(found.config)
    with pytest.raises(ServiceError, match="sent unencrypted"):
        ServiceLink("http://192.0.2.1:8443", "key")
    with pytest.raises(ServiceError, match="give https://HOST:PORT"):
        ServiceLink("ftp://192.0.2.1", "key")
    with pytest.raises(ServiceError, match="has no certificates"):
        ServiceLink("https://192.0.2.1:8443", "key", folder.path / "service.json")
    assert json.loads((folder.path / "service.json").read_bytes())["gate"]["on"] is False
    assert os.listdir(folder.keys) == ["user"] if folder.keys.exists() else True
