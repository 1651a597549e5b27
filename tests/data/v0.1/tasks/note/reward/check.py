import json, sys
from pathlib import Path
note = Path(sys.argv[1]) / "note.txt"
text = note.read_text().strip() if note.exists() else ""
print(json.dumps({"short": float(len(text) < 20), "word_is_there": float("basil" in text)}))
