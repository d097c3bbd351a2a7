#!/bin/sh
# Copies an agent to a card from Raspberry Pi Imager, so that the board joins its hub at its first boot:
#   prepare.sh BOOT BUNDLE SETTINGS.toml DATA [TOKEN]
# BOOT     where the card's first partition is mounted
# BUNDLE   folder made by `edgeasync bundle`
# DATA     the board's examples; copied under the file name in the settings
# TOKEN    from `edgeasync keys enrol NAME --valid-hours 24` on the hub's machine. Without it the settings must
#          contain enrol, hub_key or insecure.
# The card's system needs cloud-init, as in 64-bit Raspberry Pi OS Trixie.
set -eu

fail() {
    echo "prepare.sh: $*" >&2
    exit 2
}

[ $# -ge 4 ] && [ $# -le 5 ] || fail "give BOOT BUNDLE SETTINGS.toml DATA [TOKEN]"
boot=$1 bundle=$2 settings=$3 data=$4 token=${5-}
[ -f "$boot/cmdline.txt" ] && [ -f "$boot/meta-data" ] ||
    fail "$boot has no cmdline.txt and meta-data; give the first partition of a card with Raspberry Pi OS Trixie"
[ -f "$bundle/install.sh" ] || fail "$bundle has no install.sh; make it with 'edgeasync bundle'"
[ -r "$settings" ] || fail "$settings cannot be read; give the agent's settings"
[ -r "$data" ] || fail "$data cannot be read; give the board's examples"
name=$(sed -n 's|^data = "/var/lib/edgeasync/\([^/"]*\)".*|\1|p' "$settings")
[ -n "$name" ] || fail "$settings has no line data = \"/var/lib/edgeasync/FILE\", by which the board knows its data"
grep -q '^\[agent\]$' "$settings" || fail "$settings has no line [agent]"
[ "${data##*.}" = "${name##*.}" ] || fail "$settings names $name, and $data is of another kind; give .${name##*.} data, or correct the line data"
says() { grep -qE "^[[:space:]]*$1[[:space:]]*=${2-}" "$settings"; }
if [ -n "$token" ]; then
    case ${token#edgeasync1_} in
        "$token" | *[!A-Za-z0-9_-]*) fail "TOKEN is not a token; give the first line of 'edgeasync keys enrol'" ;;
    esac
    if says enrol; then fail "$settings has a token of its own; take that line out"; fi
    if says hub; then fail "$settings has a hub, which the TOKEN names; take that line out"; fi
    if says hub_key; then fail "$settings has a hub_key, which does not go with a TOKEN; take that line out"; fi
else
    says enrol || says hub_key || says insecure '[[:space:]]*true' ||
        fail "without a TOKEN $settings has to say how the board comes in; give the first line of 'edgeasync keys enrol'"
    says enrol || says hub || fail "$settings has to name the hub; write hub = \"tcp://HOST:PORT\" under [agent]"
fi
start='exec sh /boot/firmware/edgeasync/first-boot.sh'
if [ -e "$boot/vendor-data" ] && ! grep -qxF "$start" "$boot/vendor-data"; then
    fail "$boot/vendor-data is there already; name $start in it, or take it away"
fi

rm -rf "$boot/edgeasync"
mkdir "$boot/edgeasync" "$boot/edgeasync/data"
cp "$bundle"/* "$boot/edgeasync/"
cp "$(dirname "$0")/first-boot.sh" "$boot/edgeasync/"
cp "$data" "$boot/edgeasync/data/$name"
if [ -n "$token" ]; then
    sed "/^\[agent\]\$/a enrol = \"$token\"" "$settings" >"$boot/edgeasync/agent.toml"
else
    cp "$settings" "$boot/edgeasync/agent.toml"
fi
# Not user-data, which Imager writes: cloud-init runs vendor-data in any case.
printf '#!/bin/sh\n%s\n' "$start" >"$boot/vendor-data"
sync
echo "prepare.sh: $boot is ready; unmount it, put the card into the board, and switch it on"
