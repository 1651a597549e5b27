"""Black box, online: a live agent changes its base_url and key, nothing else. Here over TLS, as from another machine.

python examples/black_box_online.py
"""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

from clawgym.engines import Sampling
from clawgym.engines.tiny import make_tiny_model
from clawgym.engines.transformers import TransformersEngine
from clawgym.gateway.request import SessionRequest
from clawgym.gateway.server import Gateway
from clawgym.pool import EpisodeEnd, Pool

AGENT = """
import os, openai
client = openai.OpenAI()  # OPENAI_BASE_URL, OPENAI_API_KEY
messages = []
for question in ("Hello?", "And now?"):
    messages.append({"role": "user", "content": question})
    answer = ""
    for chunk in client.chat.completions.create(model="policy", messages=messages, stream=True, max_tokens=16):
        answer += chunk.choices[0].delta.content or ""
    messages.append({"role": "assistant", "content": answer})
"""


def certificate(folder: Path) -> Path:
    """A certificate for this machine, for an hour; yours comes from your own authority."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder / "cert.pem"


async def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="clawgym-example-"))
    cert = certificate(folder)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, folder / "key.pem")
    engine = TransformersEngine(make_tiny_model(folder / "model"))
    with Pool(folder / "pool.db") as pool:
        async with Gateway(engine, pool) as gateway:
            await gateway.listen(host="127.0.0.1", tls=tls)  # host="0.0.0.0" lets other machines in
            opened = await gateway.open_session(SessionRequest(channel="online", sampling=Sampling(temperature=1.0)))
            env = {
                "OPENAI_BASE_URL": gateway.base_url(opened),
                "OPENAI_API_KEY": opened.secret,
                "SSL_CERT_FILE": str(cert),
            }
            agent = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT, env=env)
            assert await agent.wait() == 0
            await gateway.close_session(opened.id, EpisodeEnd(outcome="solved", reward=1.0))  # the person was content

        batch = pool.fetch("trainer", step=0, channel="online", min_episodes=1)
        assert batch is not None
        (member,) = batch.groups[0].episodes
        print(
            f"{member.episode.n_turns} turns over {env['OPENAI_BASE_URL'].split('/s/')[0]}: {len(member.sequences)} row"
        )
        pool.ack("trainer", step=0)
    await engine.aclose()


asyncio.run(main())
