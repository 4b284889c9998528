"""The Python blocks of a page of the documentation."""

import re
from types import SimpleNamespace

FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GOES_ON = re.compile(r"run after the first one of \[[^]]*\]\(([^)]+)\)")


def run_blocks(page, namespace=None, most=None):
    """Run a page's blocks in order, in one namespace; a traceback tells the line of the page."""
    text, namespace = page.read_text(), namespace or {"__name__": "__main__"}
    for other in GOES_ON.findall(text):
        run_blocks(page.parent / other, namespace, most=1)
    blocks = list(FENCE.finditer(text))[:most]
    for block in blocks:
        lines_before = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_before + block[1], page, "exec"), namespace)
    return SimpleNamespace(count=len(blocks), names=namespace)
