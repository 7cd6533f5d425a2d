"""A contrast in a process of its own, killed at some point and started again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import sinklens as sl

_CODE = (
    "import sys, torch; torch.set_num_threads(1); sys.path.insert(0, '.')\n"
    "from tests.test_verdicts import run; from tests import tiny\n"
    "found = run(tiny.causal(), 'L0H1,L1H2', 24, judge=True, journal=sys.argv[1] + '/j.jsonl')\n"
    "found.save(sys.argv[1])\n"
)


def start(folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True, parents=True)
    return subprocess.Popen([sys.executable, "-c", _CODE, str(folder)], cwd=Path(__file__).parents[1])


def finished(folder: Path) -> sl.Contrast:
    """The result of a run that nothing disturbs; goes on from what lies in the folder."""
    assert start(folder).wait() == 0
    return sl.Contrast.load(folder)


def killed(folder: Path, size: int) -> bool:
    """Start a run, kill it without warning once its journal has that many bytes; whether it was still running."""
    process, journal = start(folder), folder / "j.jsonl"
    while process.poll() is None and not (journal.is_file() and journal.stat().st_size >= size):
        time.sleep(0.002)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return alive


def same(one: sl.Contrast, other: sl.Contrast) -> bool:
    """Whether two results agree bit for bit."""
    return one.frame.equals(other.frame) and all(one.frames[key].equals(other.frames[key]) for key in one.frames)
