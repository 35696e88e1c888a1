"""Programs that tests start do not wait for the disk, as the tests themselves (conftest.py)."""

import os

os.fsync = lambda descriptor: None
