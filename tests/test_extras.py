"""A neighbour that is not installed is named, with the command that installs it, in one line."""

import subprocess
import sys

import pytest

from memmap_buffer.extras import extra

NEEDS = {
    "environments": ("gymnasium", "gymnasium"),
    "interop.record": ("gymnasium", "gymnasium"),
    "interop.minari": ("minari", "minari"),
    "interop.lerobot": ("pyarrow", "lerobot"),
    "interop.lerobot_dataset": ("pyarrow", "lerobot"),
    "interop.parquet": ("pyarrow", "parquet"),
    "interop.d4rl": ("h5py", "hdf5"),
    "interop.robomimic": ("h5py", "hdf5"),
    "interop.ray": ("ray", "ray"),
    "interop.rllib": ("pyarrow", "rllib"),
    "interop.rllib_offline": ("msgpack", "rllib"),
    "interop.d3rlpy": ("d3rlpy", "d3rlpy"),
    "interop.lightning": ("lightning", "lightning"),
    "interop.jax": ("jax", "jax"),
    "interop.skrl": ("skrl", "skrl"),
    "interop.stable_baselines3": ("stable_baselines3", "stable-baselines3"),
    "interop.torchrl_replay": ("tensordict", "torchrl"),  # which torchrl needs, and may be missing with it
}


@pytest.mark.parametrize("module", NEEDS)
def test_importing_a_neighbour_that_is_missing_says_what_to_install(module):
    package, name = NEEDS[module]
    code = f"import sys; sys.modules[{package!r}] = None; import memmap_buffer.{module}"
    error = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: {package}")
    assert error.endswith(f" cannot be imported; install it by: pip install 'memmap-buffer[{name}]'")


def test_the_error_keeps_its_cause_and_the_name_of_what_is_missing():
    with pytest.raises(ImportError, match=r"pip install 'memmap-buffer\[some\]'") as caught, extra("some"):
        import no_such_package_anywhere  # noqa: F401
    assert caught.value.name == "no_such_package_anywhere"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
