#!/usr/bin/env bash
# Baseline run, a rewrite of the scraper with html.parser, the run after it, and a review.
set -uo pipefail
mkdir -p output
# The command asks for "python"; not every system has it under this name.
PYTHON=$(command -v python || command -v python3)
"$PYTHON" scripts/extract_episodes.py input/pages output/episodes.json > output/run_before.txt 2>&1

cat > scripts/extract_episodes.py <<'SCRIPT'
#!/usr/bin/env python3
"""Extract episode metadata from saved recap pages into one JSON file."""

import json
import os
import re
import sys
from html.parser import HTMLParser

QUOTES = '"\u201c\u201d'


class RecapParser(HTMLParser):
    """Collects the text of each block, with the classes and ids it lies in, and every <time datetime>."""

    BLOCKS = {"h1", "h2", "h3", "p", "li", "div", "section", "time"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.blocks = []  # [tag, marks of the element, text]
        self.open = []
        self.datetimes = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag in self.BLOCKS:
            marks = f"{attrs.get('class') or ''} {attrs.get('id') or ''}".split()
            block = [tag, marks, ""]
            self.blocks.append(block)
            self.open.append(block)
        if tag == "time" and attrs.get("datetime"):
            self.datetimes.append(attrs["datetime"])

    def handle_endtag(self, tag):
        while tag in self.BLOCKS and self.open:
            if self.open.pop()[0] == tag:
                break

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data


def clean(text):
    return " ".join(text.split())


def parse_html(html):
    parser = RecapParser()
    parser.feed(html)
    parser.close()
    blocks = [(tag, marks, clean(text)) for tag, marks, text in parser.blocks]

    number, title = None, ""
    for tag, _, text in blocks:
        found = re.match(r"Episode\s+(\d+)\s*(.*)", text) if tag == "h1" else None
        if found:
            number, title = int(found[1]), found[2].strip(" :-\u2013\u2014")
            break

    date, quote = None, None
    for _, marks, text in blocks:
        label, _, rest = text.partition(":")
        if label.lower() == "air date":
            date = date or rest.strip()
        elif label.lower() == "standout quote":
            quote = quote or rest.strip()
        elif "quote" in marks:
            quote = quote or text
    if parser.datetimes:
        date = date or parser.datetimes[0][:10]
    if date and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        date = None

    eliminated, inside = [], False
    for tag, _, text in blocks:
        if tag in ("h1", "h2", "h3"):
            inside = text.lower().startswith("elimination")
        elif inside and tag == "li" and text:
            eliminated.append(text)
    return {
        "episode_number": number,
        "episode_title": title,
        "air_date": date,
        "contestants_eliminated": [] if [name.lower() for name in eliminated] == ["none"] else eliminated,
        "standout_quote": quote.strip(QUOTES) if quote else None,
    }


def main():
    if len(sys.argv) != 3:
        print("Usage: extract_episodes.py <input_dir> <output_json>")
        sys.exit(1)
    input_dir, output_json = sys.argv[1:]
    episodes = []
    for name in sorted(os.listdir(input_dir)):
        if name.startswith(".") or not name.endswith(".html"):
            continue
        path = os.path.join(input_dir, name)
        print("Parsing", path)
        with open(path, encoding="utf-8") as handle:
            data = parse_html(handle.read())
        if data["episode_number"] is None:
            print(f"Warning: {path} has no 'Episode <number>' heading")
        episodes.append({**data, "source_file": name})
    last = float("inf")
    episodes.sort(key=lambda e: (last if e["episode_number"] is None else e["episode_number"], e["source_file"]))
    with open(output_json, "w", encoding="utf-8") as out:
        json.dump({"episodes": episodes}, out, indent=2, ensure_ascii=False)
        out.write("\n")
    print("Wrote", output_json)


if __name__ == "__main__":
    main()
SCRIPT

"$PYTHON" scripts/extract_episodes.py input/pages output/episodes.json > output/run_after.txt 2>&1

# The review quotes the error that the baseline really ended with.
error=$(grep -E '^[A-Za-z]+Error' output/run_before.txt | tail -n 1)
cat > output/REVIEW.md <<REVIEW
# Review of scripts/extract_episodes.py

## Root cause
The baseline run (output/run_before.txt) ends with \`${error}\`.
The title regex only matches a bare \`<h1>\`; one page has \`<h1 class="post-title">\`, so the search
returns nothing and \`.group\` is called on it.

## Decisions
- The regex patterns over raw HTML are gone; pages are read with \`html.parser\` from the standard library.
- The command line is the same. Only visible .html files are read, in sorted order.
- A missing section gives null or an empty list, and a page without an episode heading a warning.

## Fields
- Number and title: the \`h1\` text "Episode X", with the dash or colon after it removed.
- Air date: the "Air date:" label on one page, \`<time datetime>\` on the other.
- Standout quote: the "Standout quote:" label, or the element with class \`quote\`; the marks are stripped.
- Eliminations: list items below the "Eliminations" heading, whatever the section is called; a single "None" is empty.
REVIEW
