"""datatrove's own pipeline over a JSONL folder, run by the interpreter that has it: read, filter, MinHash, tokenize.

Arguments: INPUT_FOLDER WORK_FOLDER TOKENIZER_JSON WORKERS. Steps and settings are those of its published FineWeb
example (Gopher repetition and quality, MinHash of 14 x 8 hashes over 5-grams), with as many tasks as workers.
"""

from __future__ import annotations

import sys


def main(source: str, work: str, tokenizer: str, workers: int) -> None:
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.pipeline.writers import JsonlWriter

    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)

    def run(steps: list, tasks: int) -> None:
        LocalPipelineExecutor(steps, tasks=tasks, workers=workers, skip_completed=False).run()

    run(
        [
            JsonlReader(source),
            GopherRepetitionFilter(),
            GopherQualityFilter(),
            JsonlWriter(f"{work}/kept"),
        ],
        workers,
    )
    run([JsonlReader(f"{work}/kept"), MinhashDedupSignature(f"{work}/signatures", config)], workers)
    run([MinhashDedupBuckets(f"{work}/signatures", f"{work}/buckets", config=config)], config.num_buckets)
    run([MinhashDedupCluster(f"{work}/buckets", f"{work}/remove", config=config)], 1)
    run(
        [
            JsonlReader(f"{work}/kept"),
            MinhashDedupFilter(f"{work}/remove"),
            DocumentTokenizer(f"{work}/tokens", tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>"),
        ],
        workers,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
