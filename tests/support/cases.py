"""Tests in a process of their own, for what starts threads and warns in whoever imports it."""

import os
import subprocess
import sys


def run_cases(cases, which):
    """Run the tests of a file that `-m which` selects."""
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "--show-capture=no", str(cases), "-m", which]
    paths = [str(cases.parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # where workers find the test's classes
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
