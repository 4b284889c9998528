# Sourced by scripts/install and scripts/build: which Pythons are here, and which torch can be had for them.

torch=${TORCH:-torch==2.13.0} numpy=${NUMPY:-numpy>=1.26}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

interpreter() { # of a version, 3.12 say: the one on the path, or pyenv's
    local tell='import sys; print(sys.executable)'
    "python$1" -c "$tell" 2>/dev/null || PYENV_VERSION=$(pyenv latest "$1" 2>/dev/null) "python$1" -c "$tell" 2>/dev/null
}

make_environment() { # make one at $2 by the Python of version $1
    local made_by
    made_by=$(interpreter "$1") || { echo "there is no Python $1 here" >&2 && return 1; }
    echo "== making $2 by $made_by"
    "$made_by" -m venv "$2"
}

brings_cuda() { # whether the torch that pip would install for the Python $1 has gigabytes of CUDA with it
    "$1" -m pip install -q "pip>=23.2" # the first that looks before it downloads
    "$1" -m pip install -q --dry-run --report - "$torch" "$numpy" | grep -c '"name": "nvidia-' >/dev/null
}
