"""Which context answers a request: that of the base which it names, with the adapter that it names."""

from personae.api.context import RequestContext


async def answering(context: RequestContext, name: str | None) -> RequestContext:
    """The context of the base that answers requests for the model `name`; None: for the default. Waits until
    that base's engine has started for the first time. A source is fetched, if the tenant may do that.
    Raises Overloaded, and what `fetch_requested` does."""
    if name is not None and "://" in name:
        from personae.api.adapters.on_request import fetch_requested  # it admits a chat, to check defaults

        await fetch_requested(context, name)
    bases = context.base_models
    if bases is None:
        return context
    named = name if name is not None else context.settings.default_model
    base = bases.first if named is None else bases.base_of(context.caller.tenant, named)
    return await bases.context_of(context, base)
