"""Write the golden text of every schedule at one small size: read the diff before committing it."""

from __future__ import annotations

from pathlib import Path

from stageloom import dumps, records

FOLDER = Path(__file__).parent.parent / "tests" / "golden"


def goldens() -> dict[str, str]:
    """File name -> text, one a schedule, at 4 ranks and 8 micro-batches (seq1f1b: 4, to stay readable)."""
    texts: dict[str, str] = {}
    for record in records():
        microbatches = 4 if record.name in ("seq1f1b", "chimera", "hanayo") else 8
        texts[f"{record.name}.loom"] = dumps(record(4, microbatches))
    return texts


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    texts = goldens()
    for stale in set(FOLDER.glob("*.loom")) - {FOLDER / name for name in texts}:
        stale.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(texts)} golden texts in {FOLDER.name}/")
