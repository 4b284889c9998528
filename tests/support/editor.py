"""What a type checker must find, and must not, in code that uses the library: `# E:` marks the lines with an error."""

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader
from typing_extensions import assert_type

from memmap_buffer import ConcatBuffer, Hindsight, NStep, Offsets, Options, Prioritized, ReplayBuffer, Window
from memmap_buffer.loading.datasets import EpisodeDataset

buffer = ReplayBuffer("folder", 10, 20, {"reward": "float"}, durability="power", publish="step")
ReplayBuffer("folder", 10, 20, {"reward": "float"}, durability="disk")  # E: durability
ReplayBuffer.from_folder("folder", verify="sometimes")  # E: verify
ConcatBuffer.from_root("root", on_damaged="ignore")  # E: on_damaged

batch = buffer.sample(32, n_steps=3, gamma=0.99, filter_meta={"task": 1}, seed=None, view=None)
assert_type(batch["reward"], torch.Tensor)
assert_type(buffer.batch([0, 1], timestep_level=True)["reward"], torch.Tensor)
arrays = buffer.sample(32, timestep_level=True, format="numpy")
arrays["reward"].reshape(-1, 1)
arrays["reward"].cuda()  # E: cuda
assert_type(buffer.batch(format="numpy")["reward"].astype(np.float32), npt.NDArray[np.float32])
reward, lens = buffer.sample(32, to_named_tuple=["reward", "_lens"])
shared: Options = {"n_steps": 3, "on_stale": "raise", "format": "numpy"}
buffer.sample(32, **shared)
buffer.sample(32, n_step=3)  # E: n_step
buffer.sample(32, n_steps="3")  # E: n_steps
buffer.sample(32, padding="zeros", n_steps=2)  # E: padding
buffer.sample(32, format="jax")  # E: format

loader = buffer.dataloader(32, shuffle="block", tail="uneven", timestep_level=True, num_workers=2, pin_memory=True)
loader.load_state_dict(loader.state_dict(), on_stale="redraw")
buffer.dataloader(32, shuffle="blocks")  # E: shuffle
buffer.dataloader(32, tail="keep")  # E: tail
buffer.dataloader(32, num_worker=2)  # E: num_worker
buffer.dataloader(32, sampler=None)  # E: sampler
buffer.dataloader(32, on_stale="retry")  # E: on_stale
dataset = buffer.dataset(timestep_level=True, to_named_tuple=["reward"])
assert_type(dataset, EpisodeDataset)
DataLoader(dataset, batch_size=4)
buffer.dataloader(4, dataset=buffer.dataset(format="numpy"))
buffer.dataset(gama=0.9)  # E: gama

Window(4, boundary="repeat", padding="edge")
Window(4, boundary="wrap")  # E: boundary
Offsets({"reward": (0, 1)}, boundary="drop")
NStep(3, stack={"reward": 2}, padding="reflect")  # E: padding
Prioritized(variant="rank", normalize=None, reduce="max")
Prioritized(variant="ranked")  # E: variant
Prioritized(normalize="max")  # E: normalize
Hindsight(lambda achieved, goal, info: achieved, strategy="past")  # E: strategy
buffer.statistics().normalize("reward", by="minmax")  # E: by
