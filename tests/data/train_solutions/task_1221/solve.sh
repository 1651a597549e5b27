#!/usr/bin/env bash
# Rank sales, deduplicate and count subscribers, sort events.
set -euo pipefail
mkdir -p output
python3 - <<'PY'
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path

out = Path("output")

header, *rows = Path("input/sales.csv").read_text(encoding="utf-8").splitlines()
column = header.split(",").index("revenue")
ranked = sorted(rows, key=lambda row: -Decimal(row.split(",")[column]))  # sorted() is stable: ties keep file order
table = [f"RANK  {header}", f"----  {'-' * len(header)}"]
table += [f"{rank:>4}  {row}" for rank, row in enumerate(ranked, 1)]
(out / "sales_rank.txt").write_text("\n".join(table) + "\n")
(out / "sales_top3.txt").write_text("\n".join([header, *ranked[:3]]) + "\n")

emails = Path("input/subscribers.txt").read_text(encoding="utf-8").splitlines()
counts = Counter(emails)  # keeps the order of first occurrence
(out / "subscribers_dedup.txt").write_text("".join(f"{email}\n" for email in counts))
frequency = [f"{'COUNT':>5}  VALUE"] + [f"{count:>5}  {email}" for email, count in counts.items()]
(out / "subscribers_freq.txt").write_text("\n".join(frequency) + "\n")

events = json.loads(Path("input/events.json").read_text(encoding="utf-8"))
events.sort(key=lambda event: event["timestamp"])
(out / "events_sorted.json").write_text(json.dumps(events, indent=2, ensure_ascii=False) + "\n")

readme = f"""# Weekly data hand-off

- Sales are ranked by the column `revenue`, the only amount asked for; the rows are printed as they are in the file.
- Revenue is compared as a decimal number, never as text, so 99.99 ranks below 349.50.
- Ties: equal revenues keep the order of input/sales.csv (a stable sort).
- The top 3 are the first three of the same ranking, below the original header.
- Subscribers are deduplicated by exact, case-sensitive match, as asked: the list alone cannot tell whether two
  spellings are one mailbox. The first occurrence stays.
- The frequency table counts each exact line, in the same order.
- Events are sorted by `timestamp`, ascending; ISO 8601 times in UTC sort as text.
- Checked: {len(rows)} sales rows in and {len(ranked)} ranked; {len(emails)} subscriber lines in, {len(counts)} kept,
  and the counts add up to {sum(counts.values())}; {len(events)} events in and out.
"""
(out / "README.md").write_text(readme)
PY
