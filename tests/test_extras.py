"""A neighbour that is not installed is named, with the command that installs it, in one line."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memmap_buffer
from memmap_buffer.adapters import extra

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
GYMNASIUM_SINCE = {  # since when it has each name that is imported from it
    "gymnasium": (1, 0),
    "gymnasium.Space": (1, 0),
    "gymnasium.Wrapper": (1, 0),
    "gymnasium.spaces": (1, 0),
    "gymnasium.vector.AutoresetMode": (1, 1),
    "gymnasium.vector.VectorEnv": (1, 0),
    "gymnasium.vector.VectorWrapper": (1, 0),
    "gymnasium.wrappers.Autoreset": (1, 0),
}


@pytest.mark.parametrize("module", NEEDS)
def test_importing_a_neighbour_that_is_missing_says_what_to_install(module):
    package, name = NEEDS[module]
    code = f"import sys; sys.modules[{package!r}] = None; import memmap_buffer.{module}"
    error = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: {package}")
    assert error.endswith(f" cannot be imported; install it by: pip install 'memmap-buffer[{name}]'")


def imported(package: str) -> set[str]:
    """The names that any module imports from a package."""
    found = set()
    for path in Path(memmap_buffer.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == package}


def test_the_lowest_gymnasium_that_the_extra_allows_has_all_that_is_imported_from_it():
    assert imported("gymnasium") == set(GYMNASIUM_SINCE)
    extras = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (lowest,) = re.findall(r'^gymnasium = \["gymnasium>=([0-9.]+)"\]', extras, re.MULTILINE)
    assert tuple(map(int, lowest.split("."))) == max(GYMNASIUM_SINCE.values())


def test_a_version_that_lacks_a_name_is_told_from_one_that_is_missing():
    text = (
        r"cannot import name 'no_such_name' from 'json'.*; install a version that can be used by: pip install 'memmap-"
    )
    with pytest.raises(ImportError, match=text), extra("some"):
        from json import no_such_name  # noqa: F401


def test_the_error_keeps_its_cause_and_the_name_of_what_is_missing():
    with pytest.raises(ImportError, match=r"pip install 'memmap-buffer\[some\]'") as caught, extra("some"):
        import no_such_package_anywhere  # noqa: F401
    assert caught.value.name == "no_such_package_anywhere"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
