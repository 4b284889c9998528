"""A server of S3 in a process of its own: moto's, which s3fs talks to as to any other."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OPTIONS = {"key": "testing", "secret": "testing", "client_kwargs": {"region_name": "us-east-1"}}
START_SECONDS = 60


@contextmanager
def s3_server() -> Iterator[str]:
    """Its URL, for the length of the block."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with tempfile.NamedTemporaryFile("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            for _ in range(START_SECONDS * 20):
                found = re.search(r"Running on (http://[0-9.:]+)", Path(log.name).read_text())
                if found or process.poll() is not None:
                    break
                time.sleep(0.05)
            assert found, Path(log.name).read_text()
            yield found[1]
        finally:
            process.kill()


def make_bucket(url: str, name: str) -> tuple[str, dict[str, object]]:
    """A new bucket; (the URL of a root in it, the storage options for that)."""
    urllib.request.urlopen(urllib.request.Request(f"{url}/{name}", method="PUT"), timeout=10).close()
    return f"s3://{name}/root", {**OPTIONS, "endpoint_url": url}
