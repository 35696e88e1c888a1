#!/bin/sh
# Creates the network's keys beside this file: run it once, before `kubectl apply -k .`.
# root/ stays on this machine: its key signs a new issuer if the cluster's is stolen, and revokes the old one.
# A pod that starts after its token has expired cannot join: create new tokens within a year, and apply again.
set -eu
umask 077
cd "$(dirname "$0")"
forebay network init root --name {{ name }} --bootstrap {{ name }}-dht:7400
forebay network org root issuer --name kubernetes --role data --role scheduler --role worker
invite="forebay network invite issuer --issuer {{ name }}-admit:7443 --uses 100000 --hours 8760"
$invite --role data --role scheduler > nodes.token
$invite --role worker > workers.token
