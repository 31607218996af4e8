"""`/v1/eval_reports`: start evaluations, watch them, and read and compare their results; for admins."""

from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from personae.api.body import read_json
from personae.api.eval_reports.reader import Comparison, EvalReports, Report, ReportInfo
from personae.api.eval_reports.runner import EvalRunner, StartEval
from personae.api.exchange import Exchange, exchange_of
from personae.api.http.operation import Content, operation
from personae.api.respond import json_response
from personae.api.tenants.access import key_of
from personae.errors import NotFound, RequestError


class ReportList(msgspec.Struct, frozen=True):
    """The runs, the newest first."""

    data: list[ReportInfo]
    object: str = "list"


@operation("POST", "/v1/eval_reports", body=StartEval, answers={201: Report}, refuses=(404, 409), admin=True)
async def start_eval(request: Request) -> Response:
    """Start `personae eval run` against this server, with the caller's own key. It is answered when the first
    case is about to be played."""
    exchange = exchange_of(request)
    runner = _runner(exchange)
    asked = await read_json(request, StartEval, exchange)
    if exchange.settings.ssl_certfile is not None:
        raise RequestError("A server with TLS starts no evaluations: run `personae eval` with its --url.")
    host, port = request.scope["server"]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{exchange.settings.root_path}"
    id = await runner.start(asked, url, key_of(request.headers))
    return json_response(await _shown(exchange, id), 201)


@operation("POST", "/v1/eval_reports/{id}/cancel", answers={200: Report}, refuses=(404,), admin=True)
async def cancel_eval(request: Request) -> Response:
    """Stop an evaluation that runs. What it has played is kept."""
    exchange, id = exchange_of(request), request.path_params["id"]
    await _runner(exchange).cancel(id)
    return json_response(await _shown(exchange, id))


@operation("GET", "/v1/eval_reports", answers={200: ReportList}, refuses=(404,), admin=True)
async def list_eval_reports(request: Request) -> Response:
    """List the runs of `personae eval` in the folder of --eval-reports."""
    exchange = exchange_of(request)
    found = await exchange.off_loop(_reports(exchange).list)
    running = _runner(exchange).running_id
    return json_response(
        ReportList([msgspec.structs.replace(info, running=info.id == running) for info in found])
    )


@operation("GET", "/v1/eval_reports/{id}", answers={200: Report}, refuses=(404,), admin=True)
async def get_eval_report(request: Request) -> Response:
    """Show how far a run is, its tables, and cases that failed."""
    return json_response(await _shown(exchange_of(request), request.path_params["id"]))


async def _shown(exchange: Exchange, id: str) -> Report:
    reports = _reports(exchange)
    report = await exchange.off_loop(lambda: reports.get(id))
    return msgspec.structs.replace(report, running=_runner(exchange).running_id == id)


@operation(
    "GET", "/v1/eval_reports/{id}/against/{other}", answers={200: Comparison}, refuses=(404,), admin=True
)
async def compare_eval_reports(request: Request) -> Response:
    """Compare a run with another, on the cases that both have judged."""
    exchange = exchange_of(request)
    reports, id, other = _reports(exchange), request.path_params["id"], request.path_params["other"]
    return json_response(await exchange.off_loop(lambda: reports.compare(id, other)))


@operation(
    "GET",
    "/v1/eval_reports/{id}/page",
    answers={200: Content("application/octet-stream")},
    refuses=(404,),
    admin=True,
)
async def get_eval_page(request: Request) -> Response:
    """Send the page that `personae eval` made of a run, as a file to keep: it is no page of this server."""
    exchange = exchange_of(request)
    reports, id = _reports(exchange), request.path_params["id"]
    path = await exchange.off_loop(lambda: reports.page(id))
    name = quote(f"{path.parent.name}.html", safe="")
    return FileResponse(
        path,
        media_type="application/octet-stream",
        headers={
            "content-disposition": f"attachment; filename*=UTF-8''{name}",
            "content-security-policy": "default-src 'none'; sandbox",
            "x-content-type-options": "nosniff",
        },
    )


def _reports(exchange: Exchange) -> EvalReports:
    return EvalReports(_runner(exchange).folder)


def _runner(exchange: Exchange) -> EvalRunner:
    if exchange.services.evals is None:
        raise NotFound("This server shows no evaluations. Start it with --eval-reports.")
    return exchange.services.evals
