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

[ $# -ge 4 ] && [ $# -le 5 ] || fail "pass 4 or 5 arguments: BOOT BUNDLE SETTINGS.toml DATA [TOKEN]"
boot=$1 bundle=$2 settings=$3 data=$4 token=${5-}
[ -f "$boot/cmdline.txt" ] && [ -f "$boot/meta-data" ] ||
    fail "$boot lacks cmdline.txt or meta-data; pass the first partition of a card with Raspberry Pi OS Trixie"
[ -f "$bundle/install.sh" ] || fail "$bundle has no install.sh; pass a folder made by 'edgeasync bundle'"
[ -r "$settings" ] || fail "$settings cannot be read; pass the agent's settings file"
[ -r "$data" ] || fail "$data cannot be read; pass the board's data file"
name=$(sed -n 's|^data = "/var/lib/edgeasync/\([^/"]*\)".*|\1|p' "$settings")
[ -n "$name" ] || fail "$settings has no line data = \"/var/lib/edgeasync/FILE\"; add it under [agent]"
grep -q '^\[agent\]$' "$settings" || fail "$settings has no line [agent]; add it above the agent's keys"
[ "${data##*.}" = "${name##*.}" ] ||
    fail "$data is not a .${name##*.} file, but $settings names $name; pass such a file, or correct the line data"
says() { grep -qE "^[[:space:]]*$1[[:space:]]*=${2-}" "$settings"; }
if [ -n "$token" ]; then
    case ${token#edgeasync1_} in
        "$token" | *[!A-Za-z0-9_-]*) fail "TOKEN is not a token; pass the first line from 'edgeasync keys enrol'" ;;
    esac
    if says enrol; then fail "$settings already contains a token; remove the line enrol, or pass no TOKEN"; fi
    if says hub; then fail "$settings names a hub, but the TOKEN already does; remove the line hub"; fi
    if says hub_key; then fail "$settings has a hub_key, which cannot be combined with a TOKEN; remove that line"; fi
else
    says enrol || says hub_key || says insecure '[[:space:]]*true' ||
        fail "$settings has no enrol, hub_key or insecure = true; add one, or pass a TOKEN ('edgeasync keys enrol')"
    says enrol || says hub || fail "$settings does not name the hub; add hub = \"tcp://HOST:PORT\" under [agent]"
fi
start='exec sh /boot/firmware/edgeasync/first-boot.sh'
if [ -e "$boot/vendor-data" ] && ! grep -qxF "$start" "$boot/vendor-data"; then
    fail "$boot/vendor-data already exists; add the line '$start' to it, or delete it"
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
# Imager writes user-data, so this script writes vendor-data, which cloud-init always runs.
printf '#!/bin/sh\n%s\n' "$start" >"$boot/vendor-data"
sync
echo "prepare.sh: $boot is ready; unmount it, put the card into the board, and switch it on"
