#!/bin/sh
# Creates the network's keys: run it once, as root. root/ beside this file admits nodes; move it off the machine.
set -eu
umask 077
cd "$(dirname "$0")"
state=/var/lib/forebay
forebay={{ program | shell }}
"$forebay" network init root --name {{ name }} --bootstrap {{ host }}:7400
"$forebay" network join root admin --name admin --role admin  # to look, and to pause the job
"$forebay" network join root "$state/data-node" --name data-node --role data
"$forebay" network join root "$state/scheduler" --name scheduler --role scheduler
chown -R forebay: "$state"
