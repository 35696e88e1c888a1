"""Read what a worker is leased, with a pause after each batch: `forebay worker … -- python paced_reader.py PAUSE_S`.

A second argument names a file that must exist before the first batch is used up.
"""

import json
import sys
import time
from pathlib import Path

import forebay

pause_s, *gates = sys.argv[1:]
samples = 0
for batch in forebay.Loader(network=forebay.NetworkOptions(receipt_s=0.1, patience_s=30.0)):
    while not all(Path(gate).exists() for gate in gates):
        time.sleep(0.02)
    time.sleep(float(pause_s))
    samples += len(batch)
    print(json.dumps({"samples": samples}), flush=True)
