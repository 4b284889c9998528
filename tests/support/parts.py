"""The parts of the suite: what a person waits for, and of the rest the share whose turn it is.

A test has the marker `rest` unless its node id below `tests/` begins as an entry of `QUICK` does, and as none of
`LATER`; the slow tests have it, too. Of the rest, a run of continuous integration takes the share whose turn it is.

Slow tests of the files in `LIGHT` have the marker `light`. They fork at each step, which takes the longer the more
memory a process has: 11 ms at 25 MB, 100 ms at 430 MB, where torch and many extras are imported. So they run first, in
processes that import no more than they need.
"""

import time
import zlib
from pathlib import Path

import pytest
from profiles import use

TESTS = Path(__file__).resolve().parent.parent
SHARES = 3
QUICK_MARKS = "not rest"  # as scripts/test says it
QUICK = (
    *("api/", "format/", "items/", "priority/", "views/", "writing/"),
    *(f"loading/test_{name}.py" for name in ("batch_reader", "datasets", "foreign_batches", "option_keys", "options")),
    *(f"loading/test_{name}.py" for name in ("prioritized", "read_ahead", "resume", "samplers", "way_of_a_batch")),
    *(f"test_{name}.py" for name in ("architecture", "cached", "codecs", "dtypes", "errors", "names", "schema")),
    "test_readme.py::test_every_block_of_a_page_runs[README.md]",
    "test_readme.py::test_the_first_block_of_the_readme_runs_twice",
    # One fault of each kind.
    "faults/test_copies.py::test_killed_at_any_operation_there_is_no_copy_or_all_of_it[7-snapshot]",
    "faults/test_disk_full.py::test_an_error_at_any_write_of_a_publication_leaves_what_was_there[process-ENOSPC]",
    "faults/test_identity.py",
    "faults/test_interruptions.py::test_after_an_interruption_at_any_line_a_new_object_takes_over[whole-5]",
    "faults/test_kill.py::test_acknowledged_episodes_steps_and_updates_survive_kills",
    "faults/test_power_loss.py::test_no_power_cut_breaks_a_promise[power]",
    "faults/test_power_loss.py::test_no_power_cut_breaks_a_promise[process]",
    "faults/test_threads.py",
)
LATER = (  # each takes seconds, or is done once more for another implementation
    "api/test_collector.py::test_store_goes_on_where_a_full_disk",
    "api/test_for_env.py::test_a_ring_holds_the_newest",
    "api/test_reading.py::test_whole_episodes_that_are_overwritten_again_and_again",
    "api/test_scale.py",
    "format/test_shards.py::TestRead::test_workers",
    "format/test_shards.py::TestWhole::test_workers",
    "format/test_storage.py::test_creation_killed",
    "format/test_storage.py::test_creation_that_fails",
    "format/test_storage.py::test_creation_without_enough",
    "items/test_index.py::TestWeights",
    "items/test_live_index.py::test_a_followed_index",
    "loading/test_prioritized.py::test_a_loader_draws_by_new_priorities",
    "loading/test_prioritized.py::test_a_loader_goes_on_where_its_last_batch_was_handed_out",
    "loading/test_prioritized.py::test_a_packed_folder_is_drawn_from",
    "loading/test_prioritized.py::test_draws_and_updates_of_several_folders_are_those_of_arrays",
    "loading/test_prioritized.py::test_draws_are_those_of_the_definition_after_wrap_around_and_updates[loops",
    "loading/test_prioritized.py::test_folders_of_any_size",
    "loading/test_prioritized.py::test_of_a_ring_of_steps",
    "loading/test_prioritized.py::test_several_folders_are_drawn_from_as_one_or_in_their_shares[loops",
    "loading/test_resume.py::test_for_another_number",
    "loading/test_resume.py::test_it_goes_on_in_another_process",
    "loading/test_resume.py::test_stopped_anywhere",
    "priority/test_kernels.py::test_a_batch_is_the_same",
    "priority/test_priorities.py::test_a_kill",
    "priority/test_priorities.py::test_a_learner_of_several",
    "priority/test_priorities.py::test_after_an_error_at_any_call",
    "views/test_batch_builder.py::test_what_changes_between_batches",
    "views/test_folders.py::test_threads",
    "views/test_folders.py::test_workers",
    "views/test_hindsight.py::TestAgainstTheSlowDefinition",
    "views/test_memory_pool.py::test_memory_is_not_given_out_again",
    "writing/test_compressed.py::test_a_full_disk",
    "writing/test_compressed.py::test_a_kill",
    "writing/test_orders_of_memory.py::test_where_the_entries_lie",
    "writing/test_ring.py::test_a_reader_that_looks_seldom",
    "writing/test_ring.py::test_a_writer_that_is_killed",
    "writing/test_ring.py::test_what_is_left_is_the_newest_steps",
    "writing/test_rounds.py::test_a_timestep_that_is_interrupted",
    "writing/test_slots.py::test_while_a_slot_is_overwritten",
    "writing/test_update.py::test_a_full_disk",
    "writing/test_update.py::test_a_kill",
    "writing/test_vector_env.py::test_after_a_full_disk",
    "writing/test_writer.py::test_what_lies_between",
)
LIGHT = (
    *(f"faults/test_{name}.py" for name in ("copies", "fuzz", "interruptions", "kill", "space", "whole_steps")),
    *(f"maintenance/test_{name}.py" for name in ("publisher", "repair", "schema_changes", "verification")),
    *(f"writing/test_{name}.py" for name in ("compressed", "update")),
    "priority/test_priorities.py",
)


def is_quick(name: str) -> bool:
    """Whether a test of this name, or of one that begins so, is among those that a person waits for."""
    return any(name.startswith(entry) or entry.startswith(name) for entry in QUICK) and not name.startswith(LATER)


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--turn", type=int, help=f"a number; its rest by {SHARES} says which share of the tests is run")
    parser.addoption(
        "--until", type=float, default=float("inf"), help="from this second (since 1970) on no test begins"
    )


def pytest_configure(config: pytest.Config) -> None:
    use("quick" if config.option.markexpr == QUICK_MARKS else "whole")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which no test would be left are not imported."""
    wanted = {QUICK_MARKS: is_quick, "light": LIGHT.__contains__}.get(config.option.markexpr)
    return True if wanted and collection_path.suffix == ".py" and not wanted(name_of(collection_path)) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    name = item.nodeid.replace(item.nodeid.partition("::")[0], name_of(item.path), 1)
    slow = item.get_closest_marker("slow") is not None
    if slow or not is_quick(name):
        item.add_marker("rest")
    if slow and name.startswith(LIGHT):
        item.add_marker("light")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (turn := config.option.turn) is not None:
        others = {item for item in items if (zlib.crc32(item.nodeid.encode()) - turn) % SHARES}
        config.hook.pytest_deselected(items=[*others])
        items[:] = [item for item in items if item not in others]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.option.until:
        pytest.skip("no time is left for it")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was left out, and how it is run."""
    if config.option.markexpr != QUICK_MARKS:
        return
    some = {entry.partition("::")[0].partition("/")[0] for entry in QUICK}
    folders = {name_of(path).partition("/")[0] for path in TESTS.rglob("test_*.py")} - some
    terminalreporter.write_line(
        f"Left out: {', '.join(sorted(folders))}, sweeps over faults, and what takes seconds. scripts/test --all runs "
        "everything; scripts/test tests/cli, say, all of a folder but for what is slow."
    )
