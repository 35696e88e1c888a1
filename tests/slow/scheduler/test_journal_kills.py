"""A scheduler's journal whose process is killed at random moments: nothing is lost and nothing is used twice.

The moments are random; whichever they are, the test holds.
"""

import random
import signal
import subprocess
import sys
import time

from forebay.ledger.verify import verify_ledger
from forebay.scheduler.journal import LEDGER_NAME
from support.scheduling import finish, open_journal

CHILD = """
import sys
from pathlib import Path
from forebay.scheduler import journal as journals
from support.scheduling import finish, open_journal
journals.SNAPSHOT_EVENTS = 9
journal = open_journal(Path(sys.argv[1]), epochs=40)
print("up", flush=True)
finish(journal)
"""


def test_kill_9_at_random_moments(tmp_path):
    chance = random.Random(7)
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE) as child:
            assert child.stdout.readline() == b"up\n"
            time.sleep(chance.uniform(0.0, 0.08))
            child.send_signal(signal.SIGKILL)
    with open_journal(tmp_path, epochs=40) as journal:
        finish(journal)
    report = verify_ledger(tmp_path / LEDGER_NAME)
    assert report.ok and len(report.epochs) == 40, report.problems
