#!/bin/sh
# Installs edgeasync in an environment of its own, then its service:
#   install.sh [--from SOURCE] [--home DIR] [--python PYTHON] [--gpu] [agent | hub | peer [SETTINGS.toml]] [OPTION...]
# Every OPTION is passed to `edgeasync service install`.
# SOURCE is a folder of wheels (then no network is used), a wheel, a clone, or a name in pip's index. The default is
# this file's folder if it contains wheels, or else the clone that contains this file.
# --gpu installs onnxruntime-gpu instead of onnxruntime. An upgrade keeps it.
# As root it installs for the machine, in /opt/edgeasync, and otherwise for your user, in ~/.local/edgeasync.
# If edgeasync is already installed, it only adds the packages that a hub needs. To install a new version, run
# `edgeasync service upgrade`.
set -eu
umask 022 # the service's user must be able to read what root installs

fail() {
    echo "install.sh: $*" >&2
    exit 2
}

here=$(dirname "$(readlink -f "$0")")
source='' home='' python=python3 gpu=''
while [ $# -gt 0 ]; do
    case $1 in
        --from | --home | --python) [ -n "${2-}" ] || fail "$1 needs a value" ;;
        --gpu) gpu=gpu && shift && continue ;;
        -h | --help) sed -n '2,10s/^# //p' "$0" && exit ;;
        *) break ;;
    esac
    case $1 in
        --from) source=$2 ;;
        --home) home=$2 ;;
        --python) python=$2 ;;
    esac
    shift 2
done
case ${1-} in
    hub) extras="[hub,web${gpu:+,$gpu}]" ;;
    agent | peer | '') extras="${gpu:+[$gpu]}" ;;
    *) fail "'$1' is not known; pass agent, hub or peer, then a settings file" ;;
esac
case ${2-} in
    '' | -*) ;;
    *) [ -e "$2" ] || fail "$2: no such file; pass the settings file of the $1" ;;
esac
if [ -z "$home" ]; then
    if [ "$(id -u)" = 0 ]; then home=/opt/edgeasync; else home=$HOME/.local/edgeasync; fi
fi

bits=$("$python" -c 'import struct; print(8 * struct.calcsize("P"))' 2>/dev/null) ||
    fail "cannot run $python; install python3 and python3-venv (sudo apt-get install python3-venv)"
[ "$bits" = 64 ] || fail "this system has 32 bits, for which onnxruntime has no packages; install the 64-bit system"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old; pass --python with Python 3.11 or newer"

if [ -z "$source" ]; then
    if [ -f "$here/../../../pyproject.toml" ]; then source=$here/../../..; fi
    for wheel in "$here"/edgeasync-*.whl; do
        if [ -e "$wheel" ]; then source=$here; fi
    done
fi
name=${source%%[!A-Za-z0-9._-]*} # extras precede the version
wanted=$name$extras${source#"$name"}
if [ -e "$source" ]; then
    source=$(readlink -f "$source")
    wanted=$source$extras
fi
offline=''
for wheel in "$source"/edgeasync-*.whl; do
    if [ -e "$wheel" ]; then offline=yes; fi
done
pip() { # run pip in the environment $env
    if [ -n "$offline" ]; then set -- "$@" --no-index --find-links "$source"; fi
    "$home/$env/bin/python" -m pip install --quiet "$@"
}

version=$("$home/current/bin/edgeasync" --version 2>/dev/null) || version=''
if [ -n "$version" ]; then
    echo "install.sh: $version is already installed; to change it, run 'edgeasync service upgrade'"
    env=current
    if [ "${1-}" = hub ] && ! "$home/$env/bin/python" -c 'import onnx, prometheus_client, starlette, uvicorn' \
        2>/dev/null; then
        pip onnx prometheus-client starlette uvicorn ||
            fail "a hub needs onnx and the packages of its page, which could not be installed in $home; see the" \
                "error above"
    fi
else
    [ -n "$source" ] || # root runs the package, so never choose a name in an index by default
        fail "found no wheel and no clone of edgeasync here; pass --from with the source of edgeasync"
    env=env-1
    mkdir -p "$home"
    trap '[ $? = 0 ] || rm -rf "$home/env-1"' EXIT
    trap 'exit 130' HUP INT TERM
    rm -rf "$home/env-1" # left by a power failure, or by a Python that was removed
    "$python" -m venv "$home/env-1" || fail "cannot create an environment in $home; see the error above"
    if [ -n "$offline" ]; then
        pip "edgeasync$extras" ||
            fail "nothing was installed; if no wheel fits $("$python" --version) on $(uname -m), make a" \
                "matching bundle with 'edgeasync bundle'"
    else
        pip "$wanted" || fail "nothing was installed; see the error above"
    fi
    if [ -n "$gpu" ]; then # both packages share a folder, so uninstalling one deletes files of the other
        "$home/env-1/bin/python" -m pip uninstall --quiet --yes onnxruntime
        pip --force-reinstall --no-deps onnxruntime-gpu || fail "nothing was installed; see the error above"
    fi
    sync # before the link exists, so that a power failure leaves a complete environment behind it
    ln -sfn env-1 "$home/current"
    trap - EXIT HUP INT TERM
    echo "install.sh: $("$home/current/bin/edgeasync" --version) is in $home"
fi
if [ $# -gt 0 ]; then exec "$home/current/bin/edgeasync" service install "$@"; fi
