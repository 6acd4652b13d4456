# System libraries: software Vulkan (which SAPIEN needs even for a scene without pictures), software OpenGL
# (which MuJoCo renders with) and GLib (which OpenCV, and so ManiSkill, loads). Tries what is there, and installs
# where something is missing or too old. Safe to repeat. Fails where something is missing and cannot be
# installed, unless SYSTEM_PACKAGES=no.
set -eu
. setup/common.sh

works() {
    printf '%s: ' "$1"
    .venv/bin/python -P embodied/doctor/checks.py --probe "$1" 2>&1
}

# OSMesa is a second way to what EGL does, and only worth having where no GPU does it better.
missing_libraries() {
    for library in vulkan egl maniskill $(has_gpu || echo osmesa); do
        works "$library" >&2 || printf '%s ' "$library"
    done
}

# The shell commands that install them here; nothing where the packages' names are not known.
install_commands() {
    command -v apt-get >/dev/null || return 0
    release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    options="-y --no-install-recommends"
    # The Mesa of Debian 12 (22.3) is refused by SAPIEN; its backports have a newer one.
    if [ "$release" = bookworm ]; then
        options="$options -t bookworm-backports"
        has_backports || add_backports
    fi
    # One suite that does not answer is no reason to stop: the next command says if what it needs is lacking.
    echo 'apt-get update || true'
    echo "apt-get install $options libvulkan1 mesa-vulkan-drivers" \
        "libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libgles2 libglib2.0-0"
    # Releases from 2025 on have no OSMesa any more; EGL does the same.
    echo "apt-get install $options libosmesa6 || true"
}

has_backports() { apt-get indextargets --format '$(RELEASE)' | grep -qx bookworm-backports; }

# Prints the command that adds the suite, from the mirror that this machine uses already.
add_backports() {
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Release: bookworm' | head -n 1)
    echo "echo deb ${mirror:-http://deb.debian.org/debian} bookworm-backports main" \
        "> /etc/apt/sources.list.d/bookworm-backports.list"
}

say "looking for Vulkan, OpenGL and what ManiSkill loads"
missing=$(missing_libraries)
[ -n "$missing" ] || exit 0

commands=$(install_commands)
if [ -z "$commands" ]; then
    echo "Install GLib and Mesa, with lavapipe and EGL, as this system does it, then try again." >&2
elif run_as_root "no working ${missing% }" "$commands"; then
    missing=$(missing_libraries)
fi
case $missing in
    *vulkan* | *egl* | *maniskill*) ;;
    *) exit 0 ;;
esac
echo "ManiSkill's tasks ('make train' uses one) need Vulkan and GLib; pictures of tabletop tasks need OpenGL." >&2
[ "${SYSTEM_PACKAGES:-auto}" = no ] ||
    die "no working ${missing% }. To go on without: SYSTEM_PACKAGES=no make ..."
