#!/bin/sh
# Installs edgeasync in an environment of its own, then its service:
#   install.sh [--from SOURCE] [--home DIR] [--python PYTHON] [--gpu] [agent | hub | peer [SETTINGS.toml]] [OPTION...]
# An OPTION is one of `edgeasync service install`.
# SOURCE is a folder of wheels (no network is used), a wheel, a clone, or a name in pip's index. Without it: the
# folder of this file if it has wheels, or else the clone that this file is of.
# With --gpu onnxruntime-gpu takes the place of onnxruntime, and an upgrade keeps it.
# As root it installs for the machine, in /opt/edgeasync; as another user for that user, in ~/.local/edgeasync.
# A second run changes nothing, but for what a hub needs beside an agent: edgeasync service upgrade brings a new
# version.
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
    hub) extras="[hub${gpu:+,$gpu}]" ;;
    agent | peer | '') extras="${gpu:+[$gpu]}" ;;
    *) fail "'$1' is not known; give agent, hub or peer, then a settings file" ;;
esac
case ${2-} in
    '' | -*) ;;
    *) [ -e "$2" ] || fail "$2: no such file; give the settings of the $1" ;;
esac
if [ -z "$home" ]; then
    if [ "$(id -u)" = 0 ]; then home=/opt/edgeasync; else home=$HOME/.local/edgeasync; fi
fi

bits=$("$python" -c 'import struct; print(8 * struct.calcsize("P"))' 2>/dev/null) ||
    fail "no $python; install python3 and python3-venv (sudo apt-get install python3-venv)"
[ "$bits" = 64 ] || fail "this system has 32 bits, for which onnxruntime has no packages; install the 64-bit system"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old; give --python with 3.11 or newer"

if [ -z "$source" ]; then
    if [ -f "$here/../../../pyproject.toml" ]; then source=$here/../../..; fi
    for wheel in "$here"/edgeasync-*.whl; do
        if [ -e "$wheel" ]; then source=$here; fi
    done
fi
name=${source%%[!A-Za-z0-9._-]*} # extras stand before a version
wanted=$name$extras${source#"$name"}
if [ -e "$source" ]; then
    source=$(readlink -f "$source")
    wanted=$source$extras
fi
offline=''
for wheel in "$source"/edgeasync-*.whl; do
    if [ -e "$wheel" ]; then offline=yes; fi
done
pip() { # in the environment $env
    if [ -n "$offline" ]; then set -- "$@" --no-index --find-links "$source"; fi
    "$home/$env/bin/python" -m pip install --quiet "$@"
}

version=$("$home/current/bin/edgeasync" --version 2>/dev/null) || version=''
if [ -n "$version" ]; then
    echo "install.sh: $version is there; for another: edgeasync service upgrade"
    env=current
    if [ "${1-}" = hub ] && ! "$home/$env/bin/python" -c 'import onnx' 2>/dev/null; then
        pip onnx || fail "a hub needs onnx, which the environment of an agent in $home has not; why is said above"
    fi
else
    [ -n "$source" ] || # root runs what comes: no name in an index is taken unasked
        fail "no wheel of edgeasync and no clone is here; give --from, to say where edgeasync comes from"
    env=env-1
    mkdir -p "$home"
    trap '[ $? = 0 ] || rm -rf "$home/env-1"' EXIT
    trap 'exit 130' HUP INT TERM
    rm -rf "$home/env-1" # of a run that lost its power, or of a Python that is gone
    "$python" -m venv "$home/env-1" || fail "no environment could be made in $home; why is said above"
    if [ -n "$offline" ]; then
        pip "edgeasync$extras" ||
            fail "nothing is installed; if none of the wheels fits $("$python" --version) on $(uname -m), make" \
                "others by edgeasync bundle"
    else
        pip "$wanted" || fail "nothing is installed; why is said above"
    fi
    if [ -n "$gpu" ]; then # both lie in one folder: what is taken away there, the other has to bring again
        "$home/env-1/bin/python" -m pip uninstall --quiet --yes onnxruntime
        pip --force-reinstall --no-deps onnxruntime-gpu || fail "nothing is installed; why is said above"
    fi
    sync # a power cut from here on finds what the link leads to
    ln -sfn env-1 "$home/current"
    trap - EXIT HUP INT TERM
    echo "install.sh: $("$home/current/bin/edgeasync" --version) is in $home"
fi
if [ $# -gt 0 ]; then exec "$home/current/bin/edgeasync" service install "$@"; fi
