# enter_arm.sh ROOT CPU MACHINE COMMAND...: run a command in a root folder of 64-bit ARM, as on the board in MACHINE.
set -e
export root=$1 cpu=$2 machine=$3
shift 3
exec unshare --mount bash -ec '
    mount -t proc proc "$root/proc"
    mount --bind "$machine/proc/cpuinfo" "$root/proc/cpuinfo"
    mount --bind "$machine/sys" "$root/sys"
    mount --bind /dev "$root/dev"
    exec chroot "$root" "$@"' _ env -i QEMU_CPU="$cpu" HOME=/root PATH=/usr/local/bin:/usr/bin:/bin LC_ALL=C "$@"
