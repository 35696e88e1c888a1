"""Commands `forebay network`: keys, certificates, admission, revocation and signatures of a network."""

import contextlib
import datetime as dt
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forebay.base import Json
from forebay.cli.arguments import address, days, file, folder, positive, print_result, show
from forebay.cli.parser import Parser
from forebay.cli.running import load_identity, log, ready, stop_event, until_stopped
from forebay.errors import UsageError
from forebay.network.peer import ROLES, Scope
from forebay.storage.retry import log_while_waiting
from forebay.units import numbered

TOKEN_VALID_DAYS = 7.0
_ISSUER = "the network's or an organisation's"


def _network_init(args: Namespace) -> None:
    from forebay.network.pki.files import create_network

    name = args.name or args.directory.absolute().name
    create_network(args.directory, name, bootstrap=[address(a) for a in args.bootstrap])
    print_result(
        args, {"network": name, "directory": str(args.directory)},
        f"network {name!r} in {args.directory}. Keep root-key.pem secret: it admits nodes.",
        f"Its datasets have the URLs forebay://{name}/DATASET.",
        *([] if args.bootstrap else ["It names no DHT node: start one (forebay dht), and give each node --bootstrap."]),
        f"next: forebay network join {args.directory} NODE_DIRECTORY --name NODE --role worker   # or data, scheduler",
    )  # fmt: skip


def _network_org(args: Namespace) -> None:
    from forebay.network.pki.identity import create_organisation

    scope = _scope(args)
    peer_id = create_organisation(args.network, args.directory, args.name, scope)
    print_result(
        args, {"name": args.name, "peer_id": peer_id, "directory": str(args.directory)},
        f"organisation {args.name!r} is {peer_id}: the scope of its nodes is {scope}.",
        f"Give {args.directory} to its owner, and keep no copy: org-key.pem admits nodes in its name.",
        f"next: forebay network join {args.directory} NODE_DIRECTORY --name NODE --role worker",
    )  # fmt: skip


def _network_join(args: Namespace) -> None:
    from forebay.network.join import join_by_token
    from forebay.network.pki.identity import join

    if args.token is not None:
        if len(args.directories) != 1 or args.role or args.dataset or args.days:
            raise UsageError(
                "join: with --token expected one directory, and none of --role, --dataset and --days, which the token "
                "says, got more. Write: forebay network join --token FILE NODE_DIRECTORY --name NODE"
            )
        try:
            text = sys.stdin.readline() if str(args.token) == "-" else args.token.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"join: cannot read the token: {getattr(error, 'strerror', 'not UTF-8')}. Give --token the file "
                "that has it."
            ) from None
        identity = join_by_token(text.strip(), args.directories[0], args.name)
    else:
        if len(args.directories) != 2:
            raise UsageError("join: expected the directories of network and node, or --token FILE and that of the node")
        _check_role(args, "join")
        identity = join(args.directories[0], args.directories[1], args.name, scope=_scope(args), **_days(args))
    print_result(
        args, _node_fields(identity),
        f"{identity.name} is peer {identity.peer_id}. Use this node by --identity {args.directories[-1]}.",
        f"Role: {identity.scope}, until {_date(identity.expires_at)}.",
    )  # fmt: skip


def _node_fields(identity: Any) -> Json:
    return {"name": identity.name, "peer_id": identity.peer_id, "expires": round(identity.expires_at)}


def _network_invite(args: Namespace) -> None:
    import secrets

    from forebay.network.join import sign_token
    from forebay.network.pki.files import read_issuer, read_network
    from forebay.network.pki.record import JoinToken, MemberRecord

    address(args.issuer)
    _check_role(args, "invite")
    issuer = read_issuer(args.directory)
    scope = _scope(args).bounded_by(issuer.scope)
    token = JoinToken(
        secrets.token_hex(16), read_network(args.directory).network_id, issuer.peer_id, args.issuer,
        tuple(sorted(scope.roles)), scope.datasets or scope.within, args.uses, round(time.time() + args.hours * 3600),
        args.days or TOKEN_VALID_DAYS,
    )  # fmt: skip
    text = sign_token(issuer, token)
    MemberRecord(args.directory).add(token=token)
    print_result(args, {"token": text, "id": token.id, "expires": token.expires_at}, text)
    print(
        f"token {token.id[:8]}: {numbered(token.uses, 'node')} may join, of scope {scope}, "
        f"until {_date(token.expires_at)}. Send it like a password.\n"
        f"next, here: forebay network admit {args.directory} --listen {args.issuer}\n"
        f"next, there: forebay network join --token FILE NODE_DIRECTORY --name NODE",
        file=sys.stderr,
    )


