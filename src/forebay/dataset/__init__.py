"""The dataset format: an immutable, content-addressed directory of SafeTensors slices.

Start at `manifest.py` (what a dataset is) and `reader.py` (`open_dataset`). Knows no network and no other format;
imports nothing above `errors`, `files` and `units`.
"""
