"""A lab that shares no disk: three hosts record and publish, two ranks train from the bucket, and things die meanwhile.

    python examples/lab.py --folder demo_output

Each host plays CartPole, records into a folder of its own and publishes shard after shard; each rank has a cache of its
own. A recorder is killed and started again, the store stops for ten seconds, a rank is killed, and the ranks are
started again where they stood. At the end each epoch is checked: it had all episodes of the shards that were listed
when it began, each once; the last epoch has every episode that was ever recorded.

The hosts are simulated on this machine. As root on Linux each has a network, a name, process numbers and files that no
other one sees (`hosts.py`), else a folder of its own and nothing more; the first line says which. Three record, the
fourth trains. The environment needs `pip install 'memmap-buffer[gymnasium]'`. The store is moto's server of S3 where it
is installed (`pip install 'moto[server]'`, and then `'memmap-buffer[gymnasium,s3]'`), which a signal stops; else a
shared folder, which nothing stops.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cartpole import make_environment
from hosts import HERE, Hosts
from memmap_buffer import ConcatBuffer, ReplayBuffer
from memmap_buffer.environments import schema_of, spaces_of
from memmap_buffer.maintenance.pull import shards_at

RECORDERS, RANKS = ["host-0", "host-1", "host-2"], 2
TRAINER, BUCKET = "trainer", "bucket"
EPOCHS = 3  # at least
OUTAGE = 10.0  # seconds
PACE = 0.15  # seconds that a host takes for an episode, at least
BATCH = 8  # episodes of a rank's step
KEYS = {"key": "testing", "secret": "testing", "client_kwargs": {"region_name": "us-east-1"}}


# A host that records


def record(folder: Path, store: dict[str, Any], count: int, every: int) -> None:
    """Record until so many episodes of this host are noted; its notes are what it was promised to be kept."""
    environment, rng = make_environment(), np.random.default_rng(os.getpid())
    notes, life = folder / "recorded.txt", uuid.uuid4().hex[:8]
    notes.touch()
    with (
        ReplayBuffer(
            folder / "shards",
            1000,
            500,
            schema_of(*spaces_of(environment)),
            {"name": "U64"},
            shard="auto",
            publish_to=store["url"],
            publish_every=every,
            keep_published=1,
            storage_options=store["options"],
        ) as buffer,
        notes.open("a") as file,
    ):
        for number in range(count - len(notes.read_text().split())):
            begun, name = time.monotonic(), f"{folder.name}-{life}-{number}"
            play(environment, buffer, name, rng)
            print(name, file=file, flush=True)
            time.sleep(max(0.0, begun + PACE - time.monotonic()))


def play(environment: Any, buffer: ReplayBuffer, name: str, rng: np.random.Generator) -> None:
    """Record an episode of random actions."""
    observation, _ = environment.reset(seed=int(rng.integers(2**31)))
    with buffer.one_episode(name=name) as episode:
        ended = False
        while not ended:
            action = int(rng.integers(2))
            after, reward, terminated, truncated, _ = environment.step(action)
            episode.store(
                observation=observation, action=action, reward=reward, terminated=terminated, truncated=truncated
            )
            observation, ended = after, terminated or truncated
        episode.final(observation=observation)


# A rank that trains


def train(folder: Path, store: dict[str, Any]) -> None:
    """Fit the actions, epoch after epoch, until an epoch has as many episodes as the lab has recorded in all."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from training import make_network

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own = folder / f"rank-{dist.get_rank()}"
    own.mkdir(exist_ok=True)
    data = ConcatBuffer.from_root(store["url"], storage_options=store["options"], cache=own / "cache")
    loader = data.dataloader(BATCH, shuffle=True, seed=0, tail="uneven", fields=["observation", "action"])
    torch.manual_seed(0)
    network = DistributedDataParallel(make_network())
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    saved = folder / "checkpoint.pt"
    epoch = step = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        epoch, step = state["epoch"], state["step"]
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    while not finished(folder, epoch, dist):
        with network.join():  # the last batch of an epoch may be one that not every rank has
            for batch in loader:
                note(own / "seen.jsonl", epoch, step, batch["name"])
                mask = torch.arange(batch["action"].shape[1]) < batch["_lens"][:, None]
                loss = torch.nn.functional.cross_entropy(network(batch["observation"][mask]), batch["action"][mask])
                optimizer.zero_grad()
                loss.backward()  # waits for the other ranks, which have noted their batches, too
                optimizer.step()
                step += 1
                if dist.get_rank() == 0:
                    save(saved, network, optimizer, loader, epoch, step)
        dist.barrier()
        epoch, step = epoch + 1, 0
        if dist.get_rank() == 0:
            save(saved, network, optimizer, loader, epoch, step)
        dist.barrier()
    dist.destroy_process_group()


def finished(folder: Path, epoch: int, dist: Any) -> bool:
    """Whether the epoch before this one had all there will be, as rank 0 finds."""
    told = [False]
    if dist.get_rank() == 0 and epoch >= EPOCHS and (folder / "recorded").exists():
        seen = sum(len(names) for names in seen_in(folder).get(epoch - 1, {}).values())
        told = [seen == int((folder / "recorded").read_text())]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def note(path: Path, epoch: int, step: int, names: list[str]) -> None:
    """Write down which episodes a step had."""
    with path.open("a") as file:
        print(json.dumps([epoch, step, list(names)]), file=file, flush=True)


