#!/bin/sh
# Installs the agent from this folder, without a network, and starts it. cloud-init runs this as root at the first
# boot, because of the file vendor-data from prepare.sh. If it was interrupted, run it again by hand.
set -eu
here=$(dirname "$(readlink -f "$0")")
settings=''
if [ -f "$here/agent.toml" ]; then settings=$here/agent.toml; fi
sh "$here/install.sh" agent ${settings:+"$settings"} --no-start
for file in "$here"/data/*; do
    if [ -f "$file" ]; then install -o edgeasync -g edgeasync -m 600 "$file" /var/lib/edgeasync/; fi
done
/opt/edgeasync/current/bin/edgeasync service install agent
rm -rf "$here/agent.toml" "$here/data" # every user of the board can read this partition
