# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# Set-up shared by tools/test, tools/demo, tools/cloud, tools/images,
# tools/packages, tools/release, tools/shared and tools/mutate. Source it, then
# call some of
#
#   need_packages PROFILE...  install the Debian packages of bindep.txt
#   need_mirrors              find the Debian mirrors that apt uses
#   need_venv                 .venv/ with everything of the requirement files
#   need_engine               this package in it, the C extension built
#   need_services NAME...     .services/NAME/, an environment for each service
#                             of a cloud
#
# Each checks first and does nothing when nothing is missing, so that a second
# run takes a second. Each has a time limit. A step that fails ends the script
# and prints its name, the last lines of its log, and a remedy.

set -euo pipefail

# Without its compiled modules every Python program would compile all that it
# imports at each start. That triples the time of the shortest commands.
unset PYTHONDONTWRITEBYTECODE

TOP=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$TOP/.venv
LOGS=$TOP/.log
ME=tools/$(basename "$0")

say() { printf '%s\n' "$ME: $*"; }

die() {
    printf '%s\n' "$ME: FAILED: $1" >&2
    shift
    [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
    exit 2
}

# step NAME SECONDS ADVICE COMMAND...: run COMMAND with a time limit, its
# output in a log.
step() {
    local name=$1 limit=$2 advice=$3 log rc=0 start=$SECONDS
    shift 3
    log=$LOGS/${name// /-}.log
    say "$name ..."
    timeout --foreground --kill-after=20 "$limit" "$@" \
        >"$log" 2>&1 </dev/null || rc=$?
    if [ "$rc" -eq 124 ] || [ "$rc" -eq 137 ]; then
        advice="It was stopped after $limit s. $advice"
    fi
    if [ "$rc" -ne 0 ]; then
        tail -n 15 "$log" | sed 's/^/  | /' >&2
        die "$name (exit status $rc)" "What to do: $advice" "Whole log: $log"
    fi
    say "$name: done in $((SECONDS - start)) s"
}

# One set-up at a time in a checkout. Called by each need_* function.
lock_setup() {
    [ -z "${SETUP_LOCKED:-}" ] || return 0
    mkdir -p "$LOGS"
    exec 9>"$LOGS/lock"
    flock -w 1800 9 ||
        die "another run is still setting up this checkout" \
            "What to do: wait for it, or end it, and start again."
    SETUP_LOCKED=1
}

# Called when the set-up is over, before the work proper.
unlock_setup() {
    exec 9>&-
    unset SETUP_LOCKED
}

# Prefix of a command that needs root.
AS_ROOT=()
[ "$(id -u)" -eq 0 ] || AS_ROOT=(sudo)

# Prefix of a command that uses mmdebstrap, behind AS_ROOT. It
# mounts directories of this machine, such as /dev/shm, in the root that it
# makes. Killed here, all its processes end, and the mounts go with them.
# shellcheck disable=SC2034  # for the scripts that source this
NAMESPACES=(unshare --mount --propagation private --pid --mount-proc --fork
    --kill-child)

# The names that bindep.txt has for Debian under one of the given profiles, or
# under that for this architecture alone.
bindep() {
    local profile machine
    machine=$(dpkg --print-architecture)
    for profile in "$@" "${@/%/-$machine}"; do
        sed -n "s/^\([a-z0-9.+-]*\) \[\(.* \)\?$profile \(.* \)\?platform:dpkg.*/\1/p" \
            "$TOP/bindep.txt"
    done
}

# Once a run. A source that does not answer is no reason to stop: the package
# may come from another, and if not, the installation fails.
refresh_packages() {
    [ -z "${REFRESHED:-}" ] || return 0
    REFRESHED=1
    lock_setup
    say "refresh package lists ..."
    "${AS_ROOT[@]}" timeout --kill-after=20 300 apt-get update -q \
        -o Acquire::Retries=1 -o Acquire::http::Timeout=30 \
        >"$LOGS/apt-update.log" 2>&1 </dev/null ||
        say "some package lists could not be refreshed; going on"
}

need_packages() {
    local wanted package missing=()
    command -v dpkg-query >/dev/null ||
        die "install system packages" \
            "This is not Debian. What to do: use Debian 12 or 13, or tox, as" \
            "doc/source/contributor/testing.rst says."
    wanted=$(bindep "$@")
    for package in $wanted; do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" \
            = installed ] || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    lock_setup
    [ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null ||
        die "install system packages" \
            "Neither root nor sudo. What to do, as root:" \
            "apt-get install ${missing[*]}"
    refresh_packages
    say "missing packages: ${missing[*]}"
    step "install packages" 900 \
        "see that apt-get reaches a Debian mirror (/etc/apt), then run this again." \
        "${AS_ROOT[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get install \
        -q -y --no-install-recommends -o DPkg::Lock::Timeout=300 \
        "${missing[@]}"
}

debian_suite() { sed -n 's/^VERSION_CODENAME=//p' /etc/os-release; }

# The Debian sources that apt uses here, in the one-line format.
debian_sources() {
    local keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    apt-get indextargets \
        --format "deb [signed-by=$keyring] \$(REPO_URI) \$(RELEASE) \$(COMPONENT)" \
        'Identifier: Packages' 'Origin: Debian' | sort -u
}

# Sets MIRRORS, the lines of a sources.list.
need_mirrors() {
    MIRRORS=$(debian_sources)
    if [ -z "$MIRRORS" ]; then
        refresh_packages
        MIRRORS=$(debian_sources)
    fi
    [ -n "$MIRRORS" ] || die "find a Debian mirror" \
        "apt on this machine has no source whose origin is Debian." \
        "What to do: add one to /etc/apt/sources.list.d."
}

# usable_python PROGRAM: 3.11 or newer, with venv, pip and the C headers.
usable_python() {
    "$1" - >/dev/null 2>&1 <<'PYTHON'
import ensurepip, os, sys, sysconfig, venv
header = os.path.join(sysconfig.get_path('include'), 'Python.h')
sys.exit(not (sys.version_info >= (3, 11) and os.path.exists(header)))
PYTHON
}

# Sets PYTHON, the interpreter that the environment is made from.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.11 python3.12 python3.13 \
        python3.14 /usr/bin/python3; do
        if [ -n "$candidate" ] && usable_python "$candidate"; then
            PYTHON=$(command -v "$candidate")
            return 0
        fi
    done
    return 1
}

need_python() {
    find_python && return 0
    need_packages python
    find_python ||
        die "find Python 3.11 or newer with its C headers" \
            "What to do: install one, and name it in the variable PYTHON," \
            "as in: PYTHON=/opt/python3.12/bin/python3 $ME"
}

# hash_of FILE...: one hash over names and contents.
hash_of() { (cd "$TOP" && sha256sum -- "$@" | sha256sum | cut -c1-32); }

# up_to_date NAME HASH, and remember NAME HASH, which goes into the
# environment, so that removing the environment forgets everything.
up_to_date() { [ "$(cat "$VENV/.$1" 2>/dev/null)" = "$2" ]; }
remember() { printf '%s\n' "$2" >"$VENV/.$1"; }
forget() { rm -f "$VENV/.$1"; }

# The requirement files of a set: demo for tools/demo, keep for its --keep, test
# for everything else.
requirement_files() {
    echo requirements.txt tools/demo-requirements.txt
    [ "$1" = demo ] || echo tools/client-requirements.txt
    [ "$1" != test ] || echo test-requirements.txt doc/requirements.txt
}

# venv_has SET: .venv/ has everything of the set, or of a larger one.
venv_has() {
    local set files
    "$VENV/bin/python" -c '' 2>/dev/null || return 1
    for set in test keep demo; do
        mapfile -t files < <(requirement_files "$set" | tr ' ' '\n')
        ! up_to_date "requirements-$set" "$(hash_of "${files[@]}")" || return 0
        [ "$set" != "$1" ] || return 1
    done
}

need_venv() {
    local set=$1 files
    if ! venv_has "$set"; then
        need_packages compile demo
        [ "$set" != test ] || need_packages test
        lock_setup
        if ! "$VENV/bin/python" -m uv --version >/dev/null 2>&1; then
            need_python
            rm -rf "$VENV"
            step "make the Python environment" 120 \
                "see that the disk has room, then run this again." \
                "$PYTHON" -m venv "$VENV"
            step "install uv" 300 \
                "see that pip reaches its package index, then run this again." \
                "$VENV/bin/python" -m pip install --quiet \
                --disable-pip-version-check uv
        fi
        mapfile -t files < <(requirement_files "$set" | tr ' ' '\n')
        install_requirements "Python packages" "$VENV" "${files[@]}"
        remember "requirements-$set" "$(hash_of "${files[@]}")"
    fi
    export PATH=$VENV/bin:$PATH VIRTUAL_ENV=$VENV
}

# install_requirements NAME ENVIRONMENT FILE...: by uv, which takes a fraction
# of pip's time. It uses the index that pip is configured for, and the system's
# certificates.
install_requirements() {
    local name=$1 environment=$2 index
    shift 2
    index=${PIP_INDEX_URL:-$("$TOP/.venv/bin/python" -m pip config get \
        global.index-url 2>/dev/null || true)}
    step "install $name" 1800 \
        "see that pip reaches its package index, then run this again." \
        env UV_SYSTEM_CERTS=1 UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}" \
        "$TOP/.venv/bin/python" -m uv pip install --quiet --no-progress \
        --python "$environment/bin/python" "${@/#/-r$TOP/}"
}

# OpenStack's services do not share an environment: their requirements differ.
# Missing ones are made side by side.
need_services() {
    local name missing=() jobs=() job failed=0
    for name; do
        service_is_made "$name" || missing+=("$name")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    need_packages compile
    need_venv test
    lock_setup
    need_python
    # Each job is a group of processes of its own, which the trap ends.
    set -m
    for name in "${missing[@]}"; do
        make_service "$name" &
        jobs+=($!)
    done
    # shellcheck disable=SC2064 # the jobs of now
    trap "kill -- ${jobs[*]/#/-} 2>/dev/null" EXIT
    for job in "${jobs[@]}"; do
        wait "$job" || failed=1
    done
    trap - EXIT
    set +m
    [ "$failed" -eq 0 ] || exit 2
}

service_hash() { hash_of "tests/cloud/requirements/$1.txt"; }

service_is_made() {
    local VENV=$TOP/.services/$1
    up_to_date requirements "$(service_hash "$1")" &&
        "$VENV/bin/python" -c '' 2>/dev/null
}

make_service() {
    local name=$1
    local VENV=$TOP/.services/$name
    rm -rf "$VENV"
    "$PYTHON" -m venv --without-pip "$VENV" ||
        die "make the environment of $name" \
            "What to do: see that the disk has room, then run this again."
    install_requirements "$name" "$VENV" "tests/cloud/requirements/$name.txt"
    remember requirements "$(service_hash "$name")"
}

engine_is_made() {
    [ -e "$TOP/glance_dedup/_engine.abi3.so" ] &&
        [ -e "$TOP/glance_dedup/glance-dedup-confined" ] &&
        up_to_date engine "$1" && up_to_date metadata "$2"
}

need_engine() {
    local metadata=(setup.cfg setup.py pyproject.toml requirements.txt)
    local sources installed built plugin=no
    need_venv "$1"
    [ ! -e /usr/include/nbdkit-plugin.h ] || plugin=yes
    mapfile -t sources < <(cd "$TOP" && find glance_dedup -name '*.[ch]' | sort)
    # Hashes, not times: switching branches changes the times of everything.
    installed=$(hash_of "${metadata[@]}")
    built=$(hash_of "${metadata[@]}" "${sources[@]}")-$plugin
    ! engine_is_made "$built" "$installed" || return 0
    need_packages compile
    lock_setup
    # By another run, which this one has waited for, and which may use it now.
    ! engine_is_made "$built" "$installed" || return 0
    forget engine   # a build that fails may replace a part of it
    export GLANCE_DEDUP_WERROR=1
    if up_to_date metadata "$installed"; then
        step "build the engine" 600 \
            "correct what the compiler reports; warnings are errors here." \
            env -C "$TOP" "$VENV/bin/python" setup.py -q build_ext \
            --inplace --force
    else
        step "build and install glance-dedup" 900 \
            "correct what the compiler or pip reports." \
            "$VENV/bin/python" -m pip install --no-deps \
            --disable-pip-version-check --no-build-isolation -e "$TOP"
        remember metadata "$installed"
    fi
    remember engine "$built"
}
