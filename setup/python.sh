# Makes .venv and installs the project and its packages, pinned by constraints.txt, into it.
# Safe to repeat: what is there already is kept.
set -eu
. setup/common.sh

CPU_INDEX=https://download.pytorch.org/whl/cpu

# The first Python 3.11 or 3.12: mplib, which ManiSkill depends on, has no build for newer ones. Each is asked
# rather than trusted: a name on the PATH may be a stub that fails.
find_python() {
    for python in ${PYTHON:-python3.11 python3.12 python3 python}; do
        "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null || continue
        echo "$python"
        return
    done
    die "no Python 3.11 or 3.12 found (tried: ${PYTHON:-python3.11 python3.12 python3 python}). Install one, on
Debian 12 and Ubuntu 24.04 with 'apt-get install python3 python3-venv', or name it: PYTHON=/path/to/python3.12 make ..."
}

make_venv() {
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    # Debian ships Python without the part that puts pip into a new environment.
    "$python" -c 'import ensurepip, venv' 2>/dev/null || {
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        run_as_root "$package is missing" "apt-get update || true; apt-get install -y --no-install-recommends $package"
    }
    "$python" -m venv --clear .venv
}

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# The torch that pip would take by itself, for example 2.13.0+cpu. Reads metadata, downloads no wheel.
torch_found_by_pip() {
    pip install --dry-run --no-deps --ignore-installed --quiet --report - -c constraints.txt torch |
        .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])'
}

reachable() {
    .venv/bin/python -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=10)' "$1" 2>/dev/null
}

# Options for pip that give the build of torch that suits this machine: an ordinary one, with CUDA, where there
# is a GPU; a CPU build (several GB less) where there is none and one can be had.
torch_options() {
    [ "$(uname -s)" = Linux ] || return 0
    ! has_gpu || return 0
    case $(torch_found_by_pip) in *+cpu) return 0 ;; esac
    if reachable "$CPU_INDEX/torch/"; then
        echo "--extra-index-url $CPU_INDEX"
    else
        echo "$CPU_INDEX cannot be reached: taking the ordinary build of torch (several GB)" >&2
    fi
}

case $PWD in *[[:space:]]*) die "the path of this folder has a blank: '$PWD'. Ray, which runs the workers, cannot start them from
a virtual environment in such a folder. Move the folder to a path without blanks." ;; esac

[ -x .venv/bin/python ] && .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv

say "installing Python packages into .venv (some minutes the first time)"
# A pip that reads a wheel's metadata without downloading the wheel: the ones of 2023 could not.
pip install -c constraints.txt --upgrade pip
# torch by itself: the extra index must serve nothing else.
# shellcheck disable=SC2046 # no option or two words
pip install -c constraints.txt $(torch_options) torch
pip install -c constraints.txt torchvision
# All else by its hashes, which the project itself, coming from no index, cannot have.
.venv/bin/python setup/requirements.py >.venv/requirements.txt
pip install --require-hashes -c constraints.txt -c setup/hashes.txt -r .venv/requirements.txt
pip install -c constraints.txt --no-deps -e .
pip check
