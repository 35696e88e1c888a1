"""Look at a cache's directory from outside: whether every chunk has the bytes that it should."""

from pathlib import Path

from forebay.dataset.chunks import HASH_BYTES, wrong_chunks
from forebay.fetch.chunk_file import PRESENT, MapLayout, read_info


def check_chunks(directory: Path) -> tuple[int, list[str]]:
    """(slices that are complete, what is wrong) of a cache to which no process writes."""
    complete, problems = 0, []
    for item in (directory / "chunks").glob("*"):
        info, data = read_info(item), item.read_bytes()
        if info is None or not (directory / item.name).exists():
            continue  # Its process was killed before it was complete; the cache removes it.
        layout, size = MapLayout(info.bytes, info.chunk_bytes), info.chunk_bytes or info.bytes
        marks = data[layout.marks : layout.marks + layout.num_chunks]
        leaves = data[layout.leaves : layout.generations] if layout.num_chunks > 1 else bytes.fromhex(info.sha256)
        with (directory / item.name).open("rb") as file:
            for chunk in [number for number, mark in enumerate(marks) if mark == PRESENT]:
                file.seek(chunk * size)
                leaf = leaves[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]
                if wrong_chunks(memoryview(file.read(size)), leaf, info.chunk_bytes):
                    problems.append(f"{directory / item.name}: chunk {chunk} has other bytes")
        complete += all(mark == PRESENT for mark in marks)
    return complete, problems
