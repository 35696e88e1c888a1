"""Commands on trust: a network's keys and certificates, who is admitted, who is shut out, what was refused."""

import argparse
import contextlib
import datetime as dt
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.cli.arguments import address, days, positive, show
from forebay.cli.running import add_server_options, log
from forebay.errors import UsageError
from forebay.network.peer import ROLES, Scope
from forebay.network.retry import waiting

DAY_S = 86400
TOKEN_VALID_DAYS = 7.0


def _network_init(args: argparse.Namespace) -> int:
    from forebay.network.pki.identity import create_network

    name = args.name or args.directory.absolute().name
    create_network(args.directory, name, bootstrap=[address(a) for a in args.bootstrap])
    print(f"network {name!r} in {args.directory}. Keep root-key.pem secret: it admits nodes.")
    print(f"Its datasets have the URLs forebay://{name}/DATASET.")
    print(
        f"next: forebay network join {args.directory} NODE_DIRECTORY --name NODE --role worker   # or data, scheduler"
    )
    return 0


def _network_org(args: argparse.Namespace) -> int:
    from forebay.network.pki.identity import create_organisation

    scope = _scope(args)
    peer_id = create_organisation(args.network, args.directory, args.name, scope, **_days(args))
    print(f"organisation {args.name!r} is {peer_id}: its nodes may be {_words(scope)}.")
    print(f"Give {args.directory} to whoever runs it, and keep no copy: org-key.pem admits nodes in its name.")
    print(f"next: forebay network join {args.directory} NODE_DIRECTORY --name NODE --role worker")
    return 0


def _network_join(args: argparse.Namespace) -> int:
    from forebay.network.join import join_by_token
    from forebay.network.pki.identity import NODE_VALID_DAYS, join

    if args.token is not None or args.token_file is not None:
        if len(args.directories) != 1 or args.role or args.dataset or args.days:
            raise UsageError("join: with a token expected the node's directory alone; the token says the rest")
        text = _token(args)
        with waiting(log, lambda: "an answer of the admission server that the token names"):
            identity = join_by_token(text, args.directories[0], args.name)
    else:
        if len(args.directories) != 2:
            raise UsageError(
                "join: expected the directories of network and node, or --token-file FILE and that of the node"
            )
        _check_role(args, "join")
        network_dir, node_dir = args.directories
        days = args.days or NODE_VALID_DAYS
        identity = join(network_dir, node_dir, args.name, scope=_scope(args), valid_days=days)
    where = args.directories[-1]
    print(f"{identity.name} is peer {identity.peer_id}. Its files are in {where}; use --network with it.")
    if identity.org or identity.scope != Scope():
        by = f" It was admitted by organisation {identity.org}." if identity.org else ""
        print(f"It may be {_words(identity.scope)}, until {_date(identity.expires_at)}.{by}")
    return 0


def _token(args: argparse.Namespace) -> str:
    """The token from a file, standard input or the command line."""
    if "-" in (args.token, str(args.token_file)):
        return sys.stdin.readline().strip()
    if args.token is not None:
        log.warning(
            "join: a token on the command line shows in the process list and the shell's history. "
            "Use --token-file FILE, or - for standard input."
        )
        return str(args.token)
    try:
        return str(args.token_file.read_text(encoding="utf-8")).strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"join: cannot read the token from {args.token_file}: {error}") from error


def _network_invite(args: argparse.Namespace) -> int:
    import secrets

    from forebay.network.pki.files import read_issuer, read_network
    from forebay.network.pki.tokens import Token, sign_token

    address(args.at)
    _check_role(args, "invite")
    issuer = read_issuer(args.directory)
    # An organisation's nodes get no datasets beyond its own, whatever the token says.
    scope = Scope(_scope(args).roles or issuer.scope.roles, tuple(args.dataset), issuer.scope.datasets)
    token = Token(
        id=secrets.token_hex(16),
        network_id=read_network(args.directory)["network_id"],
        issuer=issuer.peer_id,
        address=args.at,
        roles=tuple(sorted(scope.roles)),
        datasets=scope.datasets,
        uses=args.uses,
        expires_at=round(time.time() + args.hours * 3600),
        valid_days=args.days or TOKEN_VALID_DAYS,
    )
    print(sign_token(issuer, token))
    print(
        f"token {token.id[:8]}: {token.uses} {'node' if token.uses == 1 else 'nodes'} may join as {_words(scope)}, "
        f"until {_date(token.expires_at)}. "
        f"Who has it may join: send it like a password.\n"
        f"next, here: forebay network admit {args.directory} --listen {args.at}\n"
        f"next, there: forebay network join --token-file FILE NODE_DIRECTORY --name NODE",
        file=sys.stderr,
    )
    return 0


