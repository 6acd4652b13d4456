# Tries the lowest versions that pyproject.toml allows of what parts of the project need directly, in an environment of
# their own, by the conformance suites of simulators and policies and the tests of schedulers.
#
#   sh setup/lowest.sh                      tabletop and schedulers
#   EXTRAS=tabletop,policies sh setup/lowest.sh
#   DIR=build/lowest                        folder that is made; it must not be there
set -eu
. setup/common.sh

EXTRAS=${EXTRAS:-tabletop,schedulers}
DIR=${DIR:-build/lowest}
[ ! -e "$DIR" ] || die "$DIR exists already: delete it, or name another with DIR="
python=.venv/bin/python
[ -x "$python" ] || python=python3
here=$PWD

say "resolving the lowest versions of [$EXTRAS]"
mkdir -p "$DIR"
"$python" -m venv "$DIR/tool"
"$DIR/tool/bin/python" -m pip --disable-pip-version-check install --quiet 'uv<1'
uv() { "$here/$DIR/tool/bin/uv" --quiet "$@"; }
options=$(echo "conformance,$EXTRAS" | tr , '\n' | sed 's/^/--extra /')
# Wheels alone: asking an old archive of sources what it needs runs its code.
# shellcheck disable=SC2086 # words
uv pip compile --resolution lowest-direct --only-binary :all: --no-annotate $options pyproject.toml \
  --python "$python" --output-file "$DIR/lowest.txt"

say "installing them"
uv venv --python "$python" "$DIR/env"
uv pip install --python "$DIR/env" --requirements "$DIR/lowest.txt"
uv pip install --python "$DIR/env" --no-deps .
grep -v '^#' "$DIR/lowest.txt"

# From an empty folder: what is tested is what was installed, and not the source tree.
mkdir "$DIR/empty"
pytest() { (cd "$DIR/empty" && PYTHONPATH= "$here/$DIR/env/bin/python" -m pytest -q -p no:cacheprovider "$@"); }
case ",$EXTRAS," in *,tabletop,*)
    say "the conformance suite of simulators"
    pytest --pyargs sim_farm.conformance --backend tabletop/reach ;;
esac
case ",$EXTRAS," in *,policies,*)
    say "the conformance suite of policies"
    pytest --pyargs policies.conformance --policy gaussian_mlp ;;
esac
say "the tests of schedulers"
mkdir "$DIR/empty/tests"
cp -r tests/schedulers tests/variants.py "$DIR/empty/tests"
cd "$DIR/empty/tests/schedulers"
rm test_cards.py test_choice_per_task.py test_communication.py test_executed.py test_fuzzed_files.py test_published.py \
  test_recorded.py test_shared_weights.py test_unused.py # these need benchmarks/, Ray, or each other
cd "$here"
pytest --import-mode=importlib -m "not slow" -W ignore tests/schedulers
