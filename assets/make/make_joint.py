"""Make the data of the joint quickstart: word problems whose answers are to be seen in a picture, with three digits.

python3 assets/make/make_joint.py
"""

import json
from pathlib import Path

ASSETS = Path(__file__).parents[1]
ROWS = {"train": 600, "val": 100, "test": 100}


def main() -> None:
    """Write `train.jsonl`, `val.jsonl` and `test.jsonl`, the first problems of each split of assets/words."""
    for split, count in ROWS.items():
        rows = []
        for line in (ASSETS / "words" / f"{split}.jsonl").read_text().splitlines()[:count]:
            row = json.loads(line)
            number = int(row["answer"].rpartition("####")[2])
            rows.append(json.dumps({"question": row["question"], "ground_truth": f"{number:03}"}))
        (ASSETS / "joint" / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
