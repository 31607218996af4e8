"""`/metrics` of tenants: some of them have series of their own, the others share one."""

from prometheus_client import CollectorRegistry, Counter, Histogram

OTHER = "other"
"""The label of all tenants without series of their own."""


class TenantMetrics:
    """Counts by tenant. The first `most` tenants that send requests have a label each, until the server
    ends."""

    def __init__(self, registry: CollectorRegistry, most: int, first_token: tuple[float, ...]) -> None:
        self._most = most
        self._names: set[str] = set()
        self._requests = _counter(registry, "requests", "Requests that ended.")
        self._refused = _counter(registry, "rate_limited", "Requests that a limit of the tenant's refused.")
        self._prompt = _counter(registry, "prompt_tokens", "Prompt tokens of requests that ended.")
        self._cached = _counter(registry, "cached_tokens", "Those of them that were in the prefix cache.")
        self._completion = _counter(registry, "generation_tokens", "Tokens of answers that ended.")
        self._first_token = Histogram(
            "personae:tenant_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            ("tenant",),
            buckets=first_token,
            registry=registry,
        )

    def ended(self, tenant: str, *, prompt: int, cached: int, completion: int) -> None:
        """A request has ended, complete or not."""
        label = self._label(tenant)
        self._requests.labels(label).inc()
        self._prompt.labels(label).inc(prompt)
        self._cached.labels(label).inc(cached)
        self._completion.labels(label).inc(completion)

    def first_token(self, tenant: str, seconds: float) -> None:
        """A sequence has its first token."""
        self._first_token.labels(self._label(tenant)).observe(seconds)

    def refused(self, tenant: str) -> None:
        """A limit has refused a request."""
        self._refused.labels(self._label(tenant)).inc()

    def _label(self, tenant: str) -> str:
        if tenant not in self._names and len(self._names) < self._most:
            self._names.add(tenant)
        return tenant if tenant in self._names else OTHER


def _counter(registry: CollectorRegistry, name: str, text: str) -> Counter:
    return Counter(f"personae:tenant_{name}", text, ("tenant",), registry=registry)
