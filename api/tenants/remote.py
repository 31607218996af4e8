"""Tenants, keys and usage of a running server, by its HTTP routes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from personae.api.commands.remote import checked, refusal, unreachable
from personae.api.tenants.store import ApiKey, Role, Tenant, TenantLimits
from personae.api.tenants.usage import Column, UsageRow
from personae.errors import Conflict, Overloaded, StorageFailed

if TYPE_CHECKING:
    import httpx


class RemoteRecords:
    """What `TenantStore` and `UsageLedger` do for commands, asked of a server. Every method raises
    RequestError with the server's reason, StorageFailed if the server failed, and Overloaded if no answer
    comes."""

    def __init__(self, client: "httpx.Client") -> None:
        self._client = client

    def create_tenant(self, name: str, limits: TenantLimits) -> None:
        """As TenantStore's."""
        self._ask("POST", "/v1/tenants", {"name": name, "limits": msgspec.to_builtins(limits)})

    def change_limits(self, name: str, limits: TenantLimits) -> None:
        """As TenantStore's."""
        self._ask("PATCH", _tenant(name), {"limits": msgspec.to_builtins(limits)})

    def list_tenants(self) -> list[Tenant]:
        """As TenantStore's."""
        return msgspec.convert(self._ask("GET", "/v1/tenants")["data"], list[Tenant])

    def revoke_tenant(self, name: str) -> None:
        """As TenantStore's."""
        self._ask("DELETE", _tenant(name))

    def free_tenant(self, name: str) -> None:
        """As TenantStore's: the route would revoke the tenant, too, so it must have been revoked before."""
        if self._ask("GET", _tenant(name))["revoked"] is None:
            raise Conflict(f"The tenant {name!r} has not been revoked.", param="name")
        self._ask("DELETE", _tenant(name), params={"free": "true"})

    def create_key(self, tenant: str, role: Role, *, label: str = "", expires: int | None = None) -> str:
        """As TenantStore's, but a server's first key must be an admin's."""
        body = {"tenant": tenant, "role": role, "label": label, "expires": expires}
        return str(self._ask("POST", "/v1/keys", body)["secret"])

    def list_keys(self, tenant: str | None = None) -> list[ApiKey]:
        """As TenantStore's."""
        params = {} if tenant is None else {"tenant": tenant}
        return msgspec.convert(self._ask("GET", "/v1/keys", params=params)["data"], list[ApiKey])

    def change_key(self, id: str, changes: Mapping[str, Any]) -> None:
        """As TenantStore's."""
        self._ask("PATCH", _key(id), dict(changes))

    def rotate_key(self, id: str, overlap: int = 0) -> str:
        """As TenantStore's."""
        return str(self._ask("POST", f"{_key(id)}/rotate", {"overlap": overlap})["secret"])

    def revoke_key(self, id: str) -> None:
        """As TenantStore's."""
        self._ask("DELETE", _key(id))

    def rows(
        self,
        group_by: Sequence[Column],
        *,
        tenant: str | None = None,
        begin: int | None = None,
        end: int | None = None,
    ) -> tuple[list[UsageRow], bool]:
        """As UsageLedger's."""
        asked = {"group_by": ",".join(group_by), "tenant": tenant, "from": begin, "to": end}
        params = {name: str(value) for name, value in asked.items() if value is not None}
        found = self._ask("GET", "/v1/usage", params=params)
        return msgspec.convert(found["data"], list[UsageRow]), bool(found["truncated"])

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, params: Mapping[str, str] = {}
    ) -> dict[str, Any]:
        import httpx

        try:
            response = self._client.request(method, path, json=body, params=params)
        except httpx.HTTPError as error:
            raise Overloaded(unreachable(str(self._client.base_url), error)) from None
        if response.is_server_error:
            raise StorageFailed(refusal(response))
        answer: dict[str, Any] = checked(response).json()
        return answer


def _tenant(name: str) -> str:
    return f"/v1/tenants/{quote(name, safe='')}"


def _key(id: str) -> str:
    return f"/v1/keys/{quote(id, safe='')}"
