#!/usr/bin/env bash
# The brief in five sections. Steps, risks, mitigations, metrics and goals are taken from the brief; the framing and the
# takeaways are written here, from facts in it.
set -euo pipefail
mkdir -p output
python3 - <<'PY'
import re
from pathlib import Path

brief = Path("input/brief.md").read_text(encoding="utf-8")
paragraphs = {}  # heading up to its colon -> the lines that follow
name = ""
for line in brief.splitlines():
    found = re.match(r"([A-Z][^:.]{3,60}):\s*(.*)", line)
    if found and not line.startswith("-"):
        name = found[1]
        paragraphs[name] = [found[2]] if found[2] else []
    elif line.strip():
        paragraphs.setdefault(name, []).append(line.strip())


def section(start: str) -> list[str]:
    return next(lines for heading, lines in paragraphs.items() if heading.startswith(start))


def bullets(lines: list[str]) -> str:
    return "\n".join(line for line in lines if line.startswith("- "))


def sentences(lines: list[str]) -> list[str]:
    return re.split(r"(?<=[.)])\s+(?=[A-Z])", " ".join(lines))


def in_paragraphs(parts: list[str], size: int = 3) -> str:
    return "\n\n".join(" ".join(parts[i : i + size]) for i in range(0, len(parts), size))


status = sentences(section("Current status"))
risks = section("Risks")
mitigations = next(line for line in risks if line.startswith("Mitigations"))
steps = "\n".join(line for line in section("Next steps") if re.match(r"\d+\. ", line))

text = f"""## 🧭 Overview

The onboarding revamp improves the first-run experience and the activation of new customers. The onboarding is the first
impression, and retention and expansion hang on it.

The Q2 OKRs have two user-facing outcomes and one engineering outcome:

{bullets(section("Why this matters"))}

The primary feature is **Guided Setup v2** (wizard, inline help and auto-detection), with a performance sprint for the
API endpoints of account creation and the quick-start checklist.

Takeaway: Guided Setup v2 and a performance sprint carry the Q2 OKRs of the onboarding revamp.

## 📌 Current Status

{in_paragraphs(status[:2])}

{in_paragraphs(status[2:])}

Takeaway: The early signal is good, and p95 latency is close to its target on desktop and less so on mobile.

## 🛡️ Risks & Mitigations

Four risks could hold back the rollout, or blur how it is measured.

{bullets(risks)}

{mitigations}

Takeaway: Each risk has a mitigation underway.

## ▶️ Next Steps

Six dated steps lead from June 12 to full rollout on **June 30**.

{steps}

Takeaway: The ramp to 100% on June 30 is contingent on Legal sign-off and error budgets.

## 📈 Metrics

These are the current values beside their targets.

{bullets(section("Metrics"))}

Takeaway: Activation and latency are moving towards their Q2 goals, and step 2 remains the largest exit point.
"""
Path("output/brief_modular.md").write_text(text, encoding="utf-8")
PY
