// A sandbox backend for OpenClaw: the tools of an agent work in the agent's own sandbox, through ClawGym's server.
//
// Paths are those of the sandbox on both sides and are not translated. The server decides which sandbox belongs to an
// agent. Uses only Node's standard library and OpenClaw's plugin SDK.

import fs from "node:fs/promises";
import net from "node:net";
import path from "node:path";
import { registerSandboxBackend } from "openclaw/plugin-sdk/sandbox";

const LARGEST_RESPONSE = 64 * 1024 * 1024;

// Runs next to OpenClaw in place of a command in the sandbox, and relays its output: $1 port, $2 ticket of the command.
const STAND_IN = `
exec 3<>"/dev/tcp/127.0.0.1/$1" || exit 126
printf '{"op":"run","ticket":"%s"}\\n' "$2" >&3
cat <&3
exec 3<>"/dev/tcp/127.0.0.1/$1" || exit 126
printf '{"op":"code","ticket":"%s"}\\n' "$2" >&3
IFS= read -r code <&3 || code=255
exit "$code"
`;

function connector({ port, key }) {
  return (head, data, signal) =>
    new Promise((resolve, reject) => {
      const body = data ?? Buffer.alloc(0);
      const socket = net.connect(port, "127.0.0.1");
      const parts = [];
      let room = LARGEST_RESPONSE;
      const stop = () => socket.destroy(new Error("aborted"));
      signal?.addEventListener("abort", stop, { once: true });
      socket.on("data", (part) => {
        parts.push(part);
        if ((room -= part.length) < 0) socket.destroy(new Error("the answer is too large"));
      });
      socket.on("error", reject);
      socket.on("close", () => {
        signal?.removeEventListener("abort", stop);
        const whole = Buffer.concat(parts);
        const end = whole.indexOf(10);
        if (end < 0) return reject(new Error("the sandbox is gone"));
        const answer = JSON.parse(whole.subarray(0, end).toString());
        if (answer.error) return reject(Object.assign(new Error(answer.error), { code: answer.code }));
        resolve({ ...answer, data: whole.subarray(end + 1) });
      });
      socket.write(`${JSON.stringify({ ...head, key, size: body.length })}\n`);
      socket.write(body);
    });
}

// The file tools. `cwd` is the workspace, with the same path on both sides.
function bridge(ask, workspace) {
  const at = ({ filePath, cwd }) => path.posix.resolve(cwd || workspace, filePath);
  return {
    resolvePath: (p) => ({ containerPath: at(p), relativePath: path.posix.relative(workspace, at(p)) }),
    readFile: async (p) => (await ask({ op: "read", path: at(p) }, null, p.signal)).data,
    writeFile: async (p) => {
      const data = Buffer.isBuffer(p.data) ? p.data : Buffer.from(p.data, p.encoding ?? "utf8");
      await ask({ op: "write", path: at(p) }, data, p.signal);
    },
    mkdirp: async (p) => void (await ask({ op: "mkdir", path: at(p) }, null, p.signal)),
    remove: async (p) => {
      const { recursive = false, force = true } = p;
      await ask({ op: "remove", path: at(p), recursive, force }, null, p.signal);
    },
    rename: async (p) => {
      const [from, to] = [p.from, p.to].map((filePath) => at({ filePath, cwd: p.cwd }));
      await ask({ op: "rename", path: from, to }, null, p.signal);
    },
    stat: async (p) => (await ask({ op: "stat", path: at(p) }, null, p.signal)).stat,
  };
}

function factory(connect, port) {
  const seeded = new Set();

  // Copies what OpenClaw wrote into its own copy of the workspace (AGENTS.md, ...), once per agent.
  async function seed(agent, ask, workspace) {
    if (seeded.has(agent)) return;
    seeded.add(agent);
    const names = (await fs.readdir(workspace)).filter((name) => name.endsWith(".md"));
    for (const name of names) {
      const data = await fs.readFile(path.join(workspace, name));
      await ask({ op: "seed", path: path.posix.join(workspace, name) }, data);
    }
  }

  return async ({ sessionKey, agentWorkspaceDir, cfg }) => {
    const agent = sessionKey.split(":")[1];
    const ask = (head, data, signal) => connect({ ...head, agent }, data, signal);
    await seed(agent, ask, agentWorkspaceDir);
    return {
      id: "clawgym",
      runtimeId: "clawgym", // a single entry in OpenClaw's list of containers, which it reads and writes in every turn
      runtimeLabel: "clawgym",
      workdir: "", // keeps a second path out of the prompt
      env: {},
      configLabel: "clawgym",
      async buildExecSpec({ command, env }) {
        const { PATH, HOME, ...own } = env; // OpenClaw's values for containers: the sandbox has its own
        const { ticket } = await ask({ op: "exec", command, env: own });
        return {
          argv: ["bash", "--noprofile", "--norc", "-c", STAND_IN, "tool", String(port), ticket],
          env: { PATH: process.env.PATH },
          stdinMode: "pipe-closed",
        };
      },
      runShellCommand: () => Promise.reject(new Error("ClawGym's sandboxes do not run scripts: use exec")),
      createFsBridge: () => bridge(ask, agentWorkspaceDir),
    };
  };
}

const quoted = (text) => `'${text.replaceAll("'", `'"'"'`)}'`;

// OpenClaw would check a command's folder in its own file system. The sandbox checks it instead.
function checkFolderInSandbox({ toolName, params }) {
  const { command, workdir } = params;
  if (toolName !== "exec" || typeof workdir !== "string" || !workdir.trim() || typeof command !== "string") return;
  const missing = `Warning: workdir "${workdir}" is unavailable.`;
  const enter = `cd -- ${quoted(workdir.trim())} 2>/dev/null || echo ${quoted(missing)}`;
  return { params: { ...params, workdir: "", command: `${enter}\n${command}` } };
}

export default {
  id: "clawgym",
  name: "ClawGym",
  description: "Runs the tools of each agent in its own sandbox.",
  register(api) {
    if (api.registrationMode !== "full") return;
    const connect = connector(api.pluginConfig);
    registerSandboxBackend("clawgym", factory(connect, api.pluginConfig.port));
    api.on("before_tool_call", checkFolderInSandbox);
    api.on("before_prompt_build", async (_, { agentId }) => void (await connect({ op: "begin", agent: agentId })));
  },
};
