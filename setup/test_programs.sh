# What tests alone need of the system: Chromium, in which they measure where a page's text stands, and MagickWand, with
# which LIBERO-Plus' own code blurs pictures. Safe to repeat. Fails where one is missing and cannot be installed, unless
# SYSTEM_PACKAGES=no: its tests are skipped then, and say so.
set -eu
. setup/common.sh

has_chromium() {
    for program in chromium chromium-browser google-chrome; do
        if command -v "$program" >/dev/null; then return; fi
    done
    return 1
}

has_magickwand() { .venv/bin/python -c 'import ctypes.util, sys; sys.exit(not ctypes.util.find_library("MagickWand-6.Q16"))'; }

missing=
has_chromium || missing="chromium"
has_magickwand || missing="$missing libmagickwand-6.q16-6"
[ -n "$missing" ] || exit 0

say "tests need $missing"
if ! command -v apt-get >/dev/null; then
    echo "Install Chromium and MagickWand 6 as this system does it, then try again." >&2
elif run_as_root "no ${missing# }" "apt-get update || true
apt-get install -y --no-install-recommends $missing"; then
    exit 0
fi
[ "${SYSTEM_PACKAGES:-auto}" = no ] || die "no ${missing# }. To go on without: SYSTEM_PACKAGES=no make ..."
