"""Run the configuration of ``docs/how-to/openclaw.md`` for an existing OpenClaw with the real OpenClaw."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

from clawgym.agents.programs.install import Installation
from clawgym.pool import sequences_of

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "openclaw.md"


async def test_page_configuration_connects_openclaw(make_gateway, openclaw: Installation, tmp_path: Path) -> None:
    there = await make_gateway("I am here, and heard you.", context_window=100_000)
    lines = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    config = lines.replace("BASE_URL", there.base_url).replace("API_KEY", there.session.secret)
    (tmp_path / ".openclaw").mkdir()
    (tmp_path / ".openclaw" / "openclaw.json").write_text(config)
    env = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PATH": os.environ["PATH"], "OPENCLAW_NO_RESPAWN": "1"}
    env["OPENCLAW_BUNDLED_PLUGINS_DIR"] = str(tmp_path)  # faster; it also works with the plugins
    argv = [
        str(openclaw.node),
        str(openclaw.entry),
        "agent",
        "--local",
        "--agent",
        "main",
        "--message",
        "Are you there?",
    ]
    agent = await asyncio.create_subprocess_exec(
        *argv,
        env=env,
        cwd=tmp_path,
        start_new_session=True,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(agent.communicate(), 120)
    finally:
        if agent.returncode is None:
            os.killpg(agent.pid, signal.SIGKILL)
            await agent.wait()
    assert b"I am here, and heard you." in said
    (turn,) = there.turns
    assert (turn.role, turn.flaw) == ("main", None)
    assert len(sequences_of([turn])) == 1
