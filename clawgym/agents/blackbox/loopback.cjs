// Preloaded (node --require) into an unmodified program where a box has no loopback: internet sockets are forbidden
// there, so TCP to and on 127.0.0.1 becomes unix sockets. Without it socket() fails, and nothing else changes.
//
//   connect to 127.0.0.1:PORT  ->  /dev/listen-PORT, where the host listens, else /tmp/port-PORT
//   listen on 127.0.0.1:PORT   ->  /tmp/port-PORT, where the host, and programs of the box, connect to
//
// Both names are the sandbox's: Sandbox.listen and Sandbox.connect. Anything else is left to fail as it would.
"use strict";

const crypto = require("node:crypto");
const fs = require("node:fs");
const net = require("node:net");

const LOOPBACK = new Set(["127.0.0.1", "localhost", "::1", "::ffff:127.0.0.1"]);
// To listen on ::1 too would be to take the same name twice: here is no IPv6, as on many machines.
const OWN = new Set(["127.0.0.1", "localhost"]);
const ours = (port) => `/tmp/port-${port}`;
const theirs = (port) => `/dev/listen-${port}`;

// Arguments as Node itself reads them: [options, callback]; what it has read already is an array.
const read = (args) => (Array.isArray(args[0]) ? args[0] : net._normalizeArgs(args));

// The port that is meant, or -1 if it is none of the loopback's.
function portOf(options, host, hosts) {
  const port = Number(options.port ?? -1);
  return options.path == null && Number.isInteger(port) && hosts.has(host) ? port : -1;
}

function anyPort() {
  for (;;) {
    const port = crypto.randomInt(49152, 65536);
    if (!fs.existsSync(ours(port))) return port;
  }
}

// The same options for a path: nothing that speaks of addresses.
function at(path, { port, host, family, lookup, localAddress, localPort, ...rest }) {
  return { ...rest, path };
}

const connect = net.Socket.prototype.connect;
net.Socket.prototype.connect = function (...args) {
  const [options, callback] = read(args);
  const port = portOf(options, options.host ?? "localhost", LOOPBACK);
  const path = [theirs(port), ours(port)].find((name) => port > 0 && fs.existsSync(name));
  if (!path) return connect.apply(this, args);
  dress(this, port);
  return connect.call(this, at(path, options), callback ?? undefined);
};

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (...args) {
  const [options, callback] = read(args);
  const asked = portOf(options, options.host, OWN);
  if (asked < 0) return listen.apply(this, args);
  const port = asked || anyPort();
  const path = ours(port);
  const start = () => listen.call(this, at(path, options), callback ?? undefined);
  this.address = () => (this.listening ? { address: "127.0.0.1", family: "IPv4", port } : null);
  this.prependListener("connection", (socket) => dress(socket, port));
  if (!fs.existsSync(path)) return start();
  // A port is free once its program has ended; a socket's name stays. Whoever answers there keeps it.
  const look = net.connect({ path });
  look.once("connect", () => (look.destroy(), start()));
  look.once("error", (error) => {
    if (error.code === "ECONNREFUSED") fs.rmSync(path, { force: true });
    start();
  });
  return this;
};

// Who looks at the addresses of a connection, to see that it is local, finds that it is.
function dress(socket, port) {
  const here = { remoteAddress: "127.0.0.1", remoteFamily: "IPv4", remotePort: port };
  const there = { localAddress: "127.0.0.1", localFamily: "IPv4", localPort: port };
  for (const [name, value] of Object.entries({ ...here, ...there })) {
    Object.defineProperty(socket, name, { value, configurable: true });
  }
}