def _network_admit(args: Namespace) -> None:
    from forebay.network.admission import Admissions, AdmissionServer, sending_crls
    from forebay.network.audit import open_audit_log
    from forebay.network.dht import LibtorrentDht
    from forebay.network.pki.files import read_network

    admissions, bootstrap = Admissions(args.directory, open_audit_log()), read_network(args.directory).bootstrap
    with (
        contextlib.closing(AdmissionServer(admissions, *address(args.listen)).start()) as server,
        contextlib.closing(LibtorrentDht("" if bootstrap else "127.0.0.1", 0, bootstrap)) as discovery,
        sending_crls(args.directory, discovery),
    ):
        ready(args, role="admission", address=server.address, issuer=admissions.issuer.peer_id)
        until_stopped(stop_event())


def _network_renew(args: Namespace) -> None:
    from forebay.network.join import BUSY_S, renew_at
    from forebay.network.pki.identity import renew, renew_organisation

    if len(args.directories) != (2 if args.issuer is None else 1):
        raise UsageError("renew: expected the directories of the issuer and of the node, or --issuer HOST:PORT and one")
    if args.issuer is not None:
        identity = renew_at(args.issuer, args.directories[0], until=time.time() + BUSY_S)
    elif (args.directories[1] / "org-key.pem").exists():
        peer_id = renew_organisation(args.directories[0], args.directories[1], **_days(args))
        text = f"organisation {peer_id} has a new certificate. Renew its nodes', too: theirs carry the old one."
        print_result(args, {"peer_id": peer_id}, text)
        return
    else:
        identity = renew(args.directories[0], args.directories[1], **_days(args))
    text = (
        f"{identity.name} has a new certificate until {_date(identity.expires_at)}; it stays peer {identity.peer_id}."
    )
    print_result(args, _node_fields(identity), text)


def _network_members(args: Namespace) -> None:
    rows = _member_rows(args.directory)
    lines = [
        f"{row['name']}  {row['peer_id']}  {row['state']} ({_date(row['revoked_at'] or row['expires_at'])})  "
        f"{'organisation: ' if row['is_organisation'] else ''}{Scope(frozenset(row['roles']), row['datasets'])}"
        for row in rows
    ]
    print_result(args, rows, *lines)


def _member_rows(directory: Path) -> list[Json]:
    """The last certificate of each member of an issuer, and its state; by name."""
    from forebay.network.pki.record import MemberRecord
    from forebay.network.pki.revocation import Revocations

    record, revocations = MemberRecord(directory), Revocations(directory)
    revocations.check()
    times = {serial: moment for crl in revocations.crls().values() for serial, moment in crl.serials.items()}
    rows = []
    for issued in sorted(record.certificates.values(), key=lambda issued: (issued.name, issued.expires_at)):
        revoked_at = times.get(int(issued.serial, 16))
        state = "revoked" if revoked_at else "valid" if time.time() < issued.expires_at else "expired"
        rows.append({**asdict(issued), "state": state, "revoked_at": revoked_at and revoked_at.timestamp()})
    return rows


def _find_member(text: str, issuers: list[Path]) -> str:
    """The peer id of the member of an issuer with this name or serial number; else the text, which may be one."""
    from forebay.network.pki.revocation import PEER_ID

    if PEER_ID.fullmatch(text):  # a node chooses its name, which may be the peer id of another
        return text
    rows = [row for directory in issuers for row in _member_rows(directory)]
    matches = [row for row in rows if text in (row["name"], row["serial"])]
    matches = [row for row in matches if row["state"] != "revoked"] or matches[-1:]
    if len(matches) > 1:
        ids = ", ".join(f"{row['peer_id']} until {_date(row['expires_at'])}" for row in matches)
        raise UsageError(f"revoke: expected one member, got {text!r}, which {ids} have. Choose one of the peer ids.")
    return matches[0]["peer_id"] if matches else text


def _network_tokens(args: Namespace) -> None:
    from forebay.network.pki.record import MemberRecord

    record, rows, lines = MemberRecord(args.directory), list[Json](), list[str]()
    for token in record.tokens.values():
        remaining = token.uses - len(record.users[token.id])
        state = "expired" if time.time() >= token.expires_at else "valid" if remaining > 0 else "used up"
        state = "withdrawn" if token.id in record.withdrawn else state
        rows.append({**asdict(token), "uses_left": remaining, "state": state})
        until = f"{_date(token.expires_at)}, {remaining} of {numbered(token.uses, 'use')} left"
        lines.append(f"{token.id}  {state} ({until})  {token.scope}")
    print_result(args, rows, *lines)


def _network_withdraw(args: Namespace) -> None:
    from forebay.network.pki.record import MemberRecord

    record = MemberRecord(args.directory)
    if args.token_id not in record.tokens:
        raise UsageError(
            f"withdraw: expected the id of a token, got {args.token_id!r} ({record.path}). "
            f"See `forebay network tokens {args.directory}`."
        )
    record.add(withdrawn=args.token_id)
    print_result(args, {"id": args.token_id}, f"token {args.token_id} is withdrawn: it admits no more nodes.")


