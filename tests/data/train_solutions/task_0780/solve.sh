#!/usr/bin/env bash
# A program that builds the ODT in memory with zipfile and ElementTree, then reads its artefacts back out of it.
set -euo pipefail
mkdir -p output
cat > output/build_report.py <<'SCRIPT'
#!/usr/bin/env python3
"""Build the operations report as an ODT in memory; write its text and its structure under output/."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

MIME = "application/vnd.oasis.opendocument.text"
NS = {
    "office": "urn:oasis:names:tc:opendocument:xmlns:office:1.0",
    "style": "urn:oasis:names:tc:opendocument:xmlns:style:1.0",
    "text": "urn:oasis:names:tc:opendocument:xmlns:text:1.0",
    "table": "urn:oasis:names:tc:opendocument:xmlns:table:1.0",
    "fo": "urn:oasis:names:tc:opendocument:xmlns:xsl-fo-compatible:1.0",
    "meta": "urn:oasis:names:tc:opendocument:xmlns:meta:1.0",
    "manifest": "urn:oasis:names:tc:opendocument:xmlns:manifest:1.0",
    "dc": "http://purl.org/dc/elements/1.1/",
}
MONOSPACE = {"Source_Text"}
for prefix, uri in NS.items():
    ET.register_namespace(prefix, uri)


def q(name):
    prefix, local = name.split(":")
    return f"{{{NS[prefix]}}}{local}"


def add(parent, tag, text=None, **attrs):
    named = {q(key.replace("__", ":").replace("_", "-")): str(value) for key, value in attrs.items()}
    element = ET.SubElement(parent, q(tag), named)
    element.text = text
    return element


def meta_part(spec):
    root = ET.Element(q("office:document-meta"), {q("office:version"): "1.2"})
    meta = add(root, "office:meta")
    for key in ("title", "subject", "description"):
        add(meta, f"dc:{key}", spec["meta"][key])
    return root


def styles_part():
    root = ET.Element(q("office:document-styles"), {q("office:version"): "1.2"})
    styles = add(root, "office:styles")
    add(add(styles, "style:default-style", style__family="paragraph"), "style:text-properties")
    for name in ("Standard", "Heading_1", "Heading_2", "Heading_3", "Source_Text"):
        style = add(styles, "style:style", style__name=name, style__family="paragraph")
        properties = add(style, "style:text-properties")
        if name in MONOSPACE:
            properties.set(q("fo:font-family"), "Liberation Mono")
    return root


def number_headings(styles):
    outline = add(styles.find(q("office:styles")), "text:outline-style", style__name="Outline")
    for level in (1, 2, 3):
        add(
            outline,
            "text:outline-level-style",
            text__level=level,
            text__display_levels=level,
            style__num_format="1",
        )


def set_font(styles, family, size):
    for style in styles.iter():
        if style.tag in (q("style:style"), q("style:default-style")) and style.get(q("style:name")) not in MONOSPACE:
            properties = style.find(q("style:text-properties"))
            properties.set(q("fo:font-family"), family)
            properties.set(q("fo:font-size"), f"{size}pt")


def heading(body, text, level):
    add(body, "text:h", text, text__outline_level=level, text__style_name=f"Heading_{level}")


def table(body, name, rows):
    element = add(body, "table:table", table__name=name)
    add(element, "table:table-column", table__number_columns_repeated=len(rows[0]))
    for row in rows:
        line = add(element, "table:table-row")
        for cell in row:
            add(add(line, "table:table-cell", office__value_type="string"), "text:p", cell, text__style_name="Standard")


def content_part(spec, kpi):
    root = ET.Element(q("office:document-content"), {q("office:version"): "1.2"})
    body = add(add(root, "office:body"), "office:text")
    heading(body, spec["meta"]["title"], 1)
    placed = False
    for entry in spec["sections"]:
        if "heading" in entry:
            heading(body, entry["heading"], entry["level"])
            continue
        add(body, "text:p", entry["text"], text__style_name="Standard")
        if not placed and "KPI table below" in entry["text"]:
            table(body, "KPI", kpi)
            placed = True
    if not placed:
        table(body, "KPI", kpi)
    return root


def replace(content, replacements):
    plain, regex = replacements["plain"], replacements["regex"]
    flags = 0
    for letter in regex.get("flags", ""):
        flags |= {"i": re.I, "m": re.M, "s": re.S}[letter]
    for element in content.iter():
        if element.text:
            text = element.text.replace(plain["find"], plain["sub"])
            element.text = re.sub(regex["pattern"], regex["sub"], text, flags=flags)


def packed(parts):
    manifest = ET.Element(q("manifest:manifest"), {q("manifest:version"): "1.2"})
    for path, kind in [("/", MIME), *((name, "text/xml") for name in parts)]:
        add(manifest, "manifest:file-entry", manifest__full_path=path, manifest__media_type=kind)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", MIME, zipfile.ZIP_STORED)
        for name, root in {**parts, "META-INF/manifest.xml": manifest}.items():
            archive.writestr(name, ET.tostring(root, encoding="utf-8", xml_declaration=True))
    return buffer.getvalue()


def read_back(odt):
    with zipfile.ZipFile(io.BytesIO(odt)) as archive:
        meta, styles, content = (ET.fromstring(archive.read(f"{n}.xml")) for n in ("meta", "styles", "content"))
    body = content.find(f".//{q('office:text')}")
    lines = [e.text or "" for e in body if e.tag in (q("text:h"), q("text:p"))]
    default = styles.find(f".//{q('style:default-style')}/{q('style:text-properties')}")
    structure = {
        "headings": [{"level": int(e.get(q("text:outline-level"))), "text": e.text} for e in body.iter(q("text:h"))],
        "tables": [
            {
                "name": e.get(q("table:name")),
                "rows": len(e.findall(q("table:table-row"))),
                "cols": len(e.find(q("table:table-row"))),
            }
            for e in body.iter(q("table:table"))
        ],
        "meta": {key: meta.find(f".//{q('dc:' + key)}").text for key in ("title", "subject", "description")},
        "font": {
            "family": default.get(q("fo:font-family")),
            "size": int(default.get(q("fo:font-size")).removesuffix("pt")),
        },
        "outlineNumbering": "numbered" if styles.find(f".//{q('text:outline-style')}") is not None else "none",
    }
    return "\n".join(lines) + "\n", structure


def main():
    spec = json.loads(Path("input/report_spec.json").read_text(encoding="utf-8"))
    with open("input/kpi.csv", encoding="utf-8", newline="") as handle:
        kpi = list(csv.reader(handle))
    styles, content = styles_part(), content_part(spec, kpi)
    if spec["outline"] == "numbered":
        number_headings(styles)
    set_font(styles, spec["font"]["family"], spec["font"]["size"])
    replace(content, spec["replacements"])
    text, structure = read_back(packed({"meta.xml": meta_part(spec), "styles.xml": styles, "content.xml": content}))
    Path("output/report_text.txt").write_text(text, encoding="utf-8")
    shown = json.dumps(structure, indent=2, ensure_ascii=False)
    Path("output/structure.json").write_text(shown + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
SCRIPT
python3 output/build_report.py
