"""Commands `forebay network`: keys, certificates, admission, revocation and signatures of a network."""

import argparse
import contextlib
import datetime as dt
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
from forebay.network.retry import log_while_waiting

DAY_S = 86400
TOKEN_VALID_DAYS = 7.0


def _network_init(args: argparse.Namespace) -> int:
    from forebay.network.pki.files import create_network

    name = args.name or args.directory.absolute().name
    create_network(args.directory, name, bootstrap=[address(a) for a in args.bootstrap])
    print(f"network {name!r} in {args.directory}. Keep root-key.pem secret: it admits nodes.")
    print(f"Its datasets have the URLs forebay://{name}/DATASET.")
    print(
        f"next: forebay network join {args.directory} NODE_DIRECTORY --name NODE --role worker   # or data, scheduler"
    )
    return 0


def _network_org(args: argparse.Namespace) -> int:
    from forebay.network.pki.files import create_organisation

    scope = _scope(args)
    peer_id = create_organisation(args.network, args.directory, args.name, scope, **_days(args))
    print(f"organisation {args.name!r} is {peer_id}: its nodes may be {_describe(scope)}.")
    print(f"Give {args.directory} to its owner, and keep no copy: org-key.pem admits nodes in its name.")
    print(f"next: forebay network join {args.directory} NODE_DIRECTORY --name NODE --role worker")
    return 0


def _network_join(args: argparse.Namespace) -> int:
    from forebay.network.join import join_by_token
    from forebay.network.pki.certificates import NODE_VALID_DAYS
    from forebay.network.pki.identity import join

    if args.token_file is not None:
        if len(args.directories) != 1 or args.role or args.dataset or args.days:
            raise UsageError("join: with a token expected the node's directory alone; the token says the rest")
        text = _read_token(args.token_file)
        with log_while_waiting(log, lambda: "an answer of the admission server that the token names"):
            identity = join_by_token(text, args.directories[0], args.name)
    else:
        if len(args.directories) != 2:
            raise UsageError(
                "join: expected the directories of network and node, or --token-file FILE and that of the node"
            )
        _check_role(args, "join")
        network_dir, node_dir = args.directories
        valid_days = args.days or NODE_VALID_DAYS
        identity = join(network_dir, node_dir, args.name, scope=_scope(args), valid_days=valid_days)
    print(
        f"{identity.name} is peer {identity.peer_id}. Its files are in {args.directories[-1]}; use --network with it."
    )
    if identity.org or identity.scope != Scope():
        by = f" It was admitted by organisation {identity.org}." if identity.org else ""
        print(f"It may be {_describe(identity.scope)}, until {_date(identity.expires_at)}.{by}")
    return 0


def _read_token(path: Path) -> str:
    """The token in a file, or on standard input for `-`."""
    if str(path) == "-":
        return sys.stdin.readline().strip()
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"join: cannot read the token from {path}: {error}") from error


