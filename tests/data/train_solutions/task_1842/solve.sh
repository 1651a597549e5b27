#!/usr/bin/env bash
# The script that merges the settings, the validator, and the e-mail made from what the script wrote.
set -euo pipefail
mkdir -p scripts
cat > scripts/apply_night_mode.py <<'SCRIPT'
#!/usr/bin/env python3
"""Merge the desired night settings into the mock state; log one line per desired key. Changes no real setting."""

import json
from pathlib import Path

DESIRED = Path("input/desired_night_settings.json")
MOCK = Path("input/mock_os_state.json")
OUTPUT = Path("output")


def shown(value):
    return value if isinstance(value, str) else json.dumps(value)


def log_line(key, mock, new):
    if key not in mock:
        return f"added key {key}: {shown(new)}"
    if mock[key] == new:
        return f"unchanged key {key}: {shown(new)}"
    return f"changed key {key}: {shown(mock[key])} -> {shown(new)}"


def main():
    desired = json.loads(DESIRED.read_text(encoding="utf-8"))
    mock = json.loads(MOCK.read_text(encoding="utf-8"))
    OUTPUT.mkdir(exist_ok=True)
    applied = {**mock, **desired}
    (OUTPUT / "applied_os_state.json").write_text(json.dumps(applied, indent=2) + "\n", encoding="utf-8")
    lines = [log_line(key, mock, value) for key, value in desired.items()]
    (OUTPUT / "apply.log").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
SCRIPT
python3 scripts/apply_night_mode.py
python3 tests/validate.py

python3 - <<'PY'
import json
from pathlib import Path

verbs = [line.split()[0] for line in Path("output/apply.log").read_text(encoding="utf-8").splitlines()]
applied = json.loads(Path("output/applied_os_state.json").read_text(encoding="utf-8"))
bullets = "\n".join(f"- {key}: {v if isinstance(v, str) else json.dumps(v)}" for key, v in applied.items())
email = f"""Subject: Night Observation Mode readiness check

Hi Kai,

this is a mock of the system setting changes for our star-gazing nights; nothing on the laptop itself was touched.

Changed: {verbs.count("changed")}, added: {verbs.count("added")}, unchanged: {verbs.count("unchanged")}

Final values:
{bullets}

Files: output/applied_os_state.json and output/apply.log
"""
Path("output/email_to_kai.txt").write_text(email, encoding="utf-8")
PY
