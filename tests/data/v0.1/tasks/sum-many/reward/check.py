import json, sys
from pathlib import Path
root = Path(sys.argv[1])
def read(name):
    try:
        return (root / name).read_text()
    except OSError:
        return ""
numbers = [int(word) for word in read("numbers.txt").split()]
print(json.dumps({
    "numbers_are_there": float(bool(read("numbers.txt"))),
    "total_is_right": float(read("total.txt").strip() == str(sum(numbers))),
}))