def _network_admit(args: argparse.Namespace) -> int:
    from forebay.cli.running import ready, until_stopped
    from forebay.network.admission import Admissions, AdmissionServer
    from forebay.network.audit import AuditLog

    host, port = address(args.listen)
    with contextlib.ExitStack() as stack:
        audit = stack.enter_context(contextlib.closing(AuditLog(args.audit))) if args.audit is not None else None
        admissions = Admissions(args.directory, audit)
        server = stack.enter_context(contextlib.closing(AdmissionServer(admissions, host, port).start()))
        ready(args, role="admission", address=server.address, issuer=admissions.issuer.peer_id)
        until_stopped(args)
    return 0


def _network_renew(args: argparse.Namespace) -> int:
    from forebay.network.join import renew_at
    from forebay.network.pki.files import renew_organisation
    from forebay.network.pki.identity import renew

    if len(args.directories) != (2 if args.at is None else 1):
        raise UsageError("renew: expected the directories of the issuer and of the node, or --at HOST:PORT and one")
    if args.at is not None:
        with waiting(log, lambda: f"an answer of the admission server at {args.at}"):
            identity = renew_at(args.at, args.directories[0])
    elif (args.directories[1] / "org-key.pem").exists():
        peer_id = renew_organisation(args.directories[0], args.directories[1], **_days(args))
        print(f"organisation {peer_id} has a new certificate. Renew its nodes', too: theirs carry the old one.")
        return 0
    else:
        identity = renew(args.directories[0], args.directories[1], **_days(args))
    until = _date(identity.expires_at)
    print(f"{identity.name} has a new certificate until {until}; it is peer {identity.peer_id} as before.")
    return 0


def _network_revoke(args: argparse.Namespace) -> int:
    from forebay.network.client import Client
    from forebay.network.pki.identity import Identity, revoke
    from forebay.network.revocation_sync import send_crl

    issuers = [d for d in args.directories if any((d / f"{kind}-key.pem").exists() for kind in ("root", "org"))]
    nodes = [d for d in args.directories if d not in issuers]
    if args.tell and not (issuers and nodes):
        raise UsageError("revoke: --tell needs the issuer's directory, to sign, and a node's, to speak as")
    made = [revoke(directory, args.peer_id, *nodes) for directory in issuers]
    for directory in nodes:
        revoke(directory, args.peer_id)
    if nodes:
        print(f"{args.peer_id} is shut out by {', '.join(map(str, nodes))}, from the next request on.")
    for signed in made:
        assert signed is not None  # an issuer's directory signs
        print(f"{args.peer_id} is revoked by CRL {signed.number} of {signed.issuer}. Running nodes pass it on.")
        for target in args.tell:
            with (
                Client(Identity.load(nodes[0])) as client,
                waiting(log, functools.partial("an answer of {}".format, target)),
            ):
                peer_id, is_new = send_crl(client, target, signed)
            later = "has it already, or takes this organisation's next CRL within a minute"
            print(f"{peer_id} at {target} {'accepted it' if is_new else later}.")
    if made and not nodes:
        print("No node knows it yet: name a running node's directory, or --tell HOST:PORT.", file=sys.stderr)
    return 0


def _network_rotate(args: argparse.Namespace) -> int:
    from forebay.network.pki.files import finish_rotation, rotate_root

    if args.finish:
        print(f"The root key in use is now that of {finish_rotation(args.directory)}; the former key is deleted.")
        print("next: restart `forebay network admit` here, and renew each organisation (forebay network renew).")
        return 0
    print(f"The next root is {rotate_root(args.directory, **_days(args))}, signed by the one in use, which goes on.")
    print("Nodes learn of it as they renew. Organisations: forebay network renew DIR ORGANISATION_DIR, now.")
    print(f"next, once every node has renewed: forebay network rotate --finish {args.directory}")
    return 0


