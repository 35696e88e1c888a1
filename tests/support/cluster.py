"""A preparation as a process: a small corpus in many splits, to a directory or a bucket; for runs that are killed."""

import os
import random
import subprocess
import sys
from pathlib import Path

SPLIT_BYTES = 1 << 14
RECIPE = {
    "name": "d", "unicode": {}, "tokenize": {"tokenizer": "train:500"}, "dedup": {"exact": True, "lines": True},
    "slice": {"bytes": 1 << 14, "shuffle": True},
}  # fmt: skip


def write_corpus(folder: Path, documents: int = 60) -> None:
    """Texts of 4 kB, of which some are copies and some share lines."""
    folder.mkdir(parents=True)
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(500)]
    texts = []
    for number in range(documents):
        lines = [" ".join(rng.choices(words, k=12)) for _ in range(60)]
        if number % 7 == 3:
            lines = texts[-1].splitlines()[: 60 if number % 2 else 20] + lines[: 0 if number % 2 else 40]
        texts.append("\n".join(lines))
        (folder / f"{number:04d}.txt").write_text(texts[-1])


def start(source: str, out: str, workers: int, environment: dict[str, str], **options: str) -> subprocess.Popen[str]:
    """Prepare in a process of its own, which prints the dataset's id; its errors and messages follow."""
    arguments = [source, out, str(workers), *(f"{name}={value}" for name, value in options.items())]
    path = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    return subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip


def main() -> None:
    from forebay import prepare_dataset
    from forebay.errors import ForebayError
    from forebay.prepare import inputs, load_recipe
    from forebay.prepare.engines import share

    inputs.GROUP_BYTES = SPLIT_BYTES
    share.BEAT_S, share.STALE_S = 1.0, 6.0
    source, out, workers, *options = sys.argv[1:]
    try:
        result = prepare_dataset(
            [source], out, recipe=load_recipe(settings=RECIPE), workers=int(workers), on_message=print,
            **dict(option.split("=") for option in options),
        )  # fmt: skip
    except ForebayError as error:
        sys.exit(f"forebay: {error}")
    print(f"id {result.id}")


if __name__ == "__main__":
    main()
