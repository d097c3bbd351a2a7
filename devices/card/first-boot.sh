#!/bin/sh
# Runs as root at a card's first start: cloud-init is told to by the file vendor-data, which prepare.sh has written.
# Installs what lies beside it, without a network, and starts the agent. Run it again by hand if it was cut off.
set -eu
here=$(dirname "$(readlink -f "$0")")
settings=''
if [ -f "$here/agent.toml" ]; then settings=$here/agent.toml; fi
sh "$here/install.sh" agent ${settings:+"$settings"} --no-start
for file in "$here"/data/*; do
    if [ -f "$file" ]; then install -o edgeasync -g edgeasync -m 600 "$file" /var/lib/edgeasync/; fi
done
/opt/edgeasync/current/bin/edgeasync service install agent
rm -rf "$here/agent.toml" "$here/data" # this partition can be read by everybody on the board
