"""A taskset of verifiers with a harness of its own, for the tests: a program in the runtime calls the model."""

import json

import verifiers.v1 as vf

from clawgym.interop.verifiers import sandbox_runtime

__all__ = ["ShellEnv", "ShellHarness", "ShellWords"]

PROGRAM = """
import json, subprocess, sys, urllib.request
base, key, model, prompt = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
while True:
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(base + "/chat/completions", body, headers)
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    messages.append({"role": "assistant", "content": said})
    if not said.startswith("$ "):
        break
    done = subprocess.run(["bash", "-c", said[2:]], capture_output=True, text=True)
    messages.append({"role": "user", "content": done.stdout + done.stderr})
open("messages.json", "w").write(json.dumps(messages))
"""


class ShellTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def made(self, trace, runtime) -> float:
        trace.info["messages"] = json.loads(await runtime.read("messages.json", max_bytes=1 << 20))
        trace.info["network"] = (await runtime.run(["bash", "-c", "cat /proc/net/route | wc -l"], {})).stdout
        return float((await runtime.read("out.txt")) == b"hi\n")


class ShellWords(vf.Taskset[ShellTask, vf.TasksetConfig]):
    def load(self):
        yield ShellTask(vf.TaskData(id="hi", prompt="Write hi to out.txt."), self.config.task)


class ShellHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        await runtime.write("agent.py", PROGRAM.encode())
        argv = ["python3", "agent.py", endpoint, secret, ctx.model, data.prompt]
        return await runtime.run_program(argv, {"FROM": "harness"})


class ShellEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class ShellEnv(vf.Env[ShellEnvConfig]):
    async def run(self, task, agents):
        async with sandbox_runtime() as runtime:
            await agents.agent.run(task, runtime=runtime)
