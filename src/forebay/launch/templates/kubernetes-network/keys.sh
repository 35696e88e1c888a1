#!/bin/sh
# Creates the network's keys beside this file, and tokens for 30 days. Run it before `kubectl apply -k .`; run both again
# before the tokens expire or are used up, else a pod that starts anew cannot join.
# root/ stays on this machine: its key signs a new issuer if the cluster's is stolen, and revokes the old one.
set -eu
umask 077
cd "$(dirname "$0")"
test -d root || forebay network init root --name {{ name }} --bootstrap {{ name }}-dht:7400
test -d issuer || forebay network org root issuer --name kubernetes --role data --role scheduler --role viewer --role worker
invite() {
  forebay network invite issuer --issuer {{ name }}-admit:7443 --role "$1" --dataset '{{ dataset }}' --uses "$2" \
    --hours 720 > "$1.token"
}
invite data {{ 100 * data_nodes | int }}
invite scheduler 100
invite viewer 100
invite worker {{ 100 * workers | int }}