def _network_invite(args: argparse.Namespace) -> int:
    import secrets

    from forebay.network.pki.files import read_issuer, read_network
    from forebay.network.pki.tokens import JoinToken, sign_token

    address(args.issuer)
    _check_role(args, "invite")
    issuer = read_issuer(args.directory)
    scope = Scope(_scope(args).roles or issuer.scope.roles, tuple(args.dataset), issuer.scope.datasets)
    token = JoinToken(
        id=secrets.token_hex(16),
        network_id=read_network(args.directory).network_id,
        issuer=issuer.peer_id,
        address=args.issuer,
        roles=tuple(sorted(scope.roles)),
        datasets=scope.datasets,
        uses=args.uses,
        expires_at=round(time.time() + args.hours * 3600),
        valid_days=args.days or TOKEN_VALID_DAYS,
    )
    print(sign_token(issuer, token))
    print(
        f"token {token.id[:8]}: {token.uses} {'node' if token.uses == 1 else 'nodes'} may join as {_describe(scope)}, "
        f"until {_date(token.expires_at)}. Send it like a password.\n"
        f"next, here: forebay network admit {args.directory} --listen {args.issuer}\n"
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

    if len(args.directories) != (2 if args.issuer is None else 1):
        raise UsageError("renew: expected the directories of the issuer and of the node, or --issuer HOST:PORT and one")
    if args.issuer is not None:
        with log_while_waiting(log, lambda: f"an answer of the admission server at {args.issuer}"):
            identity = renew_at(args.issuer, args.directories[0])
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
    from forebay.network.pki.revocation import revoke

    issuers = [directory for directory in args.directories if _is_issuer(directory)]
    nodes = [directory for directory in args.directories if directory not in issuers]
    if args.notify and not (issuers and nodes):
        raise UsageError("revoke: --notify needs the issuer's directory, to sign, and a node's, to connect as")
    crls = [revoke(directory, args.peer_id, *nodes) for directory in issuers]
    for directory in nodes:
        revoke(directory, args.peer_id)
    if nodes:
        print(f"{args.peer_id} is refused by {', '.join(map(str, nodes))}, from the next request on.")
    for crl in crls:
        assert crl is not None  # an issuer's directory signs
        print(f"{args.peer_id} is revoked by CRL {crl.number} of {crl.issuer}. Running nodes pass it on.")
        for target in args.notify:
            _notify(nodes[0], target, crl)
    if crls and not nodes:
        print("No node has it yet: name a running node's directory, or --notify HOST:PORT.", file=sys.stderr)
    return 0


def _notify(node_dir: Path, target: str, crl: Any) -> None:
    from forebay.network.client import Client
    from forebay.network.pki.identity import Identity
    from forebay.network.revocation_sync import send_crl

    with Client(Identity.load(node_dir)) as client, log_while_waiting(log, lambda: f"an answer of {target}"):
        peer_id, is_new = send_crl(client, target, crl)
    later = "has it already, or takes this organisation's next CRL within a minute"
    print(f"{peer_id} at {target} {'accepted it' if is_new else later}.")


def _network_show(args: argparse.Namespace) -> int:
    properties = _properties(args.directory)
    if not args.json:
        expires = properties["expires"]
        properties["expires"] = f"{_date(expires)} ({_remaining(expires)})"
        for key in ("roles", "datasets"):
            properties[key] = ", ".join(properties[key]) or "all"
        properties["revoked"] = ", ".join(properties["revoked"]) or "none"
        crls = properties.pop("crls").items()
        properties["CRLs"] = "; ".join(f"{crl['revoked']} revoked by {issuer}" for issuer, crl in crls) or "none"
        if not properties.get("organisation", "-"):
            properties["organisation"] = "none: signed by the root"
    show(properties, args.json)
    return 0


def _is_issuer(directory: Path) -> bool:
    return any((directory / name).exists() for name in ("root-key.pem", "org-key.pem"))


def _properties(directory: Path) -> dict[str, Any]:
    """Properties of the network, organisation or node in a directory."""
    from forebay.network.pki.files import peer_in, read_issuer, read_network, read_root
    from forebay.network.pki.identity import Identity
    from forebay.network.pki.revocation import Revocations

    properties: dict[str, Any]
    if _is_issuer(directory):
        issuer = read_issuer(directory)
        peer, scope, expires_at = peer_in(issuer.cert), issuer.scope, issuer.cert.not_valid_after_utc.timestamp()
        revocations = Revocations(directory, read_root(directory))
        properties = {"kind": "network" if issuer.is_root else "organisation", "name": peer.name}
        properties |= {"peer_id": peer.peer_id, "network": read_network(directory).network_id}
    else:
        node = Identity.load(directory)
        scope, expires_at, revocations = node.scope, node.expires_at, node.revocations
        properties = {"kind": "node", "name": node.name, "peer_id": node.peer_id, "network": node.network_id}
        properties["organisation"] = node.org
    if (fault := revocations.fault()) is not None:
        raise UsageError(f"revocation: {fault}")
    return {
        **properties,
        "roles": sorted(scope.roles),
        "datasets": list(scope.datasets or scope.within),
        "expires": round(expires_at),
        "revoked": sorted(revocations.own()),
        # A CRL has serial numbers, not peer ids.
        "crls": {i: {"number": crl.number, "revoked": len(crl.serials)} for i, crl in revocations.crls().items()},
    }


def _network_sign(args: argparse.Namespace) -> int:
    from forebay.dataset.reader import open_dataset
    from forebay.network.pki.identity import Identity
    from forebay.network.publications import SIGNATURE_NAME, sign_dataset

    dataset = open_dataset(args.dataset)
    signed = sign_dataset(
        Identity.load(args.network), dataset.path, dataset.name, origins=args.origin, **_days(args), serial=args.serial
    )
    if args.json:
        names = ("name", "dataset_id", "publisher", "serial", "expires_at", "origins")
        print(json.dumps({name: getattr(signed, name) for name in names}))
        return 0
    print(f"{signed.name} {signed.dataset_id} is signed by {signed.publisher} ({dataset.path / SIGNATURE_NAME}).")
    print(f"It is version {signed.serial}, until {_date(signed.expires_at)}.")
    print(f"Readers demand this signature by --publisher {signed.publisher}")
    return 0


def _remaining(until: float) -> str:
    days = (until - time.time()) / DAY_S
    return f"{days:,.0f} days left" if days >= 10 else f"{days:,.1f} days left" if days > 0 else "over"


def _scope(args: argparse.Namespace) -> Scope:
    """The requested scope; without roles it has all that its issuer may give."""
    return Scope(frozenset() if "all" in args.role else frozenset(args.role), tuple(args.dataset))


def _check_role(args: argparse.Namespace, what: str) -> None:
    if not args.role:
        raise UsageError(
            f"{what}: expected --role {', '.join(sorted(ROLES))} or all, got none. Give the least that the node needs: "
            "data to serve, scheduler to lease, worker to train; may be repeated."
        )


def _days(args: argparse.Namespace) -> dict[str, float]:
    return {"valid_days": args.days} if args.days else {}


def _describe(scope: Scope) -> str:
    roles = ", ".join(sorted(scope.roles)) or "worker, data, scheduler and admin"
    globs = scope.datasets or scope.within
    return f"{roles} for " + (f"datasets {', '.join(globs)}" if globs else "all datasets")


def _date(unix_s: float) -> str:
    return dt.datetime.fromtimestamp(unix_s, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _add_scope(p: argparse.ArgumentParser, role: str) -> None:
    p.add_argument("--role", action="append", default=[], choices=[*sorted(ROLES), "all"], help=role)
    p.add_argument("--dataset", action="append", default=[], metavar="GLOB", help="names it may access (default: all)")


def _add_days(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--days",
        type=days,
        help="validity of the certificate; fractions are allowed (default: by a token 7, renewed by the node itself; "
        "by hand 90; of an organisation 1825, of a root 3650)",
    )


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    network = group("network", "identities and membership")
    p = verb("init", _network_init, "create a network: its root key and certificate", network)
    p.add_argument("directory", type=Path, help="directory of its key and certificate")
    p.add_argument("--name", help="part of its datasets' URLs, forebay://NAME/DATASET (default: the directory's)")
    p.add_argument("--bootstrap", action="append", default=[], metavar="HOST:PORT", help="a DHT node to start from")
    p = verb("org", _network_org, "create an organisation, which admits its own nodes", network)
    p.add_argument("network", type=Path, help="the network's directory")
    p.add_argument("directory", type=Path, help="directory of the organisation's key and certificate")
    p.add_argument("--name", required=True, help="the organisation's")
    _add_scope(p, "a role that its nodes may have; may be repeated; default: all")
    _add_days(p)
    p = verb("join", _network_join, "admit a node: from an issuer's directory, or by a token from anywhere", network)
    p.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="NETWORK NODE; with a token only NODE")
    p.add_argument("--name", required=True, help="the node's")
    p.add_argument("--token-file", type=Path, metavar="FILE", help="output of `network invite`; - reads standard input")
    _add_scope(p, "a role of the node; may be repeated; required without a token")
    _add_days(p)
    p = verb("invite", _network_invite, "print a token with which machines may join for a while", network)
    p.add_argument("directory", type=Path, help="the network's or an organisation's")
    p.add_argument("--issuer", required=True, metavar="HOST:PORT", help="address of `network admit`")
    p.add_argument("--uses", type=positive, default=1, help="number of machines (1)")
    p.add_argument("--hours", type=positive, default=24, help="validity of the token (24)")
    _add_scope(p, "a role of the nodes that join; may be repeated; required")
    _add_days(p)
    description = "serve certificates for tokens; needs the issuer's key"
    p = verb("admit", _network_admit, description, network)
    add_server_options(p)
    p.add_argument("directory", type=Path, help="the network's or an organisation's")
    p.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="port 0: a free one")
    p.add_argument("--audit", type=Path, metavar="FILE", help="log of admissions and refusals")
    p = verb("renew", _network_renew, "issue a new certificate for a node's key; its peer id stays", network)
    p.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="ISSUER NODE; with --issuer only NODE")
    p.add_argument("--issuer", metavar="HOST:PORT", help="the issuer's admission server")
    _add_days(p)
    p = verb("revoke", _network_revoke, "refuse a peer or an organisation from now on, without a restart", network)
    p.add_argument("peer_id", help="of the node or organisation")
    p.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="the issuer's, to sign a CRL; nodes'")
    p.add_argument("--notify", action="append", default=[], metavar="HOST:PORT", help="a node to send the CRL to")
    description = "show a node's identity, scope, expiry and revocation lists"
    p = verb("show", _network_show, description, network)
    p.add_argument("directory", type=Path, help="a node's, an organisation's or the network's")
    p = verb("sign", _network_sign, "sign a dataset as its publisher", network)
    p.add_argument("dataset", help="a local dataset")
    p.add_argument("--network", type=Path, required=True, metavar="DIR", help="the publisher's node directory")
    p.add_argument(
        "--origin", action="append", default=[], metavar="URL",
        help="an https, s3, gs or az URL of a copy, without a query; may be repeated",
    )  # fmt: skip
    p.add_argument("--days", type=days, help="validity of the signature (default: 365)")
    p.add_argument("--serial", type=int, metavar="N", help="the version, greater than before (default: the unix time)")