def _network_show(args: argparse.Namespace) -> int:
    facts = _facts(args.directory)
    if not args.json:
        facts["expires"] = f"{_date(facts['expires'])} ({_left(facts['expires'])})"
        for key in ("roles", "datasets"):
            facts[key] = ", ".join(facts[key]) or "all"
        facts["revoked"] = ", ".join(facts["revoked"]) or "none"
        crls = facts.pop("crls")
        facts["CRLs"] = "; ".join(f"{crl['revoked']} revoked by {issuer}" for issuer, crl in crls.items()) or "none"
        if not facts.get("organisation", "it"):
            facts["organisation"] = "none: signed by the root"
    show(facts, args.json)
    return 0


def _facts(directory: Path) -> dict[str, Any]:
    """What a directory says of the network, organisation or node that it is of."""
    from forebay.network.pki.files import peer_in, read_issuer, read_network, read_roots
    from forebay.network.pki.identity import Identity
    from forebay.network.pki.revocation import Revocations

    facts: dict[str, Any]
    if any((directory / name).exists() for name in ("root-key.pem", "org-key.pem")):
        issuer = read_issuer(directory)
        peer, scope, expires_at = peer_in(issuer.cert), issuer.scope, issuer.cert.not_valid_after_utc.timestamp()
        revocations = Revocations(directory, read_roots(directory))
        facts = {"kind": "network" if issuer.is_root else "organisation", "name": peer.name, "peer_id": peer.peer_id}
        facts["network"] = read_network(directory)["network_id"]
    else:
        node = Identity.load(directory)
        scope, expires_at, revocations = node.scope, node.expires_at, node.revocations
        facts = {"kind": "node", "name": node.name, "peer_id": node.peer_id, "network": node.network_id}
        facts["organisation"] = node.org
    if (fault := revocations.fault()) is not None:
        raise UsageError(f"revocation: {fault}")
    return {
        **facts,
        # An organisation's patterns bound the node's own: both must fit a name.
        "roles": sorted(scope.roles),
        "datasets": list(scope.datasets or scope.within),
        "expires": round(expires_at),
        # The ids in revoked.txt, and of each CRL the number and how many it revokes: it has serial numbers, not ids.
        "revoked": sorted(revocations.own()),
        "crls": {crl.issuer: {"number": crl.number, "revoked": len(crl.serials)} for crl in revocations.crls()},
    }


def _network_sign(args: argparse.Namespace) -> int:
    from forebay.dataset.reader import open_dataset
    from forebay.network.pki.identity import Identity
    from forebay.network.publications import SIGNATURE_NAME, sign_dataset

    dataset = open_dataset(args.dataset)
    made = sign_dataset(
        Identity.load(args.network), dataset.path, dataset.name, origins=args.origin, **_days(args), serial=args.serial
    )
    if args.json:
        facts = {"name": made.name, "dataset_id": made.dataset_id, "publisher": made.publisher}
        print(json.dumps({**facts, "serial": made.serial, "expires_at": made.expires_at, "origins": made.origins}))
        return 0
    print(f"{made.name} {made.dataset_id} is signed by {made.publisher} ({dataset.path / SIGNATURE_NAME}).")
    print(f"It is version {made.serial}, until {_date(made.expires_at)}.")
    print(f"Who demands that: --publisher {made.publisher}")
    return 0


def _left(until: float) -> str:
    days = (until - time.time()) / DAY_S
    return f"{days:,.0f} days left" if days >= 10 else f"{days:,.1f} days left" if days > 0 else "over"


def _scope(args: argparse.Namespace) -> Scope:
    """What a certificate is asked for; one without roles has all that its issuer may give."""
    return Scope(frozenset() if "all" in args.role else frozenset(args.role), tuple(args.dataset))


def _check_role(args: argparse.Namespace, what: str) -> None:
    if not args.role:
        raise UsageError(
            f"{what}: expected --role {', '.join(sorted(ROLES))} or all, got none. Give the least that the node needs: "
            "data to serve, scheduler to lease, worker to train; may be repeated."
        )


def _days(args: argparse.Namespace) -> dict[str, float]:
    return {"valid_days": args.days} if args.days else {}


def _words(scope: Scope) -> str:
    roles = ", ".join(sorted(scope.roles)) or "worker, data, scheduler and admin"
    globs = scope.datasets or scope.within
    return f"{roles} for " + (f"datasets {', '.join(globs)}" if globs else "all datasets")


