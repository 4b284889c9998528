"""The Python blocks of a page of the documentation.

A block whose fence has a title that begins with "Set-up" is what the blocks below it need: they run after it.
"""

import re
from types import SimpleNamespace

FENCE = re.compile(r'^```python(?P<set_up> title="Set-up[^"]*")?\n(?P<code>.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks_of(page):
    return list(FENCE.finditer(page.read_text()))


def run_blocks(page, namespace=None):
    """Run a page's blocks in order, in one namespace."""
    namespace = namespace or {"__name__": "__main__"}
    blocks = blocks_of(page)
    for block in blocks:
        run(page, block, namespace)
    return SimpleNamespace(count=len(blocks), names=namespace)


def blocks_alone(page, number):
    """A block of a page behind the set-ups above it."""
    *above, block = blocks_of(page)[: number + 1]
    return [*(set_up for set_up in above if set_up["set_up"]), block]


def run_alone(page, number):
    """Run one block of a page after the set-ups above it, and after nothing else."""
    namespace = {"__name__": "__main__"}
    for block in blocks_alone(page, number):
        run(page, block, namespace)


def run(page, block, namespace):
    """Run a block; a traceback tells the line of the page."""
    lines_before = page.read_text().count("\n", 0, block.start("code"))
    exec(compile("\n" * lines_before + block["code"], page, "exec"), namespace)