def save(path: Path, network: Any, optimizer: Any, loader: Any, epoch: int, step: int) -> None:
    """Where the ranks go on after a kill: all of them have taken so many steps of this epoch."""
    import torch

    state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    torch.save(state | {"epoch": epoch, "step": step}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def seen_in(folder: Path) -> dict[int, dict[tuple[int, int], list[str]]]:
    """Epoch -> (rank, step) -> the episodes that it had. A step that a kill undid counts as it was taken again."""
    found: dict[int, dict[tuple[int, int], list[str]]] = {}
    for rank in range(RANKS):
        for line in (folder / f"rank-{rank}" / "seen.jsonl").read_text().splitlines():
            epoch, step, names = json.loads(line)
            found.setdefault(epoch, {})[rank, step] = names
    return found


# The lab


@contextmanager
def bucket(folder: Path, address: str) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes] | None]]:
    """Where everybody publishes to, and the server's process if it is one."""
    if not all(is_installed(name) for name in ("moto", "flask", "s3fs")):
        print("store: a shared folder, by file://, as moto and s3fs are not installed; nothing stops it")
        yield {"url": f"file://{folder / BUCKET}", "options": {}}, None
        return
    port = free_port()
    serve = [sys.executable, "-m", "moto.server", "-H", address, "-p", str(port)]
    with running(folder / "server.log", serve) as server:
        wait_until(lambda: is_open(address, port), "the server's port")
        endpoint = f"http://{address}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/lab", method="PUT"), timeout=30).close()
        print(f"store: moto's server of S3 at {endpoint}")
        yield {"url": "s3://lab/run", "options": {**KEYS, "endpoint_url": endpoint}}, server


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # it is kept from being imported
        return False