def _date(at: float) -> str:
    return dt.datetime.fromtimestamp(at, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _add_scope(p: argparse.ArgumentParser, role: str) -> None:
    p.add_argument("--role", action="append", default=[], choices=[*sorted(ROLES), "all"], help=role)
    p.add_argument("--dataset", action="append", default=[], metavar="GLOB", help="names it may touch; without it: all")


def _add_days(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--days",
        type=days,
        help="how long the certificate is valid; fractions are allowed (default: by a token 7, renewed by the node "
        "itself; by hand 90; of an organisation 1825, of a root 3650)",
    )


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    network = group("network", "identities and membership")
    _add_membership(verb, network)
    p = verb("revoke", _network_revoke, "shut a peer or an organisation out, in force without a restart", network)
    p.add_argument("peer_id", help="of the node or organisation")
    p.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="the issuer's, to sign a CRL; nodes'")
    p.add_argument("--tell", action="append", default=[], metavar="HOST:PORT", help="a node to bring the CRL to")
    p = verb("rotate", _network_rotate, "replace a network's root key without downtime, in two steps", network)
    p.add_argument("directory", type=Path, help="the network's")
    p.add_argument("--finish", action="store_true", help="the second step: put the next key in place")
    p.add_argument("--days", type=days, help="how long the next root's certificate is valid (default: 3650)")
    p = verb("show", _network_show, "who a node is, what it may do, until when, and whom it shuts out", network)
    p.add_argument("directory", type=Path, help="a node's, an organisation's or the network's")
    p = verb("sign", _network_sign, "vouch for a dataset as its publisher", network)
    p.add_argument("dataset", help="a local dataset")
    p.add_argument("--network", type=Path, required=True, metavar="DIR", help="the publisher's node directory")
    p.add_argument(
        "--origin", action="append", default=[], metavar="URL",
        help="an https, s3, gs or az URL that has it, too, without a query; may be repeated",
    )  # fmt: skip
    p.add_argument("--days", type=days, help="how long readers accept the signature (default: 365)")
    p.add_argument("--serial", type=int, metavar="N", help="the version, greater than before (default: the unix time)")


def _add_membership(verb: Callable[..., argparse.ArgumentParser], network: Any) -> None:
    p = verb("init", _network_init, "make a network: its root key and certificate", network)
    p.add_argument("directory", type=Path, help="where its key and certificate go")
    p.add_argument("--name", help="part of its datasets' URLs, forebay://NAME/DATASET (default: the directory's)")
    p.add_argument("--bootstrap", action="append", default=[], metavar="HOST:PORT", help="a DHT node to start from")
    p = verb("org", _network_org, "make an organisation, which admits nodes of its own", network)
    p.add_argument("network", type=Path, help="the network's directory")
    p.add_argument("directory", type=Path, help="where the organisation's key and certificate go")
    p.add_argument("--name", required=True, help="the organisation's")
    _add_scope(p, "the most that its nodes may be; may be repeated; default: all")
    _add_days(p)
    p = verb("join", _network_join, "admit a node: from an issuer's directory, or by a token from anywhere", network)
    p.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="NETWORK NODE; with a token only NODE")
    p.add_argument("--name", required=True, help="the node's")
    token = p.add_mutually_exclusive_group()
    token.add_argument(
        "--token-file", type=Path, metavar="FILE", help="what `network invite` printed; - reads standard input"
    )
    token.add_argument("--token", help="the same on the command line, where others may see it in the process list")
    _add_scope(p, "what the node may be; may be repeated; required without a token")
    _add_days(p)
    p = verb("invite", _network_invite, "print a token with which machines may join for a while", network)
    p.add_argument("directory", type=Path, help="the network's or an organisation's")
    p.add_argument("--at", required=True, metavar="HOST:PORT", help="where `network admit` will be reached")
    p.add_argument("--uses", type=positive, default=1, help="how many machines (1)")
    p.add_argument("--hours", type=positive, default=24, help="how long the token holds (24)")
    _add_scope(p, "what those who join may be; may be repeated; required")
    _add_days(p)
    about = "the server that turns tokens into certificates; holds the key"
    p = verb("admit", _network_admit, about, network)
    add_server_options(p)
    p.add_argument("directory", type=Path, help="the network's or an organisation's")
    p.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="port 0: a free one")
    p.add_argument("--audit", type=Path, metavar="FILE", help="log of admissions and refusals")
    p = verb("renew", _network_renew, "a new certificate for a node's key; its peer id stays", network)
    p.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="ISSUER NODE; with --at only NODE")
    p.add_argument("--at", metavar="HOST:PORT", help="the issuer's admission server")
    _add_days(p)
