"""`/v1/eval_reports`: results of evaluations, read-only, for admins."""

from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from personae.api.eval_reports.reader import EvalReports, Report, ReportInfo
from personae.api.exchange import Exchange, exchange_of
from personae.api.http.operation import Content, operation
from personae.api.respond import json_response
from personae.errors import NotFound


class ReportList(msgspec.Struct, frozen=True):
    """The runs, the newest first."""

    data: list[ReportInfo]
    object: str = "list"


@operation("GET", "/v1/eval_reports", answers={200: ReportList}, refuses=(404,), admin=True)
async def list_eval_reports(request: Request) -> Response:
    """List the runs of `personae eval` in the folder of --eval-reports."""
    exchange = exchange_of(request)
    reports = _reports(exchange)
    return json_response(ReportList(await exchange.off_loop(reports.list)))


@operation("GET", "/v1/eval_reports/{id}", answers={200: Report}, refuses=(404,), admin=True)
async def get_eval_report(request: Request) -> Response:
    """Show the tables of a run, and cases that failed."""
    exchange = exchange_of(request)
    reports, id = _reports(exchange), request.path_params["id"]
    return json_response(await exchange.off_loop(lambda: reports.get(id)))


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
    folder = exchange.settings.eval_reports
    if folder is None:
        raise NotFound("This server shows no evaluations. Start it with --eval-reports.")
    return EvalReports(folder)
