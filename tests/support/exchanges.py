"""A worker's side of the scheduler's exchange, as plain JSON."""

from typing import Any

from forebay.ledger.chain import Used, receipt_message
from forebay.network.client import Client
from forebay.network.pki.identity import Identity
from support.proofs import proof_by_hand


class ExchangeClient:
    """Sends exchanges to the scheduler at `address`, which may be changed."""

    def __init__(self, client: Client, address: str) -> None:
        self.client, self.identity, self.address = client, client.identity, address

    def exchange(self, *used: dict, **body: Any) -> dict:
        """Acknowledge the leases `used` to their ends; return the reply."""
        body = {"session": "5e", **body, **(self.receipt(*used) if used else {})}
        return dict(self.client.request_json(self.address, "POST", "/v2/exchange", body, timeout_s=30)[0])

    def receipt(self, *leases: dict, by: Identity | None = None, proof: str | None = None, **position: int) -> dict:
        """The fields of an exchange that acknowledge leases.

        Args:
            by: Who signs.
            proof: In place of the right ones.
            position: What differs from the whole of each lease, and from step 1.
        """
        keys = ("epoch", "slice", "start", "stop")
        positions = [{key: lease[key] for key in keys} | {"step": 1} | position for lease in leases]
        uses = [Used(lease["lease_id"], **fields) for lease, fields in zip(leases, positions)]
        proofs = [proof_by_hand(self.client, lease) if proof is None else proof for lease in leases]
        signature = (by or self.identity).sign(receipt_message(leases[0]["job_id"], uses)).hex()
        rows = [{**vars(use), "proof": shown} for use, shown in zip(uses, proofs)]
        return {"job_id": leases[0]["job_id"], "uses": rows, "signature": signature}
