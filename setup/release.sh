# Builds what a package index takes of a tag, into dist/: the source archive, and the wheel from it, checked by twine.
# Nothing is uploaded.
#
#   sh setup/release.sh v0.1.0
set -eu
. setup/common.sh

TAG=${1:?sh setup/release.sh TAG}
git rev-parse --quiet --verify "refs/tags/$TAG" >/dev/null || die "there is no tag $TAG: git tag $TAG, on the commit to release"
[ ! -e dist ] || die "dist exists already: delete it"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir "$work/source"
git archive "$TAG" | tar -x -C "$work/source" # of the tag alone: no file that lies about gets into it
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$work/source/pyproject.toml")
[ "$TAG" = "v$version" ] || die "the version in pyproject.toml is $version, and the tag $TAG: a tag is v and the version"

python=.venv/bin/python
[ -x "$python" ] || python=python3
"$python" -m venv "$work/tool"
"$work/tool/bin/python" -m pip --disable-pip-version-check install --quiet 'build<2' 'twine<8'
# Two builds of a tag are equal: files have the time of its commit.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct "$TAG")
export SOURCE_DATE_EPOCH
"$work/tool/bin/python" -m build --outdir dist "$work/source"
"$work/tool/bin/python" -m twine check --strict dist/*
