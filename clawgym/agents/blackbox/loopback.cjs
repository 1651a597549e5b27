// Preloaded (node --require) into an unmodified program in a sandbox without a loopback. Internet sockets are forbidden
// there (socket() fails), so TCP connections to 127.0.0.1 and listeners on it are replaced by unix sockets.
//
//   connect to 127.0.0.1:PORT  ->  /dev/listen-PORT if the host listens there, else /tmp/port-PORT
//   listen on 127.0.0.1:PORT   ->  /tmp/port-PORT, where the host and programs in the sandbox connect
//
// Both names are part of the sandbox protocol: Sandbox.listen and Sandbox.connect. All other addresses fail as before.
"use strict";

const crypto = require("node:crypto");
const fs = require("node:fs");
const net = require("node:net");

const LOOPBACK = new Set(["127.0.0.1", "localhost", "::1", "::ffff:127.0.0.1"]);
// Listening on ::1 as well would use the same path twice, so there is no IPv6, as on many machines.
const OWN = new Set(["127.0.0.1", "localhost"]);
const ours = (port) => `/tmp/port-${port}`;
const theirs = (port) => `/dev/listen-${port}`;

// Parses arguments as Node does: [options, callback]. Arguments that Node has parsed already are an array.
const read = (args) => (Array.isArray(args[0]) ? args[0] : net._normalizeArgs(args));

// Returns the requested loopback port, or -1 for any other address.
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

// Returns the options for a unix socket at `path`, without those for IP addresses.
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
  // The socket file stays after its program has ended: remove it unless something still answers there.
  const look = net.connect({ path });
  look.once("connect", () => (look.destroy(), start()));
  look.once("error", (error) => {
    if (error.code === "ECONNREFUSED") fs.rmSync(path, { force: true });
    start();
  });
  return this;
};

// Sets the addresses of a connection, for programs that check that it is local.
function dress(socket, port) {
  const here = { remoteAddress: "127.0.0.1", remoteFamily: "IPv4", remotePort: port };
  const there = { localAddress: "127.0.0.1", localFamily: "IPv4", localPort: port };
  for (const [name, value] of Object.entries({ ...here, ...there })) {
    Object.defineProperty(socket, name, { value, configurable: true });
  }
}
