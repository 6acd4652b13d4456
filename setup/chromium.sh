# Chromium, in which the tests of pages measure where text stands. `make test` alone needs it. Safe to repeat. Fails
# where there is none and it cannot be installed, unless SYSTEM_PACKAGES=no: those tests are skipped then, and say so.
set -eu
. setup/common.sh

for program in chromium chromium-browser google-chrome; do
    if command -v "$program" >/dev/null; then exit 0; fi
done

say "the tests of pages need Chromium"
if ! command -v apt-get >/dev/null; then
    echo "Install Chromium as this system does it, then try again." >&2
elif run_as_root "no Chromium" "apt-get update || true
apt-get install -y --no-install-recommends chromium"; then
    exit 0
fi
[ "${SYSTEM_PACKAGES:-auto}" = no ] || die "no Chromium. To go on without: SYSTEM_PACKAGES=no make ..."
