"""The demo cleans up: after Ctrl-C at a random moment, a kill, or the end of its parent."""

import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from forebay.demo import NodeProcess
from support.demos import remaining, start_demo
from support.waiting import until


def test_a_process_ends_with_its_parent_though_it_is_not_told(tmp_path):
    node = NodeProcess(tmp_path, "dht", "dht", "--nodes", "4")
    node.wait_ready()
    node.popen.stdin.close()
    assert node.popen.wait() == 0


@pytest.mark.parametrize("seed", range(2))
def test_ctrl_c_at_any_moment_leaves_nothing(tmp_path, seed):
    # What the interpreter does before our first line, also with an interrupt, is its own.
    started = "from forebay.__main__ import run; print('started', flush=True); run()"
    process = start_demo(tmp_path, program=("-c", started))
    assert process.stdout.readline() == "started\n"
    time.sleep(random.Random(seed).uniform(0.0, 9.0))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode in (0, 130), out + err
    assert "Traceback" not in err, err
    assert remaining(tmp_path) == []


INTERRUPTED = """
import os, signal, subprocess, sys
from contextlib import ExitStack
from pathlib import Path

from forebay import demo


class Popen(subprocess.Popen):
    def _execute_child(self, *args):
        super()._execute_child(*args)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGINT)


subprocess.Popen = Popen
with ExitStack() as stack:
    demo._train_on_network(stack, Path(sys.argv[1]), 1 << 20, ())
"""


def test_ctrl_c_while_a_process_is_started_ends_that_too(tmp_path):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, tmp_path], capture_output=True, text=True)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt") and len(done.stdout.split()) == 1, done.stderr
    assert not psutil.pid_exists(int(done.stdout))


def test_a_killed_demo_leaves_no_process(tmp_path):
    process = start_demo(tmp_path)
    until(lambda: any(" worker " in command for command in remaining(tmp_path)))
    process.kill()
    process.communicate()
    assert until(lambda: not any(" forebay " in command for command in remaining(tmp_path)))
