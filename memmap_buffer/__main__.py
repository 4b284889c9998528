"""`python -m memmap_buffer`: the command `memmap-buffer`, where its script is not on the path."""

import sys

from memmap_buffer.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
