"""The header that reports the load to load balancers with each answer: ORCA, Open Request Cost Aggregation.

A request asks for it with `endpoint-load-metrics-format: TEXT` or `JSON`, as in vLLM. The answer has
`endpoint-load-metrics`, with the load at the moment when it begins.

https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto
"""

import msgspec

from personae.actors.client import EngineStats

FORMAT_HEADER, LOAD_HEADER = b"endpoint-load-metrics-format", b"endpoint-load-metrics"


def load_header(wanted: bytes, stats: EngineStats) -> bytes | None:
    """The header's value in the requested format. None if the format is unknown."""
    named = {
        "kv_cache_usage_perc": round(stats.pages_used / max(stats.pages_total, 1), 4),
        "num_requests_waiting": stats.waiting,
        "num_requests_running": stats.running,
    }
    match wanted.strip().upper():
        case b"TEXT":
            return b"TEXT " + ", ".join(f"named_metrics.{name}={n}" for name, n in named.items()).encode()
        case b"JSON":
            return b"JSON " + msgspec.json.encode({"named_metrics": named})
    return None
