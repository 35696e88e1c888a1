#!/bin/sh
# Creates the network's keys; run it as root. Keys that are there stay. root/ beside this file admits nodes: move it off
# the machine.
set -eu
umask 077
cd "$(dirname "$0")"
state=/var/lib/forebay
forebay={{ program | shell }}
test -e root/root-key.pem || "$forebay" network init root --name {{ name }} --bootstrap {{ host }}:7400
test -e admin/node-key.pem || "$forebay" network join root admin --name admin --role admin  # to look, and to pause the job
test -e "$state/data-node/node-key.pem" || "$forebay" network join root "$state/data-node" --name data-node --role data
test -e "$state/scheduler/node-key.pem" || "$forebay" network join root "$state/scheduler" --name scheduler --role scheduler
chown -R forebay: "$state"
