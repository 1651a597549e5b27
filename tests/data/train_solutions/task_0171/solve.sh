#!/usr/bin/env bash
# A dry-run clean-up plan from the log index; nothing is deleted.
set -euo pipefail
mkdir -p output/memory
python3 - <<'PY'
import csv
import json
from datetime import datetime
from pathlib import Path

RETENTION_DAYS = 7

with open("input/log_index.csv", encoding="utf-8", newline="") as handle:
    rows = [row for row in csv.DictReader(handle) if row["type"] == "log" and row["filename"].lower().endswith(".log")]

protected = [row["filename"] for row in rows if "KEEP" in row["filename"]]
to_delete = sorted(
    {row["filename"] for row in rows if int(row["age_days"]) > RETENTION_DAYS and row["filename"] not in protected}
)
to_keep = sorted({row["filename"] for row in rows} - set(to_delete))

out = Path("output")
(out / "cleanup_plan.json").write_text(json.dumps({"to_delete": to_delete, "to_keep": to_keep}, indent=2) + "\n")
(out / "cleanup_dryrun.txt").write_text("".join(f"{name}\n" for name in to_delete))
counts = {
    "total_logs": len(rows),
    "eligible_for_deletion": len(to_delete),
    "kept_due_to_policy": len(protected),
}
(out / "checksums.json").write_text(json.dumps(counts, indent=2) + "\n")

actions = [line.strip() for line in Path("input/notes_instructions.txt").read_text(encoding="utf-8").splitlines()]
actions = [line for line in actions if line]
stamp = datetime.now().strftime("[%Y-%m-%d %H:%M:%S]")
summary = ", ".join(f"{key}={counts[key]}" for key in ("eligible_for_deletion", "kept_due_to_policy", "total_logs"))
with open(out / "memory/sprint-notes.md", "a", encoding="utf-8") as notes:
    notes.write(f"{stamp} Workspace status: index read, total_logs={counts['total_logs']}\n")
    notes.write(f"{stamp} Cleanup plan (dry run): {summary}\n")
    notes.write(f"{stamp} Next steps: {'; '.join(actions)}\n")
PY
