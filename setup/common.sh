# Shared by the set-up scripts, which run from the root of the source tree.

say() { printf '\n== %s\n' "$*"; }

die() {
    printf '\nerror: %s\n' "$*" >&2
    exit 1
}

# True where an NVIDIA driver is running, or will be (GPU=yes: a container's image).
has_gpu() { [ "${GPU:-}" = yes ] || [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; }

# run_as_root WHY COMMANDS: runs the shell commands as root if that needs no password. Otherwise, or with
# SYSTEM_PACKAGES=no, prints them to be typed and fails.
run_as_root() {
    if [ "${SYSTEM_PACKAGES:-auto}" != no ]; then
        if [ "$(id -u)" = 0 ]; then
            say "$1: installing"
            sh -euxc "$2"
            return
        elif sudo -n true 2>/dev/null; then
            say "$1: installing with sudo"
            sudo -n sh -euxc "$2"
            return
        fi
    fi
    printf "\n%s. Type this, then try again:\n\nsudo sh -euxc '%s'\n\n" "$1" "$2" >&2
    return 1
}
