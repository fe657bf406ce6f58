"""A job's keys and certificates, all derived from the operator's root key and the job's UID.

Theory of operation. A Secret is written once and never read, so what is in it must come out the same when it has to be
made again, or at least fit: the control key, the join token and the private keys (P-256) are HMAC-SHA256 of the root
key over a purpose and the UID. The authority's certificate has the same name and key each time, so a leaf of an earlier
making is trusted by whoever has the authority of a later one; serials are random. Whoever holds a job's Secrets learns
nothing of the root key or of other jobs.

The syncer's certificate is good for a server only, a learner's for a client only.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from diloco_operator.model import Object, SecretWanted
from diloco_protocol.security import identity
from diloco_protocol.security.certificates import authority_of, common_name, leaf_of

YEARS = 10
MIN_ROOT_BYTES = 32
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256 (FIPS 186-4, D.1.2.3)


class RootKey:
    """The operator's root key; shows itself to nobody."""

    def __init__(self, key: bytes) -> None:
        """Raises ValueError if it is too short to be one."""
        if len(key) < MIN_ROOT_BYTES:
            raise ValueError(f"the root key must have at least {MIN_ROOT_BYTES} bytes")
        self._key = key

    def __repr__(self) -> str:
        return "RootKey(…)"

    def derive(self, purpose: str, uid: str) -> bytes:
        """32 bytes for one purpose of one job."""
        return hmac.new(self._key, f"{purpose}:{uid}".encode(), hashlib.sha256).digest()

    def control_key(self, uid: str) -> bytes:
        """As it stands in the syncer's file: 64 hexadecimal digits."""
        return self.derive("control", uid).hex().encode()

    def join_token(self, uid: str) -> str:
        """64 hexadecimal digits."""
        return self.derive("join", uid).hex()

    def private_key(self, role: str, uid: str) -> ec.EllipticCurvePrivateKey:
        """Of the ``authority``, ``syncer`` or ``learner``."""
        scalar = int.from_bytes(self.derive(f"{role}-key", uid), "big") % (_ORDER - 1) + 1
        return ec.derive_private_key(scalar, ec.SECP256R1())


def manifest(wanted: SecretWanted, root: RootKey) -> Object:
    """The whole Secret."""
    meta = wanted.manifest_head["metadata"]
    uid = str(meta["ownerReferences"][0]["uid"])
    job = str(meta["ownerReferences"][0]["name"])
    data = {"join-token": root.join_token(uid).encode()}
    if wanted.control_key:
        data["control-key"] = root.control_key(uid)
    if wanted.tls:
        data |= certificates(root, meta["namespace"], job, uid, role=wanted.role)
    encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
    return {**wanted.manifest_head, "type": "Opaque", "data": encoded}


def certificates(root: RootKey, namespace: str, job: str, uid: str, role: identity.Role) -> dict[str, bytes]:
    """``tls.crt``, ``tls.key`` and ``ca.crt`` in PEM."""
    now = datetime.datetime.now(datetime.UTC)
    validity = now, now + datetime.timedelta(days=YEARS * 365 + 2)
    authority, key = root.private_key("authority", uid), root.private_key(role, uid)
    who, issuer = identity.name(namespace, job, role), f"diloco-{uid}"
    more = [f"{job}-syncer.{namespace}.svc.cluster.local"] if role == "syncer" else []
    leaf = leaf_of(key, f"{role}-{uid}", [who], more, common_name(issuer), authority, *validity)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {
        "tls.crt": leaf.public_bytes(pem),
        "tls.key": private,
        "ca.crt": authority_of(authority, issuer, *validity).public_bytes(pem),
    }
