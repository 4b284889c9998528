"""A server of Azure Blob Storage in a process of its own: Azurite (`npm install azurite`), which adlfs talks to."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The account of every emulator, as Microsoft's documentation gives it.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
START_SECONDS = 60


@contextmanager
def azure_server(program: str) -> Iterator[str]:
    """Its URL, for the length of the block. Args: program: the path of `azurite-blob`."""
    options = ["--silent", "--blobPort", "0", "--skipApiVersionCheck", "--disableTelemetry", "--location"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with open(log, "w") as file, subprocess.Popen([program, *options, folder], stdout=file, stderr=file) as process:
            try:
                for _ in range(START_SECONDS * 20):
                    found = re.search(r"listens on (http://[0-9.:]+)", log.read_text())
                    if found or process.poll() is not None:
                        break
                    time.sleep(0.05)
                assert found, log.read_text()
                yield found[1]
            finally:
                process.kill()


def make_container(url: str, name: str) -> tuple[str, dict[str, object]]:
    """A new container; (the URL of a root in it, the storage options for that)."""
    import fsspec

    scheme = url.partition(":")[0]
    settings = {"DefaultEndpointsProtocol": scheme, "AccountName": ACCOUNT, "AccountKey": KEY}
    settings["BlobEndpoint"] = f"{url}/{ACCOUNT}"
    options: dict[str, object] = {"connection_string": ";".join(f"{key}={value}" for key, value in settings.items())}
    fsspec.filesystem("az", **options).mkdir(name)
    return f"az://{name}/root", options