@contextmanager
def running(log: Path, command: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program whose output goes to a file; ended at the end of the block."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def is_open(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


def wait_until(so: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
    """Raise TimeoutError where something does not come."""
    deadline = time.monotonic() + seconds
    while not so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {seconds:.0f} s; see the logs")
        time.sleep(0.05)


class Lab:
    """The processes, started by this program with another role."""

    def __init__(
        self, folder: Path, hosts: Hosts, store: dict[str, Any], episodes: int, every: int, stack: ExitStack
    ) -> None:
        self.folder, self.episodes, self._hosts, self._stack = folder, episodes, hosts, stack
        self._arguments = ["--folder", str(folder), "--episodes", str(episodes), "--every", str(every)]
        self._arguments += ["--store", json.dumps(store)]

    def start_recorder(self, host: str) -> subprocess.Popen[bytes]:
        return self._start(host, self.folder / host / "log.txt", "record")

    def start_ranks(self) -> list[subprocess.Popen[bytes]]:
        """One host has them all. As torchrun does: each is told who it is, and a port at which they meet."""
        meet = {"MASTER_ADDR": HERE, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
        logs = [self.folder / TRAINER / f"rank-{rank}.log" for rank in range(RANKS)]
        return [self._start(TRAINER, log, "train", RANK=str(rank), **meet) for rank, log in enumerate(logs)]

    def _start(self, host: str, log: Path, role: str, **environment: str) -> subprocess.Popen[bytes]:
        program = [sys.executable, __file__, *self._arguments, "--role", role, "--host", host]
        return self._stack.enter_context(running(log, self._hosts.command(host, program), **environment))

    def recorded(self) -> list[str]:
        """The episodes that the hosts were promised to be kept."""
        notes = (self.folder / host / "recorded.txt" for host in RECORDERS)
        return [name for file in notes if file.exists() for name in file.read_text().split()]

    def wait_for(self, part: float) -> None:
        """Until so large a part of all episodes is recorded."""
        wanted = part * len(RECORDERS) * self.episodes
        wait_until(lambda: len(self.recorded()) >= wanted, f"episode {wanted:.0f}")

    def steps(self) -> int:
        """How many batches the ranks have noted."""
        files = self.folder.glob(f"{TRAINER}/rank-*/seen.jsonl")
        return sum(len(file.read_text().splitlines()) for file in files)


def run(folder: Path, episodes: int, every: int) -> None:
    """The whole story."""
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(folder, [*RECORDERS, TRAINER], [folder / BUCKET]))
        print("hosts:", f"plain processes, as {hosts.why_not}" if hosts.why_not else "apart, in namespaces")
        store, server = stack.enter_context(bucket(folder, hosts.address))
        lab = Lab(folder, hosts, store, episodes, every, stack)
        recorders = [lab.start_recorder(host) for host in RECORDERS]
        wait_until(lambda: bool(listed(store)), "the first shard")
        print(f"{len(lab.recorded())} episodes are recorded, {sum(listed(store).values())} published: training begins")
        ranks = lab.start_ranks()
        lab.wait_for(0.3)
        recorders[1] = restart(lab, recorders[1])
        if server is not None:
            stop_for_a_while(lab, server)
        wait_until(lambda: lab.steps() > 4, "a step of training")
        ranks = kill_a_rank(lab, ranks)
        wait_until(lambda: all(recorder.poll() is not None for recorder in recorders), "the end of the recording")
        assert all(recorder.returncode == 0 for recorder in recorders), "a recorder failed; see host-*/log.txt"
        there = listed(store)
        (folder / TRAINER / "recorded.new").write_text(str(sum(there.values())))
        (folder / TRAINER / "recorded.new").rename(folder / TRAINER / "recorded")
        print(f"{len(lab.recorded())} episodes are recorded, {sum(there.values())} published in {len(there)} shards")
        assert all(rank.wait(300) == 0 for rank in ranks), f"the training failed; see {TRAINER}/rank-*.log"
        check(lab, store, folder)


def listed(store: dict[str, Any]) -> dict[str, int]:
    """The shards that are listed, and how many episodes each has."""
    from memmap_buffer import NotABufferError

    try:
        found = shards_at(store["url"], storage_options=store["options"])
    except NotABufferError:
        return {}
    return {name: shard.episodes for name, shard in found.items()}


def restart(lab: Lab, recorder: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    recorder.kill()
    recorder.wait()
    left = [path.parent.name for path in (lab.folder / RECORDERS[1] / "shards").glob("*/schema.json")]
    print(f"{RECORDERS[1]} is killed with {len(left)} shards that are not published, and started again")
    return lab.start_recorder(RECORDERS[1])


def stop_for_a_while(lab: Lab, server: subprocess.Popen[bytes]) -> None:
    before = len(lab.recorded())
    server.send_signal(signal.SIGSTOP)
    time.sleep(OUTAGE)
    server.send_signal(signal.SIGCONT)
    more = len(lab.recorded()) - before
    print(f"the store stopped for {OUTAGE:.0f} s, in which {more} episodes were recorded")
    assert more or before >= len(RECORDERS) * lab.episodes, "no host went on recording while the store was away"


def kill_a_rank(lab: Lab, ranks: list[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Kill rank 1, and then the others, which wait for it in vain; start all again, as torchrun would."""
    for rank in ranks[::-1]:
        rank.kill()
        rank.wait()
    print(f"rank 1 is killed after {lab.steps()} batches, and all ranks are started again")
    return lab.start_ranks()


def check(lab: Lab, store: dict[str, Any], folder: Path) -> None:
    """Each epoch had the episodes of whole shards, each once; the last one had all that were recorded."""
    data = ConcatBuffer.from_root(store["url"], storage_options=store["options"], cache=folder / "cache")
    episodes = data.episodes(fields=(), return_indices=True)
    shards: dict[int, set[str]] = {}
    for (number, _), name in zip(episodes["_index"].tolist(), episodes["name"].tolist(), strict=True):
        shards.setdefault(number, set()).add(name)
    epochs = [
        Counter(name for names in steps.values() for name in names)
        for _, steps in sorted(seen_in(folder / TRAINER).items())
    ]
    for epoch, seen in enumerate(epochs):
        assert set(seen.values()) == {1}, f"epoch {epoch} had an episode twice"
        whole = set().union(*(names for names in shards.values() if names & seen.keys()))
        assert seen.keys() == whole, f"epoch {epoch} lacked episodes of a shard"
    for before, after in pairwise(epochs):
        assert before.keys() <= after.keys(), "an epoch lacked what the one before had"
    everything = set().union(*shards.values())
    assert epochs[-1].keys() == everything, "the last epoch lacked an episode"
    assert set(lab.recorded()) <= everything, "an episode that was recorded is not published"
    extra = len(everything) - len(lab.recorded())  # that of a kill between an episode and its note
    assert 0 <= extra <= 1, f"{extra} episodes were published that no host recorded"
    sizes = ", ".join(str(len(seen)) for seen in epochs)
    print(f"{len(epochs)} epochs, of {sizes} episodes: every published episode was seen once an epoch")


def main() -> None:
    parser = argparse.ArgumentParser(description="Record on hosts that share nothing, train from the bucket.")
    parser.add_argument("--folder", type=Path, default=Path("demo_output"), help="everything is written below it")
    parser.add_argument("--episodes", type=int, default=120, help="of each host")
    parser.add_argument("--every", type=int, default=10, help="how many episodes a shard has")
    parser.add_argument("--role", choices=["lab", "record", "train"], default="lab", help="of this process")
    parser.add_argument("--host", default=RECORDERS[0], help="whose folder is used")
    parser.add_argument("--store", type=json.loads, help="where it publishes to")
    options = parser.parse_args()
    if options.role == "record":
        record(options.folder / options.host, options.store, options.episodes, options.every)
    elif options.role == "train":
        train(options.folder / options.host, options.store)
    else:
        folder = (options.folder / f"lab-{uuid.uuid4().hex[:8]}").resolve()
        folder.mkdir(parents=True)
        run(folder, options.episodes, options.every)


if __name__ == "__main__":
    main()
