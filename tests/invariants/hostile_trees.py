"""Trees that agents leave to harm others, as the Python code that makes them, and what becomes of who does so."""

from __future__ import annotations

__all__ = ["CAUSES", "TREES"]

# Each is run where it is to make its tree: in the workspace, or where only a layer that is kept has it.
TREES = {
    "deep": "for i in range(3000): os.mkdir('d'); os.chdir('d')",
    "wide": "for i in range(3000): os.mkdir(f'd{i}'); open(f'd{i}/x', 'w')",
    "wider": "for i in range(21000): os.mkdir(f'd{i}')",
    "long path": "for i in range(15): os.mkdir('n' * 250); os.chdir('n' * 250)",
    "long names": """
for i in range(90):
    os.mkdir(f'{i:03}' + 'n' * 250)
    for j in range(200): open(f'{i:03}' + 'n' * 250 + f'/{j:03}' + 'n' * 250, 'w')
""",
    "chain": "for i in range(19000): os.symlink(f'{i + 1:05}' + 'n' * 200, f'{i:05}' + 'n' * 200)",
    "chain into reward": """
for i in range(3000): os.symlink(f'{i + 1:05}', f'{i:05}')
os.symlink('reward/answer.txt', '03000')
os.symlink('../' * 30 + 'verifier/answer.txt', 'out')
""",
    "links of many steps": "for i in range(1900): os.symlink('a/../' * 750 + 'x', f'l{i}')",
    "cycles": "for i in range(9000): os.symlink(f'c{(i + 1) % 9000}', f'c{i}'); os.symlink('.', f's{i}')",
    "attributes": """
for i in range(300):
    open(f'x{i}', 'w')
    try: os.setxattr(f'x{i}', 'user.huge', b'x' * 60000)
    except OSError: pass
""",
    "sparse": "for i in range(3): open(f's{i}', 'w').truncate(250 << 20)",
    "random": """
with open('random', 'wb') as out:
    for i in range(200): out.write(os.urandom(1 << 20))
""",
    "names of a file": "open('0', 'wb').write(bytes(1 << 20))\nfor i in range(1, 19000): os.link('0', str(i))",
    "sockets": "for i in range(500): s = socket.socket(socket.AF_UNIX); s.bind(f's{i}'); s.close()",
    "fifos": "for i in range(5000): os.mkfifo(f'f{i}')",
    "modes": """
for i in range(200):
    os.makedirs(f'm{i}/a/b'); open(f'm{i}/a/b/x', 'w').write('x')
    os.chmod(f'm{i}/a/b/x', 0); os.chmod(f'm{i}/a/b', 0o600); os.chmod(f'm{i}/a', i % 8 * 0o111); os.chmod(f'm{i}', 0)
""",
    "odd names": r"""
for i in range(1, 256):
    if i != 0x2f: os.makedirs(b'o' + bytes([i]) * 20 + b'/' + bytes([i])); os.symlink(bytes([i]), b'l' + bytes([i]))
for name in (b'\xed\xa0\x80', b'-rf', b'*', b'\n', b'\x1b[2J', b'a\\b', '\u202e'.encode(), b'./@LongLink', b'=' * 99):
    os.makedirs(b'k/' + name.replace(b'/', b''), exist_ok=True)
""",
    "times": """
for t in (-2**40, 2**40):
    open(f't{t}', 'w'); os.mkdir(f'd{t}')
    os.utime(f't{t}', (t, t)); os.utime(f'd{t}', (t, t))
""",
}  # fmt: skip
TREES["all at once"] = "\n".join(
    f"os.mkdir('tree {number}'); os.chdir('tree {number}'); here = os.getcwd()\n{code}\nos.chdir(here + '/..')"
    for number, code in enumerate(
        TREES[name] for name in ("deep", "wide", "cycles", "attributes", "sockets", "fifos", "modes", "odd names")
    )
)
TREES["without end"] = "while True:\n  try: os.mkdir('d'); os.chdir('d'); open('x' * 200, 'w')\n  except OSError: break"
CAUSES = {
    "clean": {
        "deep": "workspace-depth",
        "wider": "workspace-entries",
        "long path": "workspace-path",
        "long names": "workspace-names",
        "sparse": "workspace-size",
        "names of a file": "workspace-size",
        "all at once": "workspace-entries",
        "without end": "workspace-depth",
    },
    "fork": {
        "deep": "layer-depth",
        "long path": "layer-path",
        "long names": "layer-names",
        "names of a file": "layer-size",
        "all at once": "layer-depth",
        "without end": "layer-depth",
    },
}
"""By mode. All others are within the bounds, and since each does the task's work as well, they are solved."""