def _network_revoke(args: Namespace) -> None:
    from forebay.network.pki.files import is_issuer
    from forebay.network.pki.revocation import revoke

    issuers = list(filter(is_issuer, args.directories))
    nodes = [directory for directory in args.directories if directory not in issuers]
    if args.notify and not (issuers and nodes):
        raise UsageError(
            "revoke: --notify expected the issuer's directory, to sign, and a node's, to connect as, got one of them. "
            "Write: forebay network revoke MEMBER ISSUER NODE --notify HOST:PORT"
        )
    peer_id = _find_member(args.member, issuers)
    crls = [revoke(directory, peer_id, *nodes) for directory in issuers]
    for directory in nodes:
        revoke(directory, peer_id)
    lines = (
        [f"From now on the nodes of these directories refuse {peer_id}: {', '.join(map(str, nodes))}."] if nodes else []
    )
    for crl in crls:
        assert crl is not None  # an issuer's directory signs
        lines.append(f"{peer_id} is revoked by CRL {crl.number} of {crl.issuer}.")
        lines += [_notify(nodes[0], target, crl) for target in args.notify]
    issued = [{"issuer": crl.issuer, "number": crl.number} for crl in crls if crl is not None]
    print_result(args, {"peer_id": peer_id, "crls": issued}, *lines)
    if crls and not nodes:
        print(
            f"No node has the CRL yet: `forebay network admit {issuers[0]}` sends it to them while it runs. "
            f"Without it: forebay network revoke {peer_id} {issuers[0]} NODE --notify HOST:PORT",
            file=sys.stderr,
        )


def _notify(node_dir: Path, target: str, crl: Any) -> str:
    from forebay.network.client import Client
    from forebay.network.crl_exchange import send_crl
    from forebay.network.pki.identity import Identity

    with Client(Identity.load(node_dir)) as client, log_while_waiting(log, lambda: f"an answer of {target}"):
        peer_id, is_new = send_crl(client, target, crl)
    return f"{peer_id} at {target} {'accepted it' if is_new else 'has it, or takes the next one within a minute'}."


def _network_show(args: Namespace) -> None:
    """Show the properties of the network, organisation or node in a directory."""
    from forebay.network.pki.files import is_issuer, peer_in, read_issuer, read_network
    from forebay.network.pki.identity import Identity
    from forebay.network.pki.revocation import Revocations

    revocations = Revocations(args.directory)
    if is_issuer(args.directory):
        issuer = read_issuer(args.directory)
        peer, kind = peer_in(issuer.cert), "network" if issuer.is_root else "organisation"
        expires_at = issuer.cert.not_valid_after_utc.timestamp()
    else:
        peer, kind = Identity.load(args.directory).as_peer, "node"
        expires_at = peer.valid_until
    revocations.check()
    # A CRL has serial numbers, not peer ids.
    crls = {i: {"number": crl.number, "revoked": len(crl.serials)} for i, crl in revocations.crls().items()}
    fields: Json = {
        "kind": kind,
        "name": peer.name,
        "peer_id": peer.peer_id,
        "network": read_network(args.directory).network_id,
        "organisation": peer.org,
        "roles": sorted(peer.scope.roles),
        "datasets": list(peer.scope.datasets or peer.scope.within),
        "expires": round(expires_at),
        "revoked": sorted(revocations.own()),
        "crls": crls,
    }
    if not args.json:
        fields["crls"] = [f"{crl['revoked']} revoked by {issuer}" for issuer, crl in crls.items()]
        fields["expires"] = _date(expires_at)
        fields |= {name: fields[name] or ["all"] for name in ("roles", "datasets")}
    show(args, fields)


def _network_sign(args: Namespace) -> None:
    from forebay.dataset.reader import open_dataset
    from forebay.network.publications import SIGNATURE_NAME, sign_dataset

    dataset = open_dataset(args.dataset)
    identity, name = load_identity(args), dataset.name
    signed = sign_dataset(identity, dataset.path, name, dataset.id, origins=args.origin)
    names = ("name", "dataset_id", "publisher", "serial", "expires_at", "origins")
    print_result(
        args, {name: getattr(signed, name) for name in names},
        f"{signed.name} {signed.dataset_id} is signed by {signed.publisher} ({dataset.path / SIGNATURE_NAME}).",
        f"It is version {signed.serial}, until {_date(signed.expires_at)}.",
        f"Readers demand this signature by ?publisher={signed.publisher} behind its URL",
    )  # fmt: skip


