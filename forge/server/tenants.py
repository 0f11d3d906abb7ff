"""Tenants: the owners of API keys, and what keeps them separate in the cache.

Owns the digests of the keys. Knows no route. A tenant's name is a digest of its key, since it is in
every request of a recording. Two tenants share no session and no cached block: a session's key has
the tenant in it, and so has the salt of every block.

    Authorization: Bearer KEY ──► 7c0f...  tenant ──► Request.tenant
    x-api-key: KEY            ──► the same, where there is no Authorization
    {"cache_salt": "a"}       ──► 7c0f...:a       ──► Request.cache_salt

Always true: a salt has one ":" at most, because that of a client has none. So the salts of two
tenants differ, and those of one tenant are equal where its clients' are.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b, sha256

TENANT_BYTES = 8
"""Bytes of the digest that names a tenant."""


def tenant_name(api_key: str) -> str:
    """Return the name of the key's owner: 16 hexadecimal digits, from which no key can be read."""
    digest = blake2b(api_key.encode(), digest_size=TENANT_BYTES, person=b"forge-tenant")
    return digest.hexdigest()


def tenant_salt(tenant: str, cache_salt: str) -> str:
    """Return the salt of a tenant's blocks; the client's own one where there are no tenants."""
    return f"{tenant}:{cache_salt}" if tenant else cache_salt


class Tenants:
    """The API keys of a server. Without keys every request is of the tenant "".

    count   number of keys, at least 1
    """

    def __init__(self, api_keys: tuple[str, ...]) -> None:
        self._by_digest = [
            (sha256(api_key.encode()).digest(), tenant_name(api_key)) for api_key in api_keys
        ]
        self.count = max(1, len(self._by_digest))

    def of_request(self, authorization: bytes | None) -> str | None:
        """Return the tenant of a request with this header; None: it has no valid key."""
        if authorization is None or authorization[:7].lower() != b"bearer ":  # schemes ignore case
            return self.of_key(None)
        return self.of_key(authorization[7:])

    def of_key(self, api_key: bytes | None) -> str | None:
        """Return the tenant of a key; None: it is not valid."""
        if not self._by_digest:
            return ""
        if api_key is None:
            return None
        # Digests have one length, so the time taken does not reveal a key's length. Every key is
        # compared, so it does not reveal either which key was sent.
        digest = sha256(api_key).digest()
        tenants = [
            tenant
            for key_digest, tenant in self._by_digest
            if secrets.compare_digest(digest, key_digest)
        ]
        return tenants[0] if tenants else None
