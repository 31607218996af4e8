"""Fetches an adapter because a request names its source in `model`: `hf://org/name@REVISION`.

That is off by default. A tenant's `fetches_per_minute`, else the server's `--fetches-per-minute`, turns it
on.
The source must be on the operator's list, and the adapter is checked and counted as an upload is.
"""

import anyio

from personae.api.adapters.registration import FetchAdapter, register_source
from personae.api.adapters.sources.url import allowed_prefix, parse_source, requested_name
from personae.api.exchange import Exchange
from personae.errors import DeadlineExceeded, PersonaeError, RequestError


async def fetch_requested(exchange: Exchange, named: str) -> None:
    """Have the adapter of the source `named` in the registry, under `requested_name`. Does nothing if it is
    there, or the tenant's requests may fetch none. Requests for one source share one fetch.

    Raises what an upload and a fetch raise, with the field `model`, and RateLimited.
    """
    registry, who = exchange.services.registry, exchange.caller.identity
    most = who.limits.fetches_per_minute
    most = exchange.settings.fetches_per_minute if most is None else most
    if registry is None or not most:
        return
    try:
        source = parse_source(named)
        name = requested_name(source)
        if registry.find(who.tenant, name) is not None:
            return
        allowed_prefix(source, exchange.settings.adapter_source)
        with anyio.fail_after(max(exchange.deadline(None) - anyio.current_time(), 0)):
            async with registry.one_at_a_time(who.tenant, name):
                if registry.find(who.tenant, name) is None:
                    exchange.services.meter.fetch(who, most)
                    await register_source(exchange, registry, who, FetchAdapter(source=named, name=name))
    except TimeoutError:
        raise DeadlineExceeded("The request's time was over before its adapter was fetched.") from None
    except PersonaeError as error:
        if isinstance(error, RequestError) or error.param is not None:
            error.param = "model"
            error.message = error.message.replace("`source`", "`model`")
        raise