def _scope(args: Namespace) -> Scope:
    """The requested scope; without roles it has all that its issuer may give."""
    return Scope(frozenset() if "all" in args.role else frozenset(args.role), tuple(args.dataset))


def _check_role(args: Namespace, what: str) -> None:
    if not args.role:
        raise UsageError(
            f"{what}: expected --role {', '.join(sorted(ROLES))} or all, got none. Give the least that the node needs: "
            "data to serve, scheduler to lease, worker to train; may be repeated."
        )


def _days(args: Namespace) -> Json:
    return {"valid_days": args.days} if args.days else {}


def _date(unix_s: float) -> str:
    return dt.datetime.fromtimestamp(unix_s, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _add_scope(p: Parser, role: str) -> None:
    p.add_list("--role", role, [*sorted(ROLES), "all"])
    p.add_list("--dataset", "names it may access (default: all)", "GLOB")


def _add_days(p: Parser, default: str) -> None:
    p.add("--days", f"days of validity, also fractions (default: {default})", days)


def add_verbs(verb: Any, group: Any) -> None:
    network = group("network", "identities and membership")
    p = verb("init", _network_init, "create a network: its root key and certificate", network)
    p.add("directory", "directory of its key and certificate", Path)
    p.add("--name", "part of its datasets' URLs, forebay://NAME/DATASET (default: the directory's)")
    p.add_list("--bootstrap", "DHT node that members join through; may be repeated (default: none)", "HOST:PORT")
    p = verb("org", _network_org, "create an organisation, which admits its own nodes", network)
    p.add("network", "the network's directory", Path)
    p.add("directory", "directory of the organisation's key and certificate", Path)
    p.add("--name", "name of the organisation (required)", required=True)
    _add_scope(p, "role that its nodes may have; may be repeated (default: all)")
    p = verb("join", _network_join, "admit a node: from an issuer's directory, or by a token from anywhere", network)
    p.add("directories", "NETWORK NODE; with a token only NODE", folder, nargs="+")
    p.add("--name", "name of the node (required)", required=True)
    p.add("--token", "output of network invite; - reads stdin (default: none)", file)
    _add_scope(p, "role of the node; may be repeated (required without a token)")
    _add_days(p, "90; by a token 7, renewed by the node itself")
    p = verb("invite", _network_invite, "print a token with which machines may join for a while", network)
    p.add("directory", _ISSUER, Path)
    p.add("--issuer", "address of network admit (required)", "HOST:PORT", required=True)
    p.add("--uses", "number of machines that may join", positive, 1)
    p.add("--hours", "hours of validity of the token", positive, 24)
    _add_scope(p, "role of the nodes that join; may be repeated (required)")
    _add_days(p, "7, renewed by the node itself")
    p = verb(
        "admit", _network_admit, "serve certificates for tokens; needs the issuer's key", network, log_level="info"
    )
    p.add("directory", _ISSUER, Path)
    p.add("--listen", "address; port 0: a free one", "HOST:PORT", "127.0.0.1:0")
    p = verb("renew", _network_renew, "issue a new certificate for a node's key; its peer id stays", network)
    p.add("directories", "ISSUER NODE; with --issuer only NODE", folder, nargs="+")
    p.add("--issuer", "the issuer's admission server (default: its directory)", "HOST:PORT")
    _add_days(p, "90; of an organisation 1825")
    p = verb("revoke", _network_revoke, "refuse a peer or an organisation from now on, without a restart", network)
    p.usage = "forebay network revoke MEMBER ISSUER [NODE ...] [OPTIONS]"
    p.epilog = "example: forebay network revoke worker-7 net scheduler --notify 10.0.0.2:7420"
    p.add("member", "name or peer id of the node or organisation; where only nodes' directories follow, a peer id")
    p.add("directories", "the issuer's, to sign a CRL; nodes', which pass it on while they run", folder, nargs="+")
    p.add_list("--notify", "node to send the CRL to, as the first NODE (default: none)", "HOST:PORT")
    p = verb("members", _network_members, "list the nodes and organisations that an issuer certified", network)
    p.add("directory", _ISSUER, Path)
    p = verb("tokens", _network_tokens, "list the tokens that an issuer gave", network)
    p.add("directory", _ISSUER, Path)
    p = verb("withdraw", _network_withdraw, "withdraw a token: it admits no more nodes", network)
    p.add("directory", _ISSUER, Path)
    p.add("token_id", "id of the token, as `network tokens` prints it", "TOKEN_ID")
    p = verb("show", _network_show, "show a node's identity, scope, expiry and revocation lists", network)
    p.add("directory", "a node's, an organisation's or the network's", Path)
    p = verb("sign", _network_sign, "sign a dataset as its publisher", network)
    p.add("dataset", "a local dataset")
    p.add_list("--origin", "https, s3, gs or az URL of a copy; may be repeated (default: none)", "URL")
